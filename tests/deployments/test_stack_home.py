"""The home folder of the embedded stack, and what is said when something is wrong with it; nothing but a supervisor runs here."""

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.errors import StackError
from deployments.local import control, health, services, serving, settings, swift
from deployments.local import stack as embedded


@pytest.fixture
def clean(monkeypatch):
    """No variable of a stack is set."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "MLFLOW_", "PREFECT_", "RATCHET_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def home(tmp_path, clean):
    """A home that has ports and credentials, and in which nothing runs."""
    state = settings.remembered(tmp_path) | {"store": "s3"}
    settings.save(tmp_path, state)
    settings.credentials(tmp_path)
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_a_taken_port_is_one_sentence_and_nothing_is_started(tmp_path, clean):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StackError) as raised:
            embedded.up(
                tmp_path,
                {"prefect": settings.free_port(), "mlflow": port, "s3": settings.free_port()},
                say=lambda line: None,
            )
    command = " ".join(psutil.Process().cmdline())[:120]
    assert str(raised.value) == (
        f"port {port} of mlflow is taken by process {os.getpid()} ({command}): "
        "stop that, or choose another with `ratchet up --mlflow-port` or RATCHET_MLFLOW_PORT"
    )
    assert control.processes(tmp_path) == [] and not (tmp_path / "stack.json").exists()


def test_ports_come_from_the_argument_then_the_environment_then_memory(home, clean):
    clean.setenv("RATCHET_PREFECT_PORT", "4201")
    clean.setenv("RATCHET_MLFLOW_PORT", "5001")
    assert settings.wanted_ports(settings.load(home), {"prefect": 4202}) == {
        "prefect": 4202,
        "mlflow": 5001,
        "s3": 8333,
    }


@pytest.mark.parametrize("value", ["http", "0", "65536", "-1"])
def test_what_is_no_port_is_refused(home, clean, value):
    clean.setenv("RATCHET_S3_PORT", value)
    with pytest.raises(
        StackError,
        match=rf"^RATCHET_S3_PORT is '{value}' and must be a number from 1 to 65535: correct it or unset it$",
    ):
        settings.wanted_ports(settings.load(home), None)


def test_two_services_cannot_share_a_port(home):
    with pytest.raises(
        StackError,
        match=r"^port 5000 is given to mlflow and to another service: choose another with RATCHET_MLFLOW_PORT$",
    ):
        settings.wanted_ports(settings.load(home), {"s3": 5000})


def test_the_environment_leads_to_the_stack(home):
    env = settings.environment(home)
    expected = {
        "PREFECT_API_URL": "http://127.0.0.1:4200/api",
        "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:8333",
        "MLFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:8333",
        "AWS_ACCESS_KEY_ID": "ratchet:ratchet",
        "AWS_SECRET_ACCESS_KEY": settings.credentials(home)["secret_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "RATCHET_STORE": "s3://ratchet/runs",
        "RATCHET_HOME": str(home),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    }
    assert {name: env[name] for name in expected} == expected


def test_an_endpoint_of_the_users_own_never_gets_the_credentials_of_the_stack(home, clean):
    clean.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.org")
    clean.setattr(os, "environ", os.environ.copy())
    settings.apply(home)
    assert [n for n in os.environ if n.startswith("AWS_")] == [
        "AWS_ENDPOINT_URL_S3"
    ] and "RATCHET_STORE" not in os.environ
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"


def test_credentials_of_the_users_own_are_never_sent_to_the_stack(home, clean):
    clean.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    clean.setenv("AWS_SESSION_TOKEN", "token")
    clean.setattr(os, "environ", os.environ.copy())
    settings.apply(home)
    assert os.environ["AWS_ACCESS_KEY_ID"] == "ratchet:ratchet" and "AWS_SESSION_TOKEN" not in os.environ


def test_services_of_the_users_own_win(home, clean):
    clean.setenv("PREFECT_API_URL", "https://prefect.example.org/api")
    clean.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    clean.setattr(os, "environ", os.environ.copy())
    settings.apply(home)
    assert (os.environ["PREFECT_API_URL"], os.environ["MLFLOW_TRACKING_URI"]) == (
        "https://prefect.example.org/api",
        "https://mlflow.example.org",
    )
    assert "PREFECT_HOME" not in os.environ and os.environ["AWS_ENDPOINT_URL_S3"] == "http://127.0.0.1:8333"


def test_servers_do_not_inherit_settings_that_are_meant_for_others(home, clean):
    clean.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://team")
    clean.setenv("MLFLOW_BACKEND_STORE_URI", "postgresql://team")
    names = set(services.command(home, "prefect")[1]) | set(services.command(home, "mlflow")[1])
    assert not names & {"PREFECT_API_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"}


def test_no_secret_is_on_a_command_line(home):
    secret = settings.credentials(home)["secret_key"]
    assert all(secret not in " ".join(services.command(home, name)[0]) for name in services.names("s3"))


def test_without_xattrs_a_plain_directory_is_the_store(home, clean):
    def refuse(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    clean.setattr(os, "setxattr", refuse, raising=False)
    clean.setattr(sys, "platform", "linux")
    assert (
        swift.obstacle(home)
        == f"Swift needs user xattrs and the file system of {home} refuses them (Operation not supported)"
    )
    settings.save(home, settings.load(home) | {"store": "directory"})
    env = settings.environment(home)
    assert env["RATCHET_STORE"] == f"file://{home}/store" and not any(name.startswith("AWS_") for name in env)
    assert services.names("directory") == ["mlflow", "prefect", "worker"]


def test_elsewhere_than_on_linux_swift_is_said_not_to_run(home, clean):
    clean.setattr(sys, "platform", "darwin")
    assert swift.obstacle(home) == "Swift runs on Linux alone and this is darwin"


def test_a_home_too_deep_for_a_socket_gets_one_elsewhere(tmp_path):
    deep = tmp_path / ("d" * 100)
    assert len(settings.remembered(deep)["socket"]) <= settings.SOCKET_LIMIT and deep.is_dir()


def test_no_stack_is_one_sentence(tmp_path):
    with pytest.raises(StackError, match=rf"^{tmp_path} holds no embedded stack: start one with `ratchet up`$"):
        settings.environment(tmp_path)
    assert embedded.status(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[]", "no JSON object"),
        ("null", "no JSON object"),
        ("{}", "ports is no JSON object"),
        (
            '{"ports": {"prefect": 4200, "mlflow": "5000", "s3": 8333}, "socket": "/s", "store": "s3"}',
            "port mlflow is no number from 1 to 65535",
        ),
        (
            '{"ports": {"prefect": 4200, "mlflow": 5000, "s3": 8333, "object": 0}, "socket": "/s", "store": "s3"}',
            "port object is no number from 1 to 65535",
        ),
        (
            '{"ports": {"prefect": 4200, "mlflow": 5000, "s3": 8333}, "socket": "/s", "store": ["s3"]}',
            "store is neither s3 nor directory",
        ),
        (
            '{"ports": {"prefect": 4200, "mlflow": 5000, "s3": 8333}, "socket": 7, "store": "s3"}',
            "socket is no absolute path",
        ),
    ],
)
def test_a_damaged_state_is_one_sentence(tmp_path, text, wrong):
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(StackError) as raised:
        settings.load(tmp_path)
    assert str(raised.value) == f"{tmp_path}/stack.json is damaged ({wrong}): remove it and call `ratchet up`"


def test_a_state_that_is_no_json_is_one_sentence(tmp_path):
    (tmp_path / "stack.json").write_text("")
    with pytest.raises(StackError) as raised:
        settings.load(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path}/stack.json is not readable as JSON (Expecting value: line 1 column 1 (char 0)): remove it and call `ratchet up`"
    )


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{bad", "no JSON, Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "no JSON object"),
        ("{}", "no access_key, secret_key, hash_prefix, hash_suffix"),
        (
            '{"access_key": "ratchet:ratchet", "secret_key": "s", "hash_prefix": 1, "hash_suffix": ""}',
            "no hash_prefix, hash_suffix",
        ),
    ],
)
def test_damaged_credentials_are_one_sentence_and_never_replaced_unasked(home, text, wrong):
    (home / "credentials.json").write_text(text)
    with pytest.raises(StackError) as raised:
        settings.environment(home)
    assert str(raised.value) == (
        f"{home}/credentials.json is damaged ({wrong}): restore it, or call `ratchet down`, remove it, and `ratchet up` makes a new one, "
        "but all that the S3 store holds is lost without the old hash_prefix and hash_suffix, "
        f"which {home}/swift/swift.conf keeps until then"
    )
    assert (home / "credentials.json").read_text() == text


@pytest.mark.parametrize(
    "text",
    ["{bad", "[]", "null", "{}", '{"digest": "d"}', '{"digest": "d", "names": 1}', '{"digest": "d", "names": [[]]}'],
)
def test_a_damaged_record_of_deployments_counts_as_none(tmp_path, text):
    (tmp_path / "deployed.json").write_text(text)
    assert serving.last_deployed(tmp_path / "deployed.json") == (None, set())


def test_a_record_of_deployments_is_read_back(tmp_path):
    (tmp_path / "deployed.json").write_text('{"digest": "d", "names": ["promote", "rollback"]}')
    assert serving.last_deployed(tmp_path / "deployed.json") == ("d", {"promote", "rollback"})


@pytest.mark.parametrize("below", ["", "/home", "/deeper/home"])
def test_a_home_that_cannot_be_made_is_one_sentence(tmp_path, clean, below):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(StackError) as raised:
        embedded.up(Path(f"{tmp_path}/file{below}"))
    reason = "Not a directory" if below else "File exists"
    path = f"{tmp_path}/file{below}"
    assert (
        str(raised.value)
        == f"{path} cannot be the home of the stack ({path}: {reason}): set RATCHET_HOME to a folder that can be written"
    )
    assert (tmp_path / "file").read_text() == "kept"


def test_a_home_below_a_file_holds_no_stack(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match=rf"^{tmp_path}/file holds no embedded stack: start one with `ratchet up`$"):
        settings.environment(tmp_path / "file")


def test_a_state_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(StackError) as raised:
        settings.save(tmp_path / "gone", {})
    reason = (
        "cannot be written (No such file or directory): mend that, or set RATCHET_HOME to a folder that can be written"
    )
    assert str(raised.value) == f"{tmp_path}/gone/stack.json {reason}"


def test_a_service_that_does_not_stay_up_is_reported_with_the_end_of_its_log(tmp_path):
    log = tmp_path / "mlflow.log"
    log.write_text("starting\nno space left on device\n")
    with pytest.raises(
        StackError,
        match=rf"^mlflow does not stay up \(fatal\): see {log}, which ends\nstarting\nno space left on device$",
    ):
        health.wait("mlflow", lambda: False, lambda: "FATAL", log, 5)


def test_a_watched_stack_goes_down_when_the_process_ends(home):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as watched:
        control.start_supervisor(home, settings.load(home), [], watched.pid)
        assert control.running(home)
    until = time.monotonic() + 30
    while control.processes(home) and time.monotonic() < until:
        time.sleep(0.2)
    assert control.processes(home) == [] and Path(home / "stack.json").exists()
