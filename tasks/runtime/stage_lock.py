"""A lock per stage key: one run at a time works on it, on whatever machine. The lock of a dead run is taken over."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prefect import get_run_logger

from tasks.core.storage import owners
from tasks.core.storage.store import Store
from tasks.runtime import locks

# A lease that nobody renews expires before this. If the slot is still taken then (a server can lose the lease and keep
# the slot), the limit is removed: after three leases when the holder is known to be dead, after an hour when it is not
# known who holds it.
DEAD_HOLDER_SECONDS, UNKNOWN_HOLDER_SECONDS = 3 * locks.LEASE_SECONDS, 3600


@contextmanager
def stage_lock(store: Store, prefix: str, flow_run: str) -> Iterator[str]:
    """Waits until no other run works on the stage key, and holds the lock while the block runs. Yields the lease's id.

    Raises Unavailable when the Prefect server does not answer.
    """
    name = lock_name(store, prefix)
    with locks.held(name, waiting=_Waiting(store, prefix, name), flow_run=flow_run) as lease:
        yield str(lease.id)
    # Runs that were waiting find the artifact, so the lock is not needed again.
    locks.remove(name)


def lock_name(store: Store, prefix: str) -> str:
    """Name of the lock of a stage key in a store."""
    digest = hashlib.sha256(f"{store.root}/{prefix}".encode()).hexdigest()
    return f"stage-{prefix.partition('/')[0]}-{digest[:12]}"


class _Waiting:
    """Called while the lock is taken: logs who holds it, and ends the lease of a holder that is dead."""

    def __init__(self, store: Store, prefix: str, name: str):
        self.store, self.prefix, self.name = store, prefix, name
        self.logged: str | None = None
        self.dead_since: float | None = None

    def __call__(self) -> None:
        owner = owners.read(self.store, self.prefix)
        if owner is not None and not self._is_dead(owner):
            self.dead_since = None
            self._log(f"waiting for flow run {owner.flow_run}, which works on {self.prefix}")
            return
        self.dead_since = self.dead_since or time.monotonic()
        if owner is not None and owner.lease:
            self._log(f"flow run {owner.flow_run} worked on {self.prefix} and is dead: this run takes over")
            locks.release(owner.lease)
        limit = UNKNOWN_HOLDER_SECONDS if owner is None else DEAD_HOLDER_SECONDS
        if time.monotonic() - self.dead_since > limit:
            locks.remove(self.name, even_if_taken=True)

    @staticmethod
    def _is_dead(owner: owners.Owner) -> bool:
        gone = owner.gone()
        # The process of another machine cannot be seen from here; Prefect knows whether its flow run has ended.
        return gone if gone is not None else owner.flow_run is not None and locks.run_has_ended(owner.flow_run)

    def _log(self, text: str) -> None:
        """Logs the text once."""
        if text != self.logged:
            self.logged = text
            get_run_logger().info(text)
