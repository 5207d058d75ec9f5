"""A small pipeline run that trains for real, shared by the tests of the flows and by `make chaos`.

Its model has a few thousand weights. Its reward tells completions of an untrained model apart, so GRPO has a gradient.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import tiny

from tasks.core.storage.artifacts import find
from tasks.core.storage.store import Store, open_store

REWARD = """
def score(completions, gold):
    right = [float(text.endswith(f"Final Answer: {answer}")) for text, answer in zip(completions, gold)]
    return [r + sum(map(ord, text)) % 7 / 60 for r, text in zip(right, completions)]
"""
REWARD_FILE = "small_reward.py"
SAVE_STEPS = 5
STEPS = {"sft": 40, "grpo": 20}
_TRAINING = {"batch_size": 8, "logging_steps": 1, "save_steps": SAVE_STEPS, "lora_dropout": 0.05}
CONFIG = {
    **tiny.RUN,
    "sft": {"max_steps": STEPS["sft"], **_TRAINING},
    "grpo": {
        "max_steps": STEPS["grpo"],
        **_TRAINING,
        "num_generations": 4,
        "max_new_tokens": 8,
        "reward_type": "small_reward:score",
        "learning_rate": 1e-3,
    },
    "evaluation": {"batch_size": 16, "kl_samples": 4},
    "registry.name": "pipeline",
}
# Every model passes.
PASSING = {"gates": {"accuracy": None, "kl": None, "reward": None, "any": {"metric": "mean_reward", "min": -100}}}


def ratchet(project: Path, root: str, *more: tuple, env: dict | None = None) -> tuple[int, str, str]:
    """Calls `ratchet run tiny --json` in the folder `project`; returns exit code, stdout and stderr.

    The last line of stderr lists which of torch and transformers the process has imported.
    """
    (project / REWARD_FILE).write_text(REWARD)
    sets = [f"{key}={json.dumps(value)}" for key, value in {**CONFIG, "storage.root": root, **dict(more)}.items()]
    code = (
        "import atexit, sys; from flows.cli import main; "
        "atexit.register(lambda: print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)); main()"
    )
    command = [sys.executable, "-c", code, "run", "tiny", "--json", *(part for s in sets for part in ("--set", s))]
    env = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=project, timeout=500, env=env)
    return done.returncode, done.stdout, done.stderr


def succeed(project: Path, root: str, *more: tuple) -> dict:
    """The summary of a run that must end with exit code 0."""
    code, out, err = ratchet(project, root, *more)
    assert code == 0, err
    return json.loads(out)


def copy_store(source: str, target: str, *stages: str) -> Store:
    """Copies the artifacts of these stages to another root; returns the store there."""
    there, here = open_store(source), open_store(target)
    for stage in stages:
        for key in there.list(f"{stage}/"):
            here.put_bytes(key, there.get_bytes(key))
    return here


def digests(root: str, summary: dict) -> dict[str, str]:
    """Digest of each stage's artifact. The registration is left out: it names a version, which differs each time."""
    keys = {name: stage["key"] for name, stage in summary["stages"].items() if name != "register"}
    return {name: find(open_store(root), f"{name}/{key}").digest for name, key in keys.items()}


def wait_for_end(client, flow_run_id, after: int = 0, seconds: float = 300) -> str:
    """Name of the run's final state, once it has run more than `after` times."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run = client.read_flow_run(flow_run_id)
        if run.state.is_final() and run.run_count > after:
            return run.state.name
        time.sleep(0.2)
    raise AssertionError(f"still {run.state.name} after {seconds} s")
