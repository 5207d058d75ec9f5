"""Locks that span machines: Prefect concurrency limits with one slot, held by a lease that expires with its holder."""

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

# The shortest lease that a Prefect server grants. It is renewed three times in this time.
LEASE_SECONDS = 60
HTTP_LOCKED = 423


class Lease:
    """The one slot of a limit, renewed in the background until it is released."""

    def __init__(self, name: str, lease_id: UUID, flow_run: str | None):
        self.name, self.id, self.flow_run = name, lease_id, flow_run
        self._released = threading.Event()
        # The thread needs a copy of the context: Prefect keeps its settings in context variables.
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._renew,), name=name, daemon=True
        )
        self._thread.start()

    def release(self) -> None:
        """Gives the slot back. If the server is away, the lease expires there by itself."""
        self._released.set()
        self._thread.join(10)
        release(str(self.id))

    def _renew(self) -> None:
        while not self._released.wait(LEASE_SECONDS / 3):
            # A failed renewal does not stop the work: two runs that do the same work waste time, but are never wrong.
            try:
                with get_client(sync_client=True) as client:
                    client.renew_concurrency_lease(self.id, LEASE_SECONDS)
            except PrefectHTTPStatusError:  # the lease expired while the server was away
                self._acquire_again()
            except httpx.HTTPError:
                continue

    def _acquire_again(self) -> None:
        try:
            with get_client(sync_client=True) as client:
                self.id = _take_slot(client, self.name, self.flow_run) or self.id
        except (httpx.HTTPError, PrefectHTTPStatusError):
            return


def acquire(name: str, flow_run: str | None = None) -> Lease | None:
    """The lease, or None while another holder has it. Raises Unavailable when the Prefect server does not answer."""
    with _answering_client() as client:
        lease_id = _take_slot(client, name, flow_run)
    return None if lease_id is None else Lease(name, lease_id, flow_run)


@contextmanager
def held(
    name: str, waiting: Callable[[], None] = lambda: None, flow_run: str | None = None, seconds: float | None = None
) -> Iterator[Lease]:
    """Holds the lock while the block runs; calls `waiting` each time the lock is found taken.

    Raises TimeoutError when it stays taken for `seconds`, and Unavailable when the Prefect server does not answer.
    """
    deadline, pause = time.monotonic() + (seconds or float("inf")), 1.0
    while (lease := acquire(name, flow_run)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        waiting()
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(1.5 * pause, 10)
    try:
        yield lease
    finally:
        lease.release()


def release(lease_id: str) -> None:
    """Ends a lease: the caller's own, or that of a dead holder. Does nothing if it has ended or the server is away."""
    try:
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(UUID(lease_id))
    except (httpx.HTTPError, PrefectHTTPStatusError):
        return


def remove(name: str, even_if_taken: bool = False) -> None:
    """Removes the limit, unless its slot is taken. A run that acquires it at this moment loses it, so this is only for
    locks that nobody needs again."""
    try:
        with get_client(sync_client=True) as client:
            if even_if_taken or not client.read_global_concurrency_limit_by_name(name).active_slots:
                client.delete_global_concurrency_limit_by_name(name)
    except (ObjectNotFound, httpx.HTTPError, PrefectHTTPStatusError):
        return


def run_has_ended(flow_run: str) -> bool:
    """Whether the Prefect server says that the flow run has ended; False for a flow run that it does not know."""
    with _answering_client() as client:
        try:
            return client.read_flow_run(UUID(flow_run)).state.is_final()
        except ObjectNotFound:
            return False


def _take_slot(client: SyncPrefectClient, name: str, flow_run: str | None) -> UUID | None:
    with suppress(ObjectAlreadyExists):
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run)) if flow_run else None
    try:
        answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", LEASE_SECONDS, holder).json()
    except PrefectHTTPStatusError as error:
        if error.response.status_code != HTTP_LOCKED:
            raise
        return None
    # Without limits in the answer there is no lock: another run removed the limit between the two calls.
    return UUID(answer["lease_id"]) if answer["limits"] else None


@contextmanager
def _answering_client() -> Iterator[SyncPrefectClient]:
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.TransportError, PrefectHTTPStatusError) as error:
        if isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500:
            raise
        raise Unavailable(
            f"the Prefect server does not answer ({error}): start it again (`ratchet up`); finished stages are kept"
        ) from error
