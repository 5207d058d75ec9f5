"""Locks at the real Prefect server: one at a time, and nobody waits for the dead."""

import contextvars
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Completed, Running

from flows.promote import promote
from tasks.core.storage import owners
from tasks.core.storage.store import open_store
from tasks.runtime import locks, stage_lock

HOLDER = """
import sys, time
from tasks.runtime import locks
from tasks.core.storage import owners
from tasks.core.storage.store import open_store
root, prefix, name, run = sys.argv[1:]
lease = locks.acquire(name, run)
owners.take(open_store(root), prefix, run, str(lease.id), {})
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(stack, dir_root, monkeypatch):
    """(store, prefix, name of its lock); outside of a run, the loggers of runs are plain ones."""
    monkeypatch.setattr(stage_lock, "get_run_logger", lambda: logging.getLogger("ratchet"))
    store, prefix = open_store(dir_root), f"sft/{uuid.uuid4().hex}"
    return store, prefix, stage_lock.lock_name(store, prefix)


@pytest.fixture
def holder(place):
    """A process that holds the lock and notes so."""
    store, prefix, name = place
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.root, prefix, name, flow_run(Running())], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def flow_run(state):
    with get_client(sync_client=True) as client:
        return str(client.create_flow_run(promote, state=state).id)


def slots(name):
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name).active_slots


def limits():
    with get_client(sync_client=True) as client:
        return {limit.name for limit in client.read_global_concurrency_limits(limit=200, offset=0)}


def test_one_has_it_and_another_does_not(place):
    lease = locks.acquire(place[2])
    assert locks.acquire(place[2]) is None
    lease.release()
    assert slots(place[2]) == 0


def test_two_runs_never_work_on_one_key_at_the_same_time(place):
    store, prefix, _ = place
    inside, seen = [], []

    def work():
        with stage_lock.stage_lock(store, prefix, flow_run(Running())):
            inside.append(1)
            seen.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1, 1]


def test_nothing_is_left_of_a_turn(place):
    store, prefix, name = place
    with stage_lock.stage_lock(store, prefix, flow_run(Running())):
        assert name in limits()
    assert name not in limits()


def test_a_turn_that_failed_is_free_again(place):
    store, prefix, name = place
    with pytest.raises(RuntimeError), stage_lock.stage_lock(store, prefix, flow_run(Running())):
        raise RuntimeError
    assert slots(name) == 0


def test_a_killed_holders_turn_is_taken_over_and_its_attempt_counted(place, holder, caplog):
    store, prefix, _ = place
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with caplog.at_level(logging.INFO), stage_lock.stage_lock(store, prefix, flow_run(Running())) as lease:
        assert owners.take(store, prefix, None, lease, {}).attempt == 2
    assert f"worked on {prefix} and is dead: this run takes over" in caplog.text


def test_whoever_waits_says_for_whom(place, holder, caplog):
    store, prefix, _ = place
    waiting = stage_lock._Waiting(store, prefix, place[2])
    with caplog.at_level(logging.INFO):
        waiting()
        waiting()
    owner = owners.read(store, prefix)
    assert [r.message for r in caplog.records] == [f"waiting for flow run {owner.flow_run}, which works on {prefix}"]
    assert slots(place[2]) == 1


@pytest.mark.parametrize(("state", "dead"), [(Running(), False), (Completed(), True)])
def test_on_another_machine_the_state_of_the_flow_run_tells_who_is_dead(place, state, dead):
    store, prefix, _ = place
    owner = owners.take(store, prefix, flow_run(state), None, {}).model_copy(update={"host": "elsewhere"})
    assert stage_lock._Waiting._is_dead(owner) is dead


def test_this_process_is_not_gone(place):
    assert owners.take(place[0], place[1], None, None, {}).gone() is False


def test_a_process_id_that_was_given_to_another_process_counts_as_gone(place):
    owner = owners.take(place[0], place[1], None, None, {})
    assert owner.model_copy(update={"started": owner.started - 100}).gone() is True


def test_a_lease_that_expired_is_taken_again(place):
    lease = locks.acquire(place[2])
    locks.release(str(lease.id))
    lease._acquire_again()
    assert slots(place[2]) == 1
    lease.release()
    assert slots(place[2]) == 0


def test_releasing_twice_gives_nobody_elses_slot_back(place):
    first = locks.acquire(place[2])
    first.release()
    second = locks.acquire(place[2])
    locks.release(str(first.id))
    assert slots(place[2]) == 1
    second.release()


def test_attempts_are_counted_and_end_with_the_artifact(place):
    store, prefix, _ = place
    assert [owners.take(store, prefix, None, None, {}).attempt for _ in range(3)] == [1, 2, 3]
    owners.leave(store, prefix)
    assert (owners.read(store, prefix), owners.take(store, prefix, None, None, {}).pid) == (None, os.getpid())
