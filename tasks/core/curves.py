"""Curves of a stage's run, delivered in the background: nothing here blocks or fails a training.

What is queued goes out in order from a thread of its own; an outage of the server is waited out for as long as the run lasts.
"""

import logging
import math
import numbers
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

log = logging.getLogger("ratchet.tracking")

WAIT_SECONDS = 15.0
BATCH = 1000
FINAL = ("FINISHED", "FAILED", "KILLED")


class Point(NamedTuple):
    """One value of one metric; `time` in milliseconds since 1970."""

    name: str
    value: float
    time: int
    step: int


class Server(Protocol):
    """What delivers: tasks.core.tracking.Tracking."""

    uri: str

    def send(self, run_id: str, points: list[Point], tags: dict[str, Any]) -> None:
        """Logs points and tags."""

    def add_dataset(self, run_id: str, name: str, digest: str, source_uri: str) -> None:
        """Logs a data set as an input."""

    def close(self, run_id: str, status: str) -> None:
        """Ends the run."""

    def logged_steps(self, run_id: str, name: str) -> set[int]:
        """Steps at which the run has a value of the metric."""

    def refused(self, error: Exception) -> bool:
        """Whether the server said no, and would say so again."""


class StageRun:
    """One stage's child run. Its methods return at once; a thread of its own delivers in order and waits outages out."""

    def __init__(self, server: Server, stage: str, opening: Callable[[], tuple[str, bool]]):
        # `opening` gives the run's id, and whether it is one that was begun before.
        self._server, self._stage, self._opening = server, stage, opening
        self._lock = threading.Lock()
        self._points: list[Point] = []
        self._jobs: list[Callable[[], None]] = []
        self._lost = self._last_step = 0
        self._status = FINAL[0]
        self._logged: dict[str, set[int]] | None = None
        self._wake, self._opened, self._closing, self._abandoned = (threading.Event() for _ in range(4))
        self.run_id: str | None = None
        self._thread = threading.Thread(target=self._deliver, name=f"mlflow-{stage}", daemon=True)
        self._thread.start()
        self._opened.wait(WAIT_SECONDS)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Queues one point per numeric metric; what is no number is left out, inf is shown as NaN. Never blocks, never raises."""
        with self._lock:
            self._last_step = max(self._last_step, int(step))
            self._points += points(metrics, int(step))
        self._wake.set()

    def dataset(self, name: str, digest: str, source_uri: str) -> None:
        """Queues the data set as an input of the run; the whole digest is in the tag sha256, for MLflow holds 36 characters."""
        self._queue(lambda: self._server.add_dataset(self.run_id, name, digest, source_uri))

    def finish(
        self,
        status: str,
        metrics: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        artifacts: dict[str, str] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> int:
        """Ends the run (FINISHED, FAILED or KILLED) and waits at most `seconds` for everything to arrive.

        `artifacts` are links, name to URI, kept as tags `artifact.<name>`. Returns the number of points that did not arrive, and warns of them.
        """
        self._status = final(status)
        self.log(self._last_step, metrics or {})
        links = {f"artifact.{name}": uri for name, uri in (artifacts or {}).items()}
        self._queue(lambda: self._server.send(self.run_id, [], {**(tags or {}), **links}))
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)
        with self._lock:
            lost = self._lost + len(self._points)
        unfinished = self._thread.is_alive()
        self._abandoned.set()
        self._wake.set()
        if lost or unfinished:
            log.warning("MLflow at %s did not take everything of stage %s: %d points are missing from its curves", self._server.uri, self._stage, lost)
        return lost

    def _queue(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._jobs.append(job)
        self._wake.set()

    def _deliver(self) -> None:
        delay = 1.0
        while not self._abandoned.is_set():
            self._wake.clear()
            try:
                if self._step():
                    return
                delay = 1.0
                self._wake.wait()
            except Exception as error:  # a curve is never worth a training run: whatever it is, wait and try again
                log.debug("MLflow: %s", error)
                # A run that is closing tries more often, since its caller waits; else the pause doubles up to half a minute.
                self._abandoned.wait(0.5 if self._closing.is_set() else delay)
                delay = min(2 * delay, 30.0)

    def _step(self) -> bool:
        """Delivers what is queued; True when the run is closed. Raises what MLflow raises, with the rest still queued."""
        if self.run_id is None:
            run_id, continued = self._opening()
            self._logged = {} if continued else None
            self.run_id = run_id
            self._opened.set()
        closing = self._closing.is_set()
        while self._jobs and not self._abandoned.is_set():
            self._attempt(self._jobs[0], 0)
            with self._lock:
                del self._jobs[0]
        while self._points and not self._abandoned.is_set():
            with self._lock:
                batch = self._points[:BATCH]
            fresh = [p for p in batch if not self._known(p)]
            self._attempt(lambda fresh=fresh: self._server.send(self.run_id, fresh, {}), len(fresh))
            with self._lock:
                del self._points[: len(batch)]
        if closing:
            self._attempt(lambda: self._server.close(self.run_id, self._status), 0)
        return closing

    def _attempt(self, work: Callable[[], None], size: int) -> None:
        """Does the work; a refusal is counted as lost, for MLflow would refuse it again. An outage is raised and tried again."""
        try:
            work()
        except Exception as error:
            if not self._server.refused(error):
                raise
            self._lost += size
            log.warning("MLflow refused a part of stage %s: %s", self._stage, " ".join(str(error).split())[:300])

    def _known(self, point: Point) -> bool:
        """Whether a continued run has this step of the metric: a resumed training repeats the steps since its checkpoint."""
        if self._logged is None:
            return False
        if point.name not in self._logged:
            self._logged[point.name] = self._server.logged_steps(self.run_id, point.name)
        return point.step in self._logged[point.name]


def points(metrics: dict[str, Any], step: int) -> list[Point]:
    """Points for everything numeric: booleans as 0 and 1, infinities as NaN (MLflow would plot 1.8e308), names as MLflow takes them."""
    now = int(time.time() * 1000)
    named = {clean(name): value for name, value in metrics.items() if isinstance(value, numbers.Real)}
    return [Point(name, float(value) if math.isfinite(value) else math.nan, now, step) for name, value in named.items()]


def clean(name: str) -> str:
    """The name with `_` for what MLflow does not allow in one, cut to the 250 characters that it holds."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def final(status: str) -> str:
    """The status. Raises ValueError for one that does not end a run."""
    if status not in FINAL:
        raise ValueError(f"status is {status!r} and must be one of {', '.join(FINAL)}")
    return status
