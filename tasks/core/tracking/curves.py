"""Curves of a stage's run, delivered in the background: nothing here blocks or fails a training.

What is queued goes out in order from a thread of its own. An outage of the server is waited out for as long as the process lives; what has
not arrived when the stage ends is kept in a file (tasks/core/tracking/spool.py), for this process or a later one to deliver.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tasks.core.tracking import spool
from tasks.core.tracking.spool import Point, Record, final, points

log = logging.getLogger("ratchet.tracking")

# `finish` waits this long for a server that is silent, and this long at most.
QUIET_SECONDS, WAIT_SECONDS = 5.0, 15.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
BATCH = 1000

_guard = threading.RLock()
_pending: list["StageRun"] = []


class Opened(NamedTuple):
    """A run at the server: whether it was begun before, and whether a later attempt has it now."""

    run_id: str
    continued: bool
    superseded: bool


class Server(Protocol):
    """What delivers: tasks.core.tracking.Tracking."""

    uri: str

    def open(self, record: Record) -> Opened:
        """Finds or creates the record's run."""

    def send(self, run_id: str, points: list[Point], tags: dict[str, Any]) -> None:
        """Logs points and tags."""

    def add_dataset(self, run_id: str, name: str, digest: str, source_uri: str) -> None:
        """Logs a data set as an input."""

    def add_text(self, run_id: str, name: str, text: str) -> None:
        """Logs a text as an artifact."""

    def close(self, run_id: str, status: str, ended: int) -> None:
        """Ends the run."""

    def logged_steps(self, run_id: str, name: str) -> set[int]:
        """Steps at which the run has a value of the metric."""

    def refused(self, error: Exception) -> bool:
        """Whether the server said no, and would say so again."""


class StageRun:
    """One run of MLflow. Its methods return at once, but for `finish`, which waits some seconds; `run_id` is None until the server has answered."""

    def __init__(self, server: Server, record: Record, folder: Path | None = None, file: Path | None = None):
        # `folder` is where to keep what does not arrive, `file` where the record was kept by one that is gone.
        self.run_id = record.run_id
        self.record, self.done, self.closing = record, threading.Event(), threading.Event()
        self._server, self._folder, self._file, self._kept = server, folder, file, file is not None
        self._lock = threading.Lock()
        self._wake, self._nudge = threading.Event(), threading.Event()
        self._opened: Opened | None = None
        self._queued: dict[str, set[int]] = {}
        self._logged: dict[str, set[int]] | None = None
        self._lost, self._last_step, self._answered, self._warned = 0, 0, 0.0, False
        if self._kept:
            self.closing.set()
        with _guard:
            # Two that tell one run the same steps at once would both find them missing.
            self._earlier = [run for run in _pending if run.record.identity == record.identity and run.closing.is_set()]
            _pending.append(self)

    def start(self) -> "StageRun":
        """Begins to deliver, in a thread of its own."""
        threading.Thread(
            target=deliver, args=([self],), name=f"mlflow-{self.record.stage or 'parent'}", daemon=True
        ).start()
        return self

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Queues one point per numeric metric, once per step; what is no number is left out, inf is shown as NaN. Never blocks, never raises."""
        with self._lock:
            self._last_step = max(self._last_step, int(step))
            for point in points(metrics, int(step)):
                steps = self._queued.setdefault(point.name, set())
                if point.step not in steps:
                    steps.add(point.step)
                    self.record.points.append(point)
        self._wake.set()

    def dataset(self, name: str, digest: str, source_uri: str) -> None:
        """Queues the data set as an input of the run; the whole digest is in the tag sha256, for MLflow holds 36 characters."""
        with self._lock:
            self.record.datasets.append((name, digest, source_uri))
        self._wake.set()

    def finish(
        self,
        status: str,
        metrics: dict[str, Any] | None = None,
        tags: dict[str, str] | None = None,
        artifacts: dict[str, str] | None = None,
        texts: dict[str, str] | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> int:
        """Ends the run (FINISHED, FAILED or KILLED): waits at most `seconds` while things arrive, and 5 while nothing does; keeps the rest in a file.

        `artifacts` are links, name to URI, kept as tags `artifact.<name>`; `texts` become files. Returns the number of points that have not arrived.
        """
        status = final(status)
        self.log(self._last_step, metrics or {})
        links = {f"artifact.{name}": uri for name, uri in (artifacts or {}).items()}
        with self._lock:
            self.record.status, self.record.ended = status, spool.now()
            self.record.tags.update({name: str(value) for name, value in {**(tags or {}), **links}.items()})
            self.record.texts.update(texts or {})
        self.closing.set()
        self._wake.set()
        began = time.monotonic()
        while (
            not self.done.is_set()
            and (left := min(began + seconds, max(began, self._answered) + QUIET_SECONDS) - time.monotonic()) > 0
        ):
            self.hurry()
            self.done.wait(min(left, 0.5))
        return self._keep()

    def hurry(self) -> None:
        """Ends the pause after a failure, if there is one."""
        self._nudge.set()

    def pause(self, seconds: float) -> None:
        """Waits after a failure, or until somebody is in a hurry."""
        self._nudge.wait(seconds)
        self._nudge.clear()

    def idle(self) -> None:
        """Waits for something to deliver."""
        self._wake.wait()

    def attempt(self) -> bool:
        """Delivers what is queued; False when that has to be tried again. At the end of the run, sets `done` and removes its file."""
        if any(not run.done.is_set() for run in self._earlier):
            return False
        self._wake.clear()
        try:
            if self._step():
                self._end(arrived=True)
            return True
        except Exception as error:  # a curve is never worth a training run: whatever it is, wait and try again
            log.debug("MLflow: %s", error)
            self._logged = {}  # what was under way may have arrived, and only its answer be lost
            if self._opened is None and self._server.refused(error):
                return self._refused(error)
            return False

    def _step(self) -> bool:
        """Delivers what is queued; True when the run is closed. Raises what MLflow raises, with the rest still queued."""
        closing, record = self.closing.is_set(), self.record
        if self._opened is None:
            self._opened = self._server.open(record)
            self._logged = {} if self._opened.continued else None
            self.run_id = record.run_id = self._opened.run_id
            self._answered = time.monotonic()
        while record.datasets:
            self._tell(lambda: self._server.add_dataset(self.run_id, *record.datasets[0]))
            with self._lock:
                del record.datasets[0]
        while record.points:
            with self._lock:
                batch = record.points[:BATCH]
            fresh = [p for p in batch if not self._known(p)]
            if fresh:
                self._tell(lambda fresh=fresh: self._server.send(self.run_id, fresh, {}), len(fresh))
            with self._lock:
                del record.points[: len(batch)]
        # What a later attempt has said of the run since then stands.
        if closing and not self._opened.superseded:
            self._tell(lambda: self._server.send(self.run_id, [], record.tags))
            self._tell(lambda: self._server.close(self.run_id, record.status, record.ended))
            for name, text in record.texts.items():
                self._tell(lambda name=name, text=text: self._server.add_text(self.run_id, name, text))
        return closing

    def _tell(self, work: Callable[[], None], size: int = 0) -> None:
        """Does the work; a refusal is counted as lost, for MLflow would refuse it again. An outage is raised and tried again."""
        try:
            work()
        except Exception as error:
            if not self._server.refused(error):
                raise
            self._lost += size
            log.warning("MLflow refused a part of %s: %s", self._name(), " ".join(str(error).split())[:300])
        self._answered = time.monotonic()

    def _known(self, point: Point) -> bool:
        """Whether the run has this step of the metric: a resumed training repeats its steps. Of a parent run, the last value counts."""
        if self._logged is None or not self.record.stage:
            return False
        if point.name not in self._logged:
            self._logged[point.name] = self._server.logged_steps(self.run_id, point.name)
        return point.step in self._logged[point.name]

    def _refused(self, error: Exception) -> bool:
        """A run that cannot be opened: a living one tries on, a kept one is left for a later process. Whether it has ended."""
        if not self._warned:
            remedy = f"; remove {self._file} if nobody wants it" if self._kept else ""
            log.warning(
                "MLflow at %s refused to open %s: %s%s",
                self._server.uri,
                self._name(),
                " ".join(str(error).split())[:300],
                remedy,
            )
            self._warned = True
        if self._kept:
            self._end(arrived=False)
        return self._kept

    def _keep(self) -> int:
        """Writes what has not arrived into a file, unless it just did; returns the number of its points, with those that were refused."""
        with self._lock:
            missing = self._lost + len(self.record.points)
            if self.done.is_set():
                if missing:
                    log.warning("MLflow at %s refused %d points of %s", self._server.uri, missing, self._name())
                return missing
            where = "in memory alone, for no folder was given"
            if self._folder is not None:
                try:
                    self._file = spool.keep(self.record, self._folder)
                    where = f"in {self._file}"
                except (OSError, ValueError) as error:
                    where = f"in memory alone, for {self._folder} cannot be written ({error})"
        text = "MLflow at %s did not take everything of %s: %d points, its tags and its status are kept %s and sent when it answers"
        log.warning(text, self._server.uri, self._name(), missing, where)
        return missing

    def _end(self, arrived: bool) -> None:
        with self._lock:
            if arrived and self._file is not None:
                with contextlib.suppress(OSError):  # it would be delivered again, which changes nothing
                    self._file.unlink(missing_ok=True)
            self.done.set()
        with _guard:
            _pending.remove(self)

    def _name(self) -> str:
        return f"stage {self.record.stage}" if self.record.stage else "the parent run"


def deliver(runs: list[StageRun]) -> None:
    """Delivers until all are done; after a failure it pauses, longer each time."""
    pause = FIRST_PAUSE
    while runs:
        calm = all([run.attempt() for run in runs])
        runs = [run for run in runs if not run.done.is_set()]
        if calm and runs:
            pause = FIRST_PAUSE
            runs[0].idle()
        elif runs:
            runs[0].pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def deliver_kept(server: Server, experiment: str, folder: Path) -> int:
    """Takes over the records that others have left in the folder and delivers them in the background; returns how many. Never raises for a file."""
    with _guard:
        busy = {run.record.id for run in _pending}
        runs = [
            StageRun(server, record, file=path) for path, record in spool.claim(folder, server.uri, experiment, busy)
        ]
    if runs:
        threading.Thread(target=deliver, args=(runs,), name="mlflow-kept", daemon=True).start()
    return len(runs)


def settle(uri: str, experiment: str, seconds: float) -> int:
    """Waits at most `seconds` for the ended runs of this process to be delivered; returns how many are not."""
    end = time.monotonic() + seconds
    while True:
        with _guard:
            waiting = [
                run
                for run in _pending
                if run.closing.is_set() and (run.record.uri, run.record.experiment) == (uri, experiment)
            ]
        left = end - time.monotonic()
        if not waiting or left <= 0:
            return len(waiting)
        for run in waiting:
            run.hurry()
        waiting[0].done.wait(min(left, 0.5))
