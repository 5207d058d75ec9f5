"""How Prefect shows Ratchet's errors."""

import logging

from configs.errors import RatchetError


def hide_tracebacks() -> None:
    """Keeps tracebacks of Ratchet's own errors out of Prefect's log: their message is the whole story for the user."""

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], RatchetError):
            record.exc_info = None
        return True

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(without_traceback)
