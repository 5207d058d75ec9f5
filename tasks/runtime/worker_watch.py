"""Ends a flow run whose worker was killed: nobody could cancel it any more, and it would keep the GPU."""

import os
import signal
import threading
import time
from logging import LoggerAdapter

from prefect import get_run_logger
from prefect.runtime import flow_run

POLL_SECONDS = 0.5
GRACE_SECONDS = 30


def end_with_worker() -> None:
    """Makes this process end when the worker that started it ends. Does nothing for `ratchet run`, which has no worker.

    Prefect reports the SIGTERM as Crashed. The child process of the running stage ends with this process.
    """
    # The worker names the flow run in the environment of the process that it starts. A flow run that was started from
    # within that process has another id.
    if os.environ.get("PREFECT__FLOW_RUN_ID") != str(flow_run.id):
        return
    # The embedded stack's worker passes its own process id, because it may have ended before this line runs. With any
    # other worker, the parent process is taken for the worker.
    worker = int(os.environ.get("RATCHET_WORKER", os.getppid()))
    threading.Thread(target=_follow, args=(worker, get_run_logger()), daemon=True).start()


def _follow(worker: int, log: LoggerAdapter) -> None:
    while os.getppid() == worker:
        time.sleep(POLL_SECONDS)
    # The worker read this process's output. Without a reader, printing would raise in the thread that logs.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    log.warning(
        "The worker that started this run (process %s) has ended, so this process ends too. "
        "Retry continues from the finished stages and the newest checkpoint.",
        worker,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
