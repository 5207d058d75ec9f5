"""Delivers background runs: one thread per run, and one for all records of dead processes in the outbox."""

import threading
import time
from pathlib import Path

from tasks.core.tracking import outbox
from tasks.core.tracking.background_run import BackgroundRun
from tasks.core.tracking.records import Record
from tasks.core.tracking.run_client import RunClient

# After a failure, the pause doubles from the first value up to the second.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0

_lock = threading.RLock()
_undelivered: list[BackgroundRun] = []


def start(server: RunClient, record: Record, folder: Path | None = None) -> BackgroundRun:
    """Starts to deliver a new run in a thread. `folder` is the outbox."""
    run = _add(server, record, folder=folder)
    threading.Thread(target=deliver, args=([run],), name=f"mlflow-{record.stage or 'parent'}", daemon=True).start()
    return run


def deliver_outbox(server: RunClient, experiment: str, folder: Path) -> int:
    """Takes over the records that dead processes left in the outbox and delivers them in a thread.

    Returns the number of records. A file that cannot be read is a warning.
    """
    with _lock:
        busy = {run.record.id for run in _pending()}
        claimed = outbox.claim(folder, server.uri, experiment, busy)
        runs = [_add(server, record, file=path) for path, record in claimed]
    if runs:
        threading.Thread(target=deliver, args=(runs,), name="mlflow-outbox", daemon=True).start()
    return len(runs)


def settle(uri: str, experiment: str, seconds: float) -> int:
    """Waits at most `seconds` until the ended runs of this process are delivered. Returns the number of the others."""
    deadline = time.monotonic() + seconds
    while True:
        ended = [run for run in _pending() if run.closing.is_set()]
        waiting = [run for run in ended if (run.record.uri, run.record.experiment) == (uri, experiment)]
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            return len(waiting)
        for run in waiting:
            run.hurry()
        waiting[0].done.wait(min(left, 0.5))


def deliver(runs: list[BackgroundRun]) -> None:
    """Delivers until all runs have ended. Pauses after a failure, longer each time."""
    pause = FIRST_PAUSE
    while runs:
        succeeded = all([run.deliver() for run in runs])
        runs = [run for run in runs if not run.done.is_set()]
        if succeeded and runs:
            pause = FIRST_PAUSE
            runs[0].wait_for_input()
        elif runs:
            runs[0].pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _add(server: RunClient, record: Record, folder: Path | None = None, file: Path | None = None) -> BackgroundRun:
    with _lock:
        earlier = [run for run in _pending() if run.record.identity == record.identity and run.closing.is_set()]
        run = BackgroundRun(server, record, folder, file, earlier)
        _undelivered.append(run)
    return run


def _pending() -> list[BackgroundRun]:
    """The runs of this process that are not delivered yet."""
    with _lock:
        _undelivered[:] = [run for run in _undelivered if not run.done.is_set()]
        return list(_undelivered)
