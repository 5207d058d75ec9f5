# `make run` and `make test` install everything they need. You can repeat them at any time.
PYTHON ?= python3.11
BIN := .venv/bin
# pip compiles one file at a time; `compileall` below uses all cores.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

.PHONY: run test chaos install lint smollm2 down

run: install
	$(BIN)/ratchet up
	$(BIN)/ratchet run tiny

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadgroup

# Kills a random process of the pipeline at a random moment, ROUNDS times, and compares the results.
ROUNDS ?= 30
SEED ?= 1
chaos: install
	$(BIN)/python tests/support/chaos.py $(ROUNDS) $(SEED)

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(PIP_FLAGS) torch -c constraints.txt
	$(BIN)/pip install $(PIP_FLAGS) -e '.[dev]' -c constraints.txt
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # some packages ship files for later Pythons
	touch $@

lint: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smollm2: install
	$(BIN)/python -m deployments.smollm2 .ratchet/models/smollm2-135m-instruct

down:
	$(BIN)/ratchet down
