import json
import socket
import subprocess
import sys

import pytest

from flows import cli


@pytest.fixture
def ratchet(monkeypatch, capsys, tmp_path):
    """Calls the command in an empty folder; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ratchet", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return call


@pytest.fixture
def rows(tmp_path):
    """Writes a JSON Lines file with one sum per answer and returns its path."""

    def write(*answers):
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(
                json.dumps({"question": f"What is {i} + 0?", "answer": answer}) + "\n"
                for i, answer in enumerate(answers)
            )
        )
        return path

    return write


REFUSED = {
    "misspelt key": (
        ["tiny", "--set", "grpo.kl_coeff=0.1"],
        "ratchet: grpo.kl_coeff is not a field of the configuration: did you mean kl_coef?\n",
    ),
    "batch": (
        ["tiny", "--set", "grpo.batch_size=100"],
        "ratchet: grpo.batch_size is 100: with 1 accumulation steps and 1 processes that is 100 completions a step, "
        "which must be a multiple of grpo.num_generations = 8: set batch_size to 96 or 104\n",
    ),
    "no value": (
        ["tiny", "--set", "grpo.batch_size"],
        "ratchet: --set 'grpo.batch_size' must have the form section.field=value\n",
    ),
}


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_configuration_is_one_sentence_and_exit_code_2(ratchet, command, name):
    arguments, sentence = REFUSED[name]
    assert ratchet(command, *arguments) == (2, "", sentence)


def test_missing_configuration_file_is_exit_code_2(ratchet):
    code, _, err = ratchet("check", "missing.yaml")
    assert (code, err.count("\n")) == (2, 1)


def test_check_prints_batch_arithmetic(ratchet):
    code, out, _ = ratchet("check", "tiny")
    assert code == 0
    assert (
        "a step takes 128 x 1 accumulation x 1 processes = 128 completions = 16 prompts x 8; "
        "3,448 of 3,448 samples; 216 steps an epoch, 40 in all"
    ) in out


def test_check_estimates_memory(ratchet):
    assert "memory per process on cpu, roughly: " in ratchet("check", "tiny", "--set", "compute.device=cpu")[1]


def test_unparseable_gold_answer_is_named_with_its_line(ratchet, rows):
    code, _, err = ratchet("check", "tiny", "--set", f"data.path={rows('#### 0', 'no answer')}")
    assert (code, "line 2" in err, err.count("\n")) == (2, True, 1)


def test_path_without_a_model_is_named(ratchet, tmp_path):
    code, _, err = ratchet("check", "tiny", "--set", f"model.name={tmp_path}")
    assert (code, err) == (
        2,
        f"ratchet: model.name is {tmp_path}, which holds no config.json: give the folder of a Hugging Face model\n",
    )


def test_store_that_does_not_answer_is_exit_code_2(ratchet, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    code, out, err = ratchet("run", "tiny", "--set", "storage.root=s3://b")
    assert (code, out, err.startswith("ratchet: storage.root is s3://b and the S3 store at http://127.0.0.1:9")) == (
        2,
        "",
        True,
    )


@pytest.mark.parametrize(
    ("variable", "address"),
    [("MLFLOW_TRACKING_URI", "http://127.0.0.1:9"), ("PREFECT_API_URL", "http://127.0.0.1:9/api")],
)
def test_server_that_does_not_answer_is_exit_code_2(ratchet, monkeypatch, dir_root, variable, address):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv(variable, address)
    code, out, err = ratchet("run", "tiny", "--set", f"storage.root={dir_root}")
    assert (code, out, address in err, err.count("\n")) == (2, "", True, 1)


def test_no_mlflow_server_at_all_names_the_remedy(ratchet, monkeypatch, dir_root):
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RATCHET_HOME"):
        monkeypatch.delenv(variable, raising=False)
    code, _, err = ratchet("run", "tiny", "--set", f"storage.root={dir_root}")
    assert (code, "ratchet up" in err) == (2, True)


def test_port_that_is_taken_is_named_with_its_holder(ratchet, monkeypatch):
    monkeypatch.delenv("RATCHET_HOME", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = ratchet("up", "--prefect-port", str(port))
    assert (code, str(port) in err, "prefect" in err.lower(), err.count("\n")) == (2, True, True, 1)


def test_env_leads_another_program_to_the_stack(stack, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ratchet", "env"])
    with pytest.raises(SystemExit):
        cli.main()
    exported = capsys.readouterr().out
    shown = subprocess.run(
        ["sh", "-c", exported + 'printf "%s %s" "$MLFLOW_TRACKING_URI" "$AWS_ENDPOINT_URL_S3"'],
        capture_output=True,
        text=True,
        env={},
    )
    assert shown.stdout == f"{stack['mlflow']} {stack['s3']}"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "PREFECT_API_URL",
            "http://[::1",
            "ratchet: PREFECT_API_URL is 'http://[::1' and must be an http(s) address (",
        ),
        (
            "MLFLOW_TRACKING_URI",
            "ftp://x",
            "ratchet: MLFLOW_TRACKING_URI is 'ftp://x' and must be the http(s) address of an MLflow server",
        ),
        (
            "RATCHET_STORE",
            "file:///no/such/folder",
            "ratchet: the store's root is file:///no/such/folder, and there is no such folder",
        ),
    ],
)
def test_an_invalid_address_is_one_sentence_for_gc(stack, ratchet, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    code, out, err = ratchet("gc")
    assert (code, out, err[: len(said)]) == (2, "", said)
