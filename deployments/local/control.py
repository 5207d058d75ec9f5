"""Supervisor, the process manager: its configuration, its start, its XML-RPC interface; and the sweep of what a crash has left."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

import psutil
from supervisor.xmlrpc import SupervisorTransport, UnixStreamHTTPConnection

from configs.errors import StackError
from deployments.local import settings
from deployments.local.health import tail

MARK = "RATCHET_STACK"  # in the environment of every process of a stack: its home
GRACE = 12.0  # seconds that services get to end by themselves

# Relative to the home, where supervisord starts: its format expands some paths twice, so that a `%` in one cannot be written.
HEAD = """[supervisord]
logfile = logs/supervisord.log
logfile_maxbytes = 1MB
logfile_backups = 1
pidfile = supervisord.pid
identifier = ratchet
minfds = 1024
{user}
[unix_http_server]
file = {socket}
chmod = 0600

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""

PROGRAM = """
[program:{name}]
command = "%(ENV_RATCHET_PYTHON)s" -m deployments.local.{module} . {argument}
autostart = {autostart}
autorestart = true
startsecs = 2
startretries = 3
stopwaitsecs = 10
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = logs/{name}.log
stdout_logfile_maxbytes = 10MB
stdout_logfile_backups = 2
"""


class _Connection(UnixStreamHTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)  # a stopped supervisord must not stop us
        self.sock.connect(self.socketfile)


def rpc(socket_path: str) -> Any:
    """Supervisor's XML-RPC namespace of that name."""
    transport = SupervisorTransport(None, None, f"unix://{socket_path}")

    def connection() -> _Connection:
        made = _Connection("localhost")
        made.socketfile = socket_path
        return made

    transport._get_connection = connection
    return ServerProxy("http://127.0.0.1", transport=transport).supervisor


def running(home: Path) -> bool:
    """Whether a supervisor answers for this home."""
    if not (home / "stack.json").exists():
        return False
    try:
        return rpc(settings.load(home)["socket"]).getState()["statename"] == "RUNNING"
    except OSError:
        return False


def start_supervisor(home: Path, state: dict[str, Any], names: list[str], die_with: int | None) -> None:
    """Starts supervisord, detached, with every service known and none started. Raises StackError when it does not answer."""
    logs = home / "logs"
    config = home / "supervisord.conf"
    config.write_text(_configuration(state["socket"], names, die_with))
    with open(logs / "supervisord.out", "wb") as out:
        env = dict(os.environ) | {MARK: str(home), "RATCHET_HOME": str(home), "RATCHET_PYTHON": sys.executable}
        subprocess.run(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(config)],
            cwd=home,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    until = time.monotonic() + 20
    while not running(home):
        if time.monotonic() > until:
            raise StackError(
                f"supervisord does not start in {home}: its output ends\n{tail(logs / 'supervisord.out')}\n{tail(logs / 'supervisord.log')}"
            )
        time.sleep(0.05)


def start(socket_path: str, name: str) -> None:
    """Has supervisor start a service, unless it runs; does not wait."""
    server = rpc(socket_path)
    if server.getProcessInfo(name)["statename"] not in ("RUNNING", "STARTING", "BACKOFF"):
        server.startProcess(name, False)


def processes(home: Path) -> list[psutil.Process]:
    """Every process of this home's stack, flow runs of its worker included; the caller and its parents are not."""
    me = psutil.Process()
    mine = {me.pid, *(p.pid for p in me.parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and process.environ().get(MARK) == str(home):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or gone
            continue
    return found


def stop_all(home: Path) -> None:
    """Ends every process of the stack: asked, then told, then killed; at most about 25 seconds. Raises StackError when one stays."""
    if running(home):
        with contextlib.suppress(OSError, Fault):  # it hangs or ends already: the sweep below needs no help
            rpc(settings.load(home)["socket"]).stopAllProcesses(False)
        _wait_until(lambda: all("supervisor.supervisord" in _command(p) for p in processes(home)), GRACE)
    for ending in (psutil.Process.terminate, psutil.Process.kill):
        left = processes(home)
        for process in left:
            try:
                ending(process)
            except psutil.NoSuchProcess:
                continue
        if _wait_until(lambda: not processes(home), 6):
            return
    left = ", ".join(f"{p.pid}" for p in processes(home))
    raise StackError(f"processes {left} of the stack in {home} cannot be ended: end them by hand")


def _wait_until(true: Any, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (done := true()) and time.monotonic() < until:
        time.sleep(0.1)
    return done


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "supervisor.supervisord"  # gone: nothing to wait for


def _configuration(socket_path: str, names: list[str], die_with: int | None) -> str:
    user = "user = root\n" if os.getuid() == 0 else ""
    programs = [(name, "services", name, "false") for name in names]
    if die_with is not None:
        programs.append(("watch", "watch", die_with, "true"))
    text = HEAD.format(socket=socket_path.replace("%", "%%"), user=user)
    return text + "".join(PROGRAM.format(name=n, module=m, argument=a, autostart=s) for n, m, a, s in programs)
