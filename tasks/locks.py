"""Locks that span machines: Prefect concurrency limits with one slot, held by a lease that expires when its holder dies."""

import contextvars
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from configs.errors import Unavailable

# The least that a Prefect server gives; renewed three times in it.
LEASE_SECONDS = 60
TAKEN = 423


class Lease:
    """The one slot of a limit, renewed in the background until it is released."""

    def __init__(self, name: str, lease_id: UUID, flow_run: str | None):
        self.name, self.id, self.flow_run = name, lease_id, flow_run
        self._over = threading.Event()
        # A copy: settings of Prefect are variables of the context.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._renew,), name=name, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Gives the slot back. A server that is away forgets it by itself."""
        self._over.set()
        self._thread.join(10)
        release(str(self.id))

    def _renew(self) -> None:
        while not self._over.wait(LEASE_SECONDS / 3):
            # What holds the lease goes on without it: two who do the same work are wasteful and never wrong.
            try:
                with get_client(sync_client=True) as client:
                    client.renew_concurrency_lease(self.id, LEASE_SECONDS)
            except PrefectHTTPStatusError:  # expired while the server was away
                self._take_again()
            except httpx.HTTPError:
                continue

    def _take_again(self) -> None:
        try:
            with get_client(sync_client=True) as client:
                self.id = _slot(client, self.name, self.flow_run) or self.id
        except (httpx.HTTPError, PrefectHTTPStatusError):
            return


def acquire(name: str, flow_run: str | None = None) -> Lease | None:
    """The lease, or None while another has it. Raises Unavailable when the Prefect server does not answer."""
    with _answering() as client:
        lease_id = _slot(client, name, flow_run)
    return None if lease_id is None else Lease(name, lease_id, flow_run)


@contextmanager
def held(name: str, waiting: Callable[[], None] = lambda: None, flow_run: str | None = None, seconds: float | None = None) -> Iterator[Lease]:
    """Holds the lock while the block runs; `waiting` is called each time that another is found to hold it.

    Raises TimeoutError when it stays taken for `seconds`, Unavailable when the Prefect server does not answer.
    """
    until, pause = time.monotonic() + (seconds or float("inf")), 1.0
    while (lease := acquire(name, flow_run)) is None:
        if time.monotonic() > until:
            raise TimeoutError(name)
        waiting()
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(1.5 * pause, 10)
    try:
        yield lease
    finally:
        lease.release()


def release(lease_id: str) -> None:
    """Ends a lease: one's own, or that of a holder known to be dead. Does nothing for one that ended, or when the server is away."""
    try:
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(UUID(lease_id))
    except (httpx.HTTPError, PrefectHTTPStatusError):
        return


def remove(name: str, whoever_has_it: bool = False) -> None:
    """Removes the limit, unless somebody has it now. Only for a lock that is not needed any more: one who takes it in this moment loses it."""
    try:
        with get_client(sync_client=True) as client:
            if whoever_has_it or not client.read_global_concurrency_limit_by_name(name).active_slots:
                client.delete_global_concurrency_limit_by_name(name)
    except (ObjectNotFound, httpx.HTTPError, PrefectHTTPStatusError):
        return


def run_is_over(flow_run: str) -> bool:
    """Whether the Prefect server knows this flow run to have ended."""
    with _answering() as client:
        try:
            return client.read_flow_run(UUID(flow_run)).state.is_final()
        except ObjectNotFound:
            return False


def _slot(client: SyncPrefectClient, name: str, flow_run: str | None) -> UUID | None:
    with suppress(ObjectAlreadyExists):
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run)) if flow_run else None
    try:
        answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_SECONDS, holder).json()
    except PrefectHTTPStatusError as error:
        if error.response.status_code != TAKEN:
            raise
        return None
    # Without a limit there is no lock: another one has removed it just now.
    return UUID(answer["lease_id"]) if answer["limits"] else None


@contextmanager
def _answering() -> Iterator[SyncPrefectClient]:
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        if isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500:
            raise
        raise Unavailable(f"the Prefect server does not answer ({error}): start it again (`ratchet up`); what was finished is kept") from error
