"""Does for a `ratchet run` what a worker does for its flow runs: `python -m flows.run_watchdog PID CREATED FLOW_RUN_ID`, a process of its own.

When the run's process is gone and the run is not final, the run becomes Crashed. When the run is to be cancelled, the process gets SIGTERM, after
GRACE_SECONDS SIGKILL, and the run becomes Cancelled. The guard ends with the run, and leaves alone a run that another process has taken (Retry).
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from tasks.core.storage import processes

POLL_SECONDS = 0.5
LOOK_SECONDS = 2.0  # between two questions to the server
GRACE_SECONDS = 30
PATIENCE = 24 * 3600  # seconds for a server that is away, once the process is gone
GOES_ON = "what was finished is kept, and Retry or the same command goes on from there"
GONE = "The process of `ratchet run` is gone without a word (killed, or out of memory)"


def start(flow_run_id: UUID) -> None:
    """Starts the guard of this process and its flow run; it outlives the process."""
    pid, started = processes.myself()
    logs = Path(os.environ.get("RATCHET_HOME", ".ratchet")).absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # It has a loop of its own for a server that is away, in which the process is watched all the same.
    env = os.environ | {"PREFECT_CLIENT_MAX_RETRIES": "0"}
    with open(logs / "guard.log", "ab") as log:
        command = [sys.executable, "-m", "flows.run_watchdog", str(pid), repr(started), str(flow_run_id)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env)


class Guard:
    """Watches one process (None: it was gone before the guard came) and its flow run."""

    def __init__(self, process: psutil.Process | None, flow_run_id: UUID):
        self.process, self.flow_run_id = process, flow_run_id
        self.told: float | None = None  # when the process was told to end, by the monotonic clock

    def watch(self) -> str:
        """Returns, when the run has ended or is another's, why the guard ends."""
        looked = gone = float("-inf")
        answers = True
        while True:
            now, alive = time.monotonic(), self._alive()
            if not alive and gone < 0:
                gone = now
            if not alive and now > gone + PATIENCE:
                return "the server did not answer for a day"
            if self.told and alive and now > self.told + GRACE_SECONDS:
                self._signal(psutil.Process.kill)
            # Told to end, the process may call itself crashed: wait for its end, then say what it was.
            elif not (self.told and alive) and now > looked + LOOK_SECONDS:
                looked = now
                try:
                    if (why := self._look(alive)) is not None:
                        return why
                    answers = True
                except ObjectNotFound:
                    return "the run was deleted"
                except (
                    httpx.HTTPError,
                    OSError,
                    RuntimeError,
                ) as error:  # the client turns a server that is away into any of these
                    if answers:
                        _say(f"the server does not answer, and is asked on: {error!r}")
                    answers = False
            time.sleep(POLL_SECONDS)

    def _look(self, alive: bool) -> str | None:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(self.flow_run_id)
            if alive:
                if not own(run):
                    return f"{run.state.name} (run {run.run_count})"
                if run.state.is_cancelling():
                    _say(f"{self.flow_run_id} is to be cancelled: process {self.process.pid} is told to end")
                    self._signal(psutil.Process.terminate)
                    self.told = time.monotonic()
                return None
            final = outcome(run, told=self.told is not None)
            if final is not None:
                # Only a cancelled run may have called itself crashed before; Crashed never replaces a final state, the server sees to that.
                client.set_flow_run_state(run.id, final, force=final.is_cancelled())
            return (final or run.state).name

    def _alive(self) -> bool:
        try:
            return (
                self.process is not None and self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def _signal(self, how: Callable[[psutil.Process], None]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # gone, or its id is another process's by now
            how(self.process)


def own(run: FlowRun) -> bool:
    """Whether the run, not final, is still in its first process's hands: Retry schedules it first, and counts one more when it runs."""
    state = run.state
    return (state.is_pending() and run.run_count == 0) or (
        (state.is_running() or state.is_cancelling()) and run.run_count <= 1
    )


def outcome(run: FlowRun, told: bool) -> State | None:
    """The state to set once the run's process is gone; None where it is right as it is or another's. `told`: the process was told to end, to cancel the run."""
    if told and run.state.is_crashed() and run.run_count <= 1:
        return cancelled()
    if not own(run):
        return None
    return cancelled() if run.state.is_cancelling() else Crashed(message=f"{GONE}: {GOES_ON}.")


def cancelled() -> State:
    """Cancelled, with a message that says what is left."""
    return Cancelled(message=f"The run was cancelled: {GOES_ON}.")


def _say(text: str) -> None:
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {os.getpid()} {text}", flush=True)


def main(pid: str, created: str, flow_run_id: str) -> None:
    """Guards until the run has ended."""
    _say(f"guards {flow_run_id} in process {pid}")
    _say(f"ends: {Guard(processes.find(int(pid), float(created)), UUID(flow_run_id)).watch()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
