"""What each supervised process runs. As a module it becomes that process: `python -m deployments.local.services HOME SERVICE`.

Commands and environments are made when a process starts, so no secret and no odd path has to survive supervisor's configuration format.
"""

import os
import signal
import sys
from pathlib import Path

from deployments.local import settings, swift

SWIFT = {"s3-account": "account", "s3-container": "container", "s3-object": "object", "s3": "proxy"}
POOL = "ratchet"
WORKER = "ratchet-worker"


def names(store: str) -> list[str]:
    """The services of a stack whose store is `s3` or `directory`, in the order of a status table."""
    return [*(SWIFT if store == "s3" else ()), "mlflow", "prefect", "worker"]


def command(home: Path, service: str) -> tuple[list[str], dict[str, str]]:
    """Argument list and environment of a service."""
    if service == "worker":
        return _worker(home)
    state = settings.load(home)
    # A server takes its settings from here alone: what the user has set for clients or for other servers must not reach it.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "AWS_"))
    } | settings.environment(home)
    if service in SWIFT:
        return swift.command(home, SWIFT[service]), env
    if service == "mlflow":
        return _mlflow(home, state, env)
    return _prefect(state, env)


def _mlflow(home: Path, state: dict, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    folder = home / "mlflow"
    folder.mkdir(exist_ok=True)
    artifacts = "s3://mlflow" if state["store"] == "s3" else (folder / "artifacts").as_uri()
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    del env["MLFLOW_TRACKING_URI"]
    options = {
        "host": "127.0.0.1",
        "port": state["ports"]["mlflow"],
        "workers": 1,
        "backend-store-uri": f"sqlite:///{folder / 'mlflow.db'}",
    }
    options["artifacts-destination"] = artifacts
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "mlflow", "server", "--serve-artifacts", *arguments], env


def _prefect(state: dict, env: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    port = str(state["ports"]["prefect"])
    env |= {
        "PREFECT_SERVER_UI_API_URL": env["PREFECT_API_URL"],
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # In memory, the leases of concurrency limits would be lost with the server, and with them the runs that hold one.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    }
    return [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port], env


def _worker(home: Path) -> tuple[list[str], dict[str, str]]:
    """The worker serves the embedded Prefect; the runs it starts use the user's own S3 and MLflow where the environment names them."""
    settings.apply(home)
    embedded = settings.environment(home)
    env = dict(os.environ) | {name: embedded[name] for name in ("PREFECT_API_URL", "PREFECT_HOME", "RATCHET_HOME")}
    env |= settings.RUNS
    env["RATCHET_WORKER"] = str(os.getpid())  # this process becomes the worker; its flow runs end with it
    env.pop("PREFECT_API_KEY", None)
    return [
        sys.executable,
        "-m",
        "prefect",
        "--no-prompt",
        "worker",
        "start",
        "--type",
        "process",
        "--pool",
        POOL,
        "--name",
        WORKER,
    ], env


def main(home: str, service: str) -> None:
    """Replaces this process by the service."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_DFL
        )  # a signal that was ignored stays ignored across exec, and stopping would fail
    arguments, env = command(Path(home).resolve(), service)
    os.execve(arguments[0], arguments, env)


if __name__ == "__main__":
    main(*sys.argv[1:])
