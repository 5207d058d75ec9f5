"""Up, down, status."""

import contextlib
import fcntl
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.errors import StackError
from deployments.local import control, health, services, serving, settings, swift

BUCKETS = ("ratchet", "mlflow")
PATIENCE = 180.0  # seconds for one service to answer


def up(
    home: Path,
    ports: dict[str, int] | None = None,
    deploy: bool = True,
    say: Callable[[str], Any] = print,
    die_with: int | None = None,
    project: Path | None = None,
) -> dict[str, str]:
    """Brings everything up that is not, waits until each service answers, and returns `{"prefect", "mlflow", "s3"}` with their URLs.

    ports: public ports by service, instead of the environment's, the remembered or the default ones.
    deploy: also start the worker's deployments as prefect.yaml names them.
    die_with: process id with whose end the stack goes down.
    project: folder that flow runs work in; none means the current one.
    Raises StackError: a home that cannot be written, a port that is taken, a service that does not come up (with the end of its log).
    """
    home, project = Path(home).resolve(), Path(project or ".").resolve()
    with _lock(home) as fresh:
        already = control.running(home)
        try:
            state = _continued(home, ports) if already else _prepared(home, ports, say)
            if not already:
                control.stop_all(home)  # what a killed supervisor has left
                _claim(home, state)
        except BaseException:
            if fresh:  # nothing half-made stays behind
                shutil.rmtree(home)
            raise
        try:
            if not already:
                control.start_supervisor(home, state, services.names(state["store"]), die_with)
            _start(home, state, deploy, project, say)
        except BaseException:
            if not already:
                control.stop_all(home)
            raise
    urls = settings.urls(state, home)
    for name, url in urls.items():
        say(f"{name:<8} {url}")
    return urls


def down(home: Path) -> None:
    """Ends every process of the stack, flow runs of its worker included; data stays. Raises StackError when one cannot be ended."""
    home = Path(home).resolve()
    if home.exists():
        with _lock(home):
            control.stop_all(home)


def status(home: Path) -> list[dict[str, Any]]:
    """A row `{"service", "state", "url", "pid"}` per service; empty where no stack was ever started."""
    home = Path(home).resolve()
    if not (home / "stack.json").exists():
        return []
    state = settings.load(home)
    known = {p["name"]: p for p in control.rpc(state["socket"]).getAllProcessInfo()} if control.running(home) else {}
    urls = settings.urls(state, home)
    rows = (
        [{"service": "s3", "state": "DIRECTORY", "url": urls["s3"], "pid": None}]
        if state["store"] == "directory"
        else []
    )
    for name in services.names(state["store"]):
        info = known.get(name, {"statename": "STOPPED", "pid": 0})
        url = urls.get(name) if info["statename"] == "RUNNING" else None
        rows.append({"service": name, "state": info["statename"], "url": url, "pid": info["pid"] or None})
    return rows


@contextlib.contextmanager
def _lock(home: Path) -> Iterator[bool]:
    """One `up` or `down` per home at a time; the lock dies with its holder. Gives whether the home is new."""
    with contextlib.ExitStack() as held:
        with _writing(home):
            fresh = not home.exists()
            home.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(home / "lock", "w"))
        fcntl.flock(file, fcntl.LOCK_EX)
        yield fresh


@contextlib.contextmanager
def _writing(home: Path) -> Iterator[None]:
    """Folders and files of the home are made in the block. Raises StackError when the system refuses."""
    try:
        yield
    except OSError as error:
        what = f"{home} cannot be the home of the stack ({error.filename or home}: {error.strerror})"
        raise StackError(f"{what}: set RATCHET_HOME to a folder that can be written") from error


def _continued(home: Path, ports: dict[str, int] | None) -> dict[str, Any]:
    """State of a stack that runs. Raises StackError when other ports are asked for."""
    state = settings.load(home)
    for service, port in settings.wanted_ports(state, ports).items():
        if port != state["ports"][service]:
            raise StackError(
                f"port {port} is asked for {service}, which already runs on port {state['ports'][service]}: call `ratchet down` first"
            )
    return state


def _prepared(home: Path, ports: dict[str, int] | None, say: Callable[[str], Any]) -> dict[str, Any]:
    """Ports chosen, credentials made, Swift installed or found impossible."""
    state = settings.remembered(home)
    state["ports"] |= settings.wanted_ports(state, ports)
    with _writing(home):
        (home / "logs").mkdir(exist_ok=True)
    settings.credentials(home)
    if state["store"] is None:
        with _writing(home):
            obstacle = swift.obstacle(home)
        state["store"] = "directory" if obstacle else "s3"
        if obstacle:
            say(f"{obstacle}: artifacts are stored under {home / 'store'} instead.")
    if state["store"] == "directory":
        with _writing(home):
            (home / "store").mkdir(exist_ok=True)
    else:
        swift.install(home / "logs" / "swift-install.log", say)
    return state


def _claim(home: Path, state: dict[str, Any]) -> None:
    """Makes sure of every port, then writes what the services read when they start."""
    public = [name for name in settings.PORTS if name != "s3" or state["store"] == "s3"]
    for service in public:
        health.require_free(service, state["ports"][service])
    if state["store"] == "s3":
        for role in settings.INTERNAL:
            if role not in state["ports"] or health.taken(state["ports"][role]):
                state["ports"][role] = settings.free_port()
        swift.configure(home, state["ports"], settings.credentials(home))
    settings.save(home, state)


def _start(home: Path, state: dict[str, Any], deployments: bool, project: Path, say: Callable[[str], Any]) -> None:
    """Starts the services side by side and returns when all answer."""
    urls = settings.urls(state, home)
    api = f"{urls['prefect']}/api"
    for name in services.names(state["store"]):
        if name != "worker":
            control.start(state["socket"], name)
    await_service = _Waiter(home, state["socket"])
    await_service("prefect", lambda: health.answers(f"{api}/health"))
    serving.work_pool(api)
    serving.automations(api)
    control.start(state["socket"], "worker")
    with _aside(lambda: deployments and serving.deploy(home, api, project) and say("Deployed the flows to Prefect")):
        if state["store"] == "s3":
            await_service("s3", lambda: health.answers(f"{urls['s3']}/healthcheck"))
            await_service("s3-container", lambda: _buckets(home))
        await_service("mlflow", lambda: health.answers(f"{urls['mlflow']}/health"))
        await_service("worker", lambda: serving.worker_online(api, await_service.info("worker")["start"]))


class _Waiter:
    def __init__(self, home: Path, socket_path: str) -> None:
        self.logs, self.rpc = home / "logs", control.rpc(socket_path)

    def __call__(self, name: str, ready: Callable[[], bool]) -> None:
        health.wait(name, ready, lambda: self.info(name)["statename"], self.logs / f"{name}.log", PATIENCE)

    def info(self, name: str) -> dict[str, Any]:
        return self.rpc.getProcessInfo(name)


@contextlib.contextmanager
def _aside(work: Callable[[], Any]) -> Iterator[None]:
    """Does the work in a thread while the block runs; raises what it raised."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if raised:
        raise raised[0]


def _buckets(home: Path) -> bool:
    """Whether the buckets are there, made now where they were not; False while the store is not ready."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    env = settings.environment(home)
    client = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL_S3"],
        region_name=env["AWS_DEFAULT_REGION"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=20,
            proxies={},
        ),
    )
    try:
        there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        for name in BUCKETS:
            if name not in there:
                client.create_bucket(Bucket=name)
    except (BotoCoreError, ClientError):
        return False
    return True
