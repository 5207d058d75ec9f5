"""A flow run whose worker was killed ends too: nobody could cancel it any more, and it would keep the GPU."""

import os
import signal
import threading
import time

from prefect import get_run_logger
from prefect.runtime import flow_run

POLL_SECONDS = 0.5
GRACE_SECONDS = 30


def die_with_worker() -> None:
    """Has this process end when the worker that started it is gone, however it went. Where no worker did (`ratchet run`), does nothing.

    Prefect reports a SIGTERM as Crashed, and the child of the running stage ends with the task that follows it.
    """
    # A worker names the run in the environment of the process that it starts; a run started from within that process has another id.
    if os.environ.get("PREFECT__FLOW_RUN_ID") != str(flow_run.id):
        return
    # The embedded stack's worker gives its own id, for it can be gone by now; any other parent is believed.
    worker = int(os.environ.get("RATCHET_WORKER", os.getppid()))
    threading.Thread(target=_follow, args=(worker, get_run_logger()), daemon=True).start()


def _follow(worker: int, log) -> None:
    while os.getppid() == worker:
        time.sleep(POLL_SECONDS)
    # Who read this process's output is gone too, and a line that cannot be printed would end the thread that logs it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    log.warning("The worker that started this run (process %s) is gone, and this process ends: Retry goes on from what was finished", worker)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
