"""Takes the stack down when a process ends: `python -m deployments.local.watch HOME PID`, itself supervised. For tests."""

import os
import subprocess
import sys
import time

import psutil

from deployments.local.control import MARK

DOWN = "import sys, pathlib; from deployments.local import stack; stack.down(pathlib.Path(sys.argv[1]))"


def main(home: str, pid: int) -> None:
    """Polls; a process id that was given to another process counts as ended."""
    try:
        watched = psutil.Process(pid)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            time.sleep(1)
    except psutil.NoSuchProcess:
        pass
    # Not one of the processes that it ends: own session, no mark.
    env = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.Popen(
        [sys.executable, "-c", DOWN, os.path.abspath(home)], env=env, start_new_session=True, stdin=subprocess.DEVNULL
    )
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
