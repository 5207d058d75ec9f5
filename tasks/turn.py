"""Whose turn it is to work on a stage: one run at a time per key, whatever the machine; a dead one's turn is taken over."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_run_logger

from tasks import locks
from tasks.core import owners
from tasks.core.store import Store

# A lease that nobody renews is gone by then; if the server has lost the lease and kept its slot, the limit goes: soon where the holder is known
# to be dead, late where nothing says who it is.
LONGEST_SECONDS, UNKNOWN_SECONDS = 3 * locks.LEASE_SECONDS, 3600


@contextmanager
def turn(store: Store, prefix: str, flow_run: str) -> Iterator[str]:
    """Waits until nobody else works on the stage key, and keeps others away while the block runs; gives the id of the lease.

    Raises Unavailable when the Prefect server does not answer.
    """
    name = lock_name(store, prefix)
    with locks.held(name, waiting=_Waiting(store, prefix, name), flow_run=flow_run) as lease:
        yield str(lease.id)
    # The artifact is there: whoever was waiting finds it, and nobody needs this lock again.
    locks.remove(name)


def lock_name(store: Store, prefix: str) -> str:
    """Name of the lock of a stage key in a store."""
    return f"stage-{prefix.partition('/')[0]}-{hashlib.sha256(f'{store.root}/{prefix}'.encode()).hexdigest()[:12]}"


class _Waiting:
    """Says whom a run waits for, and ends the turn of one that is dead."""

    def __init__(self, store: Store, prefix: str, name: str):
        self.store, self.prefix, self.name = store, prefix, name
        self.said: str | None = None
        self.dead_since: float | None = None

    def __call__(self) -> None:
        owner = owners.read(self.store, self.prefix)
        if owner is not None and not self._dead(owner):
            self.dead_since = None
            self._say(f"waiting for flow run {owner.flow_run}, which works on {self.prefix}")
            return
        self.dead_since = self.dead_since or time.monotonic()
        if owner is not None and owner.lease:
            self._say(f"taking {self.prefix} over: flow run {owner.flow_run} worked on it and is dead")
            locks.release(owner.lease)
        if time.monotonic() - self.dead_since > (UNKNOWN_SECONDS if owner is None else LONGEST_SECONDS):
            locks.remove(self.name, whoever_has_it=True)

    @staticmethod
    def _dead(owner: owners.Owner) -> bool:
        gone = owner.gone()
        # Elsewhere only Prefect knows.
        return gone if gone is not None else owner.flow_run is not None and locks.run_is_over(owner.flow_run)

    def _say(self, text: str) -> None:
        if text != self.said:
            self.said = text
            get_run_logger().info(text)
