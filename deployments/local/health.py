"""Waiting until a service answers, and finding who holds a port."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from configs.errors import StackError

_open = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
).open  # loopback: whatever proxy is set, not through it


def answers(url: str) -> bool:
    """Whether a GET is answered with success within seconds."""
    try:
        with _open(url, timeout=5) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False


def ask(url: str, body: Any = None, method: str | None = None) -> Any:
    """The JSON answer to a GET, or to a POST where there is a body and no other method; None for 404. Raises OSError (HTTPError among them)."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with _open(
            urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"}, method=method),
            timeout=20,
        ) as reply:
            return json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def wait(service: str, ready: Callable[[], bool], state: Callable[[], str], log: Path, seconds: float) -> None:
    """Returns when `ready`. Raises StackError with the end of the log when supervisor gives the service up or time is over."""
    until = time.monotonic() + seconds
    while not ready():
        if (now := state()) in ("FATAL", "EXITED", "STOPPED", "UNKNOWN"):
            raise StackError(f"{service} does not stay up ({now.lower()}): see {log}, which ends\n{tail(log)}")
        if time.monotonic() > until:
            raise StackError(f"{service} does not answer after {seconds:g} seconds: see {log}, which ends\n{tail(log)}")
        time.sleep(0.1)


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").strip().splitlines()[-lines:]) if log.exists() else "(no log)"


def taken(port: int) -> bool:
    """Whether somebody listens on this loopback port."""
    with socket.socket() as s:
        s.settimeout(2)
        if s.connect_ex(("127.0.0.1", port)) == 0:
            return True
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def require_free(service: str, port: int) -> None:
    """Raises StackError, naming port, service, holder and remedy, when the port is taken."""
    if taken(port):
        remedy = f"stop that, or choose another with `ratchet up --{service}-port` or RATCHET_{service.upper()}_PORT"
        raise StackError(f"port {port} of {service} is taken by {_holder(port)}: {remedy}")


def _holder(port: int) -> str:
    for process in psutil.process_iter():
        try:
            listening = [
                c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
            ]
            if listening and (home := process.environ().get("RATCHET_STACK")):
                return f"the embedded stack of {home} (process {process.pid}; `ratchet down` in the folder above it stops it, RATCHET_HOME={home} uses it)"
            if listening:
                return f"process {process.pid} ({' '.join(process.cmdline())[:120] or process.name()})"
        except (psutil.Error, OSError):  # another user's, or gone
            continue
    return "a process of another user"
