"""The home folder of the embedded stack and the environment variables that lead to it. Light: every command imports it."""

import json
import os
import secrets
import socket
import tempfile
from pathlib import Path
from typing import Any

from configs.errors import StackError

PORTS = {"prefect": 4200, "mlflow": 5000, "s3": 8333}
INTERNAL = ("account", "container", "object")
ACCESS_KEY = "ratchet:ratchet"
KEYS = ("access_key", "secret_key", "hash_prefix", "hash_suffix")
SOCKET_LIMIT = 90  # sun_path holds 104 bytes on macOS, and supervisor appends a process id while it binds

# How a process that runs a flow speaks with Prefect: signs of life, and patience with a server that restarts (2 + 4 + ... + 128 seconds).
RUNS = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "PREFECT_CLIENT_MAX_RETRIES": "7"}

# A group of variables is the embedded stack's only as long as none of these names another service.
DECIDING = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "mlflow": ("MLFLOW_TRACKING_URI",),
    "prefect": ("PREFECT_API_URL",),
    "common": (),
}


def default_home() -> Path:
    """`RATCHET_HOME`, else `.ratchet` in the current directory; absolute."""
    return Path(os.environ.get("RATCHET_HOME") or ".ratchet").resolve()


def load(home: Path) -> dict[str, Any]:
    """The remembered state: `ports`, `store` (`s3` or `directory`), `socket`. Raises StackError where no stack was ever started or it is damaged."""
    file = home / "stack.json"
    try:
        state = json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise StackError(f"{home} holds no embedded stack: start one with `ratchet up`") from None
    except OSError as error:
        raise StackError(
            f"{file} cannot be read ({error.strerror}): make it a file that you can read, or set RATCHET_HOME to another folder"
        ) from error
    except ValueError as error:
        raise StackError(f"{file} is not readable as JSON ({error}): remove it and call `ratchet up`") from error
    if wrong := _wrong_state(state):
        raise StackError(f"{file} is damaged ({wrong}): remove it and call `ratchet up`")
    return state


def save(home: Path, state: dict[str, Any]) -> None:
    """Writes the state in one step, so that a reader never sees half of it."""
    _write(home / "stack.json", json.dumps(state, indent=1, sort_keys=True) + "\n")


def remembered(home: Path) -> dict[str, Any]:
    """The state, or that of a home that was never used; creates the folder."""
    home.mkdir(parents=True, exist_ok=True)
    state = (
        load(home)
        if (home / "stack.json").exists()
        else {"ports": dict(PORTS), "store": None, "socket": str(home / "supervisor.sock")}
    )
    # A socket's path has a hard limit; a home too deep for it gets a private temporary folder, anew when that was cleaned away.
    if len(os.fsencode(state["socket"])) > SOCKET_LIMIT or not Path(state["socket"]).parent.is_dir():
        state["socket"] = str(Path(tempfile.mkdtemp(prefix="ratchet-")) / "supervisor.sock")
    return state


def wanted_ports(state: dict[str, Any], given: dict[str, int] | None) -> dict[str, int]:
    """Public ports: the argument, else the environment, else what is remembered. Raises StackError for what is no port."""
    wanted = {}
    for service in PORTS:
        name = f"RATCHET_{service.upper()}_PORT"
        value = (given or {}).get(service) or os.environ.get(name) or state["ports"][service]
        if not str(value).isdecimal() or not 1 <= int(value) <= 65535:
            raise StackError(f"{name} is {value!r} and must be a number from 1 to 65535: correct it or unset it")
        wanted[service] = int(value)
    for service, port in wanted.items():
        if list(wanted.values()).count(port) > 1:
            raise StackError(
                f"port {port} is given to {service} and to another service: choose another with RATCHET_{service.upper()}_PORT"
            )
    return wanted


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def credentials(home: Path) -> dict[str, str]:
    """`access_key`, `secret_key`, `hash_prefix`, `hash_suffix`: made on first use and kept, readable by their owner alone.

    Raises StackError where the file is damaged: made anew unasked, it would hide all that Swift has stored under the old hashes.
    """
    file = home / "credentials.json"
    if not file.exists():
        made = {"access_key": ACCESS_KEY} | {name: secrets.token_hex(20) for name in KEYS[1:]}
        _write(file, json.dumps(made, indent=1) + "\n")
    try:
        keys = json.loads(file.read_text())
    except OSError as error:
        raise StackError(
            f"{file} cannot be read ({error.strerror}): make it a file that you can read, or set RATCHET_HOME to another folder"
        ) from error
    except ValueError as error:
        raise _damaged_credentials(file, f"no JSON, {error}") from error
    if not isinstance(keys, dict):
        raise _damaged_credentials(file, "no JSON object")
    if wrong := [name for name in KEYS if not isinstance(keys.get(name), str) or not keys[name]]:
        raise _damaged_credentials(file, f"no {', '.join(wrong)}")
    return keys


def urls(state: dict[str, Any], home: Path) -> dict[str, str]:
    """Where each service is reached."""
    found = {name: f"http://127.0.0.1:{state['ports'][name]}" for name in PORTS}
    if state["store"] == "directory":
        found["s3"] = f"file://{home / 'store'}"  # not percent-encoded: the store takes the rest as a path
    return found


def environment(home: Path) -> dict[str, str]:
    """Every variable that makes Ratchet use this stack, whatever the user has set. Raises StackError where there is none."""
    return {name: value for group in _groups(home.resolve()).values() for name, value in group.items()}


def apply(home: Path) -> None:
    """Puts the stack's variables into `os.environ`; a service that the user has named by environment keeps all of its variables.

    Call it before Prefect, MLflow or boto3 are imported. Credentials go with their endpoint: those of the stack are never sent
    to a store of the user's, and the user's never to the stack.
    """
    for name, group in _groups(home.resolve()).items():
        if any(os.environ.get(variable, group.get(variable)) != group.get(variable) for variable in DECIDING[name]):
            continue
        if name == "s3" and "AWS_ENDPOINT_URL_S3" in group:
            os.environ.update({variable: value for variable, value in group.items() if variable.startswith("AWS_")})
            os.environ.pop("AWS_SESSION_TOKEN", None)
        for variable, value in group.items():
            os.environ.setdefault(variable, value)
    os.environ.update(_no_proxy())


def _wrong_state(state: Any) -> str | None:
    """What keeps this from being a state as `save` writes it; None where nothing does."""
    if not isinstance(state, dict):
        return "no JSON object"
    ports, address = state.get("ports"), state.get("socket")
    if not isinstance(ports, dict):
        return "ports is no JSON object"
    for name in (*PORTS, *(role for role in INTERNAL if role in ports)):
        port = ports.get(name)
        if type(port) is not int or not 1 <= port <= 65535:  # True is an int too
            return f"port {name} is no number from 1 to 65535"
    if state.get("store") not in ("s3", "directory"):
        return "store is neither s3 nor directory"
    return None if isinstance(address, str) and os.path.isabs(address) else "socket is no absolute path"


def _damaged_credentials(file: Path, wrong: str) -> StackError:
    return StackError(
        f"{file} is damaged ({wrong}): restore it, or call `ratchet down`, remove it, and `ratchet up` makes a new one, but all that the S3 store "
        f"holds is lost without the old hash_prefix and hash_suffix, which {file.parent / 'swift' / 'swift.conf'} keeps until then"
    )


def _groups(home: Path) -> dict[str, dict[str, str]]:
    state = load(home)
    url = urls(state, home)
    store = {"RATCHET_STORE": url["s3"]}
    if state["store"] != "directory":
        keys = credentials(home)
        store = {
            "AWS_ENDPOINT_URL_S3": url["s3"],
            "AWS_ACCESS_KEY_ID": keys["access_key"],
            "AWS_SECRET_ACCESS_KEY": keys["secret_key"],
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
            "MLFLOW_S3_ENDPOINT_URL": url["s3"],
            "RATCHET_STORE": "s3://ratchet/runs",
        }
    return {
        "s3": store,
        "mlflow": {"MLFLOW_TRACKING_URI": url["mlflow"]},
        "prefect": {"PREFECT_API_URL": f"{url['prefect']}/api", "PREFECT_HOME": str(home / "prefect")},
        "common": {
            "RATCHET_HOME": str(home),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **_no_proxy(),
        },
    }


def _no_proxy() -> dict[str, str]:
    """A proxy for the outside world must not be asked for loopback addresses."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return {}
    hosts = [h for h in (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",") if h]
    joined = ",".join(hosts + [h for h in ("127.0.0.1", "localhost") if h not in hosts])
    return {"no_proxy": joined, "NO_PROXY": joined}


def _write(file: Path, text: str) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # mode 0600
        with os.fdopen(handle, "w") as f:
            f.write(text)
        os.replace(temporary, file)
    except OSError as error:
        raise StackError(
            f"{file} cannot be written ({error.strerror}): mend that, or set RATCHET_HOME to a folder that can be written"
        ) from error
