"""Does for a `ratchet run` what a worker does for its flow runs: reports a crash, and carries out a cancellation.

`python -m flows.run_watchdog PID CREATED FLOW_RUN_ID` is a separate process. When the process of the run has ended and
the run is not in a final state, it sets Crashed. When the run is Cancelling, it sends SIGTERM, after GRACE_SECONDS
SIGKILL, and sets Cancelled. It ends with the run, and does not touch a run that another process has taken over (Retry).
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
QUERY_SECONDS = 2.0  # between two queries to the server
GRACE_SECONDS = 30
SERVER_AWAY_SECONDS = 24 * 3600  # how long to wait for a server that is away, once the process has ended
HOW_TO_CONTINUE = "finished stages and checkpoints are kept, and Retry or the same command continues from them"
PROCESS_ENDED = "The process of `ratchet run` ended without a result (it was killed, or ran out of memory)"


def start(flow_run_id: UUID) -> None:
    """Starts the watchdog of this process and its flow run; it outlives the process."""
    pid, started = processes.myself()
    logs = Path(os.environ.get("RATCHET_HOME", ".ratchet")).absolute() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # The watchdog retries by itself, because it must watch the process while the server is away.
    env = os.environ | {"PREFECT_CLIENT_MAX_RETRIES": "0"}
    with open(logs / "watchdog.log", "ab") as log:
        command = [sys.executable, "-m", "flows.run_watchdog", str(pid), repr(started), str(flow_run_id)]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env)


class Watchdog:
    """Watches one process and its flow run. The process is None if it ended before the watchdog started."""

    def __init__(self, process: psutil.Process | None, flow_run_id: UUID):
        self.process, self.flow_run_id = process, flow_run_id
        self.terminated: float | None = None  # when the process got SIGTERM, by the monotonic clock

    def watch(self) -> str:
        """Returns, when the run has ended or another process runs it, why the watchdog ends."""
        queried = ended = float("-inf")
        server_answers = True
        while True:
            now, alive = time.monotonic(), self._alive()
            if not alive and ended < 0:
                ended = now
            if not alive and now > ended + SERVER_AWAY_SECONDS:
                return "the server did not answer for a day"
            if self.terminated and alive and now > self.terminated + GRACE_SECONDS:
                self._signal(psutil.Process.kill)
            # After SIGTERM the process may set Crashed before it ends. Wait for its end, then set the right state.
            elif not (self.terminated and alive) and now > queried + QUERY_SECONDS:
                queried = now
                try:
                    if (reason := self._query(alive)) is not None:
                        return reason
                    server_answers = True
                except ObjectNotFound:
                    return "the run was deleted"
                # Prefect's client raises any of these when the server is away.
                except (httpx.HTTPError, OSError, RuntimeError) as error:
                    if server_answers:
                        _log(f"the server does not answer, trying again: {error!r}")
                    server_answers = False
            time.sleep(POLL_SECONDS)

    def _query(self, alive: bool) -> str | None:
        with get_client(sync_client=True) as client:
            run = client.read_flow_run(self.flow_run_id)
            if alive:
                if not in_first_process(run):
                    return f"{run.state.name} (run {run.run_count})"
                if run.state.is_cancelling():
                    _log(f"{self.flow_run_id} is Cancelling: sending SIGTERM to process {self.process.pid}")
                    self._signal(psutil.Process.terminate)
                    self.terminated = time.monotonic()
                return None
            final = outcome(run, terminated=self.terminated is not None)
            if final is not None:
                # A cancelled run may have set Crashed before, which only `force` replaces. Crashed itself never
                # replaces a final state: the server refuses it.
                client.set_flow_run_state(run.id, final, force=final.is_cancelled())
            return (final or run.state).name

    def _alive(self) -> bool:
        try:
            return (
                self.process is not None and self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def _signal(self, send: Callable[[psutil.Process], None]) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended, or its id belongs to another process now
            send(self.process)


def in_first_process(run: FlowRun) -> bool:
    """Whether the run is not final and still in its first process. Retry schedules it, then increases its run count."""
    state = run.state
    if state.is_pending():
        return run.run_count == 0
    return (state.is_running() or state.is_cancelling()) and run.run_count <= 1


def outcome(run: FlowRun, terminated: bool) -> State | None:
    """The state to set once the process of the run has ended; None to leave the state as it is.

    `terminated` says that the process got SIGTERM from the watchdog, to cancel the run.
    """
    if terminated and run.state.is_crashed() and run.run_count <= 1:
        return cancelled()
    if not in_first_process(run):
        return None
    return cancelled() if run.state.is_cancelling() else Crashed(message=f"{PROCESS_ENDED}: {HOW_TO_CONTINUE}.")


def cancelled() -> State:
    """Cancelled, with a message that says how to continue."""
    return Cancelled(message=f"The run was cancelled: {HOW_TO_CONTINUE}.")


def _log(text: str) -> None:
    print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {os.getpid()} {text}", flush=True)


def main(pid: str, created: str, flow_run_id: str) -> None:
    """Watches until the run has ended."""
    _log(f"watching {flow_run_id} in process {pid}")
    _log(f"ending: {Watchdog(processes.find(int(pid), float(created)), UUID(flow_run_id)).watch()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
