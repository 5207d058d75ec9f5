"""Who works on a stage key: `owner.json` beside its artifact, from the beginning of the work until the artifact is there.

It is no lock (tasks/locks.py is): it counts the attempts, and tells those who wait, and the garbage collector, whether somebody is still at it.
"""

import os
import platform
from datetime import UTC, datetime

import psutil
from pydantic import BaseModel, ValidationError

from tasks.core.store import Store


class Owner(BaseModel):
    """One attempt at a stage: its number, its process, its pipeline run and its lease, and the digests of its inputs."""

    attempt: int
    flow_run: str | None
    host: str
    pid: int
    started: float
    lease: str | None
    inputs: dict[str, str]
    created: str

    def gone(self) -> bool | None:
        """Whether the process has ended; None where it is one of another machine."""
        if self.host != host():
            return None
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) > 1
        except psutil.NoSuchProcess:
            return True


def host() -> str:
    """This machine, or this container of it: where a process id means something."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def read(store: Store, prefix: str) -> Owner | None:
    """Who works, or worked last, on an artifact that is not there; None where nobody did, or the note cannot be read."""
    data = store.get_bytes(f"{prefix}/owner.json")
    try:
        return None if data is None else Owner.model_validate_json(data)
    except ValidationError:
        return None


def take(store: Store, prefix: str, flow_run: str | None, lease: str | None, inputs: dict[str, str]) -> Owner:
    """Notes that this process begins the next attempt."""
    before = read(store, prefix)
    owner = Owner(
        attempt=before.attempt + 1 if before else 1,
        flow_run=flow_run,
        host=host(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        lease=lease,
        inputs=inputs,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    store.put_bytes(f"{prefix}/owner.json", owner.model_dump_json(indent=1).encode())
    return owner


def leave(store: Store, prefix: str) -> None:
    """The artifact is there: the note goes."""
    store.delete([f"{prefix}/owner.json"])
