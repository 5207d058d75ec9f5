"""Who works on a stage key: `owner.json` beside its artifact, from the beginning of the work until the artifact is there.

It is no lock (tasks/runtime/locks.py is): it counts the attempts, and tells those who wait, and the garbage collector, whether somebody is still at it.
"""

from datetime import UTC, datetime

from pydantic import BaseModel, ValidationError

from tasks.core.storage import processes
from tasks.core.storage.store import Store


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
        if self.host != processes.host():
            return None
        return processes.find(self.pid, self.started) is None


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
    pid, started = processes.myself()
    owner = Owner(
        attempt=before.attempt + 1 if before else 1,
        flow_run=flow_run,
        host=processes.host(),
        pid=pid,
        started=started,
        lease=lease,
        inputs=inputs,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    store.put_bytes(f"{prefix}/owner.json", owner.model_dump_json(indent=1).encode())
    return owner


def leave(store: Store, prefix: str) -> None:
    """The artifact is there: the note goes."""
    store.delete([f"{prefix}/owner.json"])
