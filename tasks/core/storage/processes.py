"""Which process is meant, after its id may have been given to another one: an id means something on one host alone, and with a start time."""

import os
import platform

import psutil

# Start times of one process, as two others see them, may differ by the clock's corrections.
SAME_START_SECONDS = 2.0


def host() -> str:
    """This machine, or this container of it: where a process id means something."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def myself() -> tuple[int, float]:
    """Process id and start time (seconds since 1970), which together name a process of this host for good."""
    return os.getpid(), psutil.Process().create_time()


def find(pid: int, started: float) -> psutil.Process | None:
    """The process of this host with this id and start time, while it lives; None when it has ended, or its id is another's."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < SAME_START_SECONDS and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:  # another user's, and so no ended one
        return process
    except (psutil.NoSuchProcess, ValueError):
        return None
    return process if same else None
