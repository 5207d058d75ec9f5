"""An MLflow run that is written in the background: logging never blocks a training and never makes it fail.

Everything is queued and sent in order by a thread (tasks/core/tracking/delivery.py). An outage of the server delays it.
Whatever has not arrived when the run ends is kept in a file (tasks/core/tracking/outbox.py) and sent later, by this
process or by another one.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.core.tracking import outbox
from tasks.core.tracking.records import Point, Record, final, now, points
from tasks.core.tracking.run_client import MAX_BATCH_METRICS, Opened, RunClient

log = logging.getLogger("ratchet.tracking")

# `finish` waits at most WAIT_SECONDS, and at most QUIET_SECONDS after the server's last answer.
QUIET_SECONDS, WAIT_SECONDS = 5.0, 15.0


class BackgroundRun:
    """One MLflow run. `run_id` is None until the server has answered.

    The code that does the work calls `log`, `dataset` and `finish`, and only `finish` waits. The thread that delivers
    calls the other methods.
    """

    def __init__(
        self,
        server: RunClient,
        record: Record,
        folder: Path | None = None,
        file: Path | None = None,
        earlier: list["BackgroundRun"] | None = None,
    ):
        """`folder` is the outbox, `file` the record's file there if another process left it, and `earlier` the runs of
        this process that write to the same MLflow run and go first."""
        self.run_id = record.run_id
        self.record, self.done, self.closing = record, threading.Event(), threading.Event()
        self._server, self._folder, self._file, self._from_outbox = server, folder, file, file is not None
        # Two of them that log the same steps at the same time would both find the steps missing.
        self._earlier = earlier or []
        self._lock = threading.Lock()
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._opened: Opened | None = None
        self._queued: dict[str, set[int]] = {}
        self._logged: dict[str, set[int]] | None = None
        self._refused_points, self._last_step, self._answered, self._warned = 0, 0, 0.0, False
        if self._from_outbox:
            self.closing.set()

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Queues one point per numeric metric, and each step of a metric once. Never blocks and never raises."""
        with self._lock:
            self._last_step = max(self._last_step, int(step))
            for point in points(metrics, int(step)):
                steps = self._queued.setdefault(point.name, set())
                if point.step not in steps:
                    steps.add(point.step)
                    self.record.points.append(point)
        self._wake.set()

    def dataset(self, name: str, digest: str, source_uri: str) -> None:
        """Queues a dataset as an input of the run."""
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
        """Ends the run as FINISHED, FAILED or KILLED, and returns the number of points that have not arrived.

        Waits at most `seconds`, and less if the server does not answer. Keeps the rest in the outbox.
        `artifacts` maps names to URIs, which become tags `artifact.<name>`; `texts` become files of the run.
        """
        status = final(status)
        self.log(self._last_step, metrics or {})
        links = {f"artifact.{name}": uri for name, uri in (artifacts or {}).items()}
        with self._lock:
            self.record.status, self.record.ended = status, now()
            self.record.tags.update({name: str(value) for name, value in {**(tags or {}), **links}.items()})
            self.record.texts.update(texts or {})
        self.closing.set()
        self._wake.set()
        began = time.monotonic()
        while not self.done.is_set():
            deadline = min(began + seconds, max(began, self._answered) + QUIET_SECONDS)
            if (left := deadline - time.monotonic()) <= 0:
                break
            self.hurry()
            self.done.wait(min(left, 0.5))
        return self._keep()

    def hurry(self) -> None:
        """Ends a pause after a failure."""
        self._hurry.set()

    def pause(self, seconds: float) -> None:
        """Waits after a failure, at most until `hurry` is called."""
        self._hurry.wait(seconds)
        self._hurry.clear()

    def wait_for_input(self) -> None:
        """Waits until something is queued."""
        self._wake.wait()

    def deliver(self) -> bool:
        """Sends everything that is queued. Returns False if it must be tried again.

        Sets `done` at the end of the run, and then removes its file from the outbox.
        """
        if any(not run.done.is_set() for run in self._earlier):
            return False
        self._wake.clear()
        try:
            if self._send_queue():
                self._end(arrived=True)
            return True
        except Exception as error:  # a training must not fail because of its curves, whatever the error is
            log.debug("MLflow: %s", error)
            self._logged = {}  # a request may have arrived although its answer was lost
            if self._opened is None and self._server.refused(error):
                return self._cannot_open(error)
            return False

    def _send_queue(self) -> bool:
        """Sends everything that is queued. Returns whether the run is closed. Raises what MLflow raises."""
        closing, record = self.closing.is_set(), self.record
        if self._opened is None:
            self._opened = self._server.open(record)
            self._logged = {} if self._opened.continued else None
            self.run_id = record.run_id = self._opened.run_id
            self._answered = time.monotonic()
        while record.datasets:
            self._request(lambda: self._server.add_dataset(self.run_id, *record.datasets[0]))
            with self._lock:
                del record.datasets[0]
        while record.points:
            with self._lock:
                batch = record.points[:MAX_BATCH_METRICS]
            new = [p for p in batch if not self._is_logged(p)]
            if new:
                self._request(lambda new=new: self._server.send(self.run_id, new, {}), len(new))
            with self._lock:
                del record.points[: len(batch)]
        # The tags and the status of a later attempt are kept.
        if closing and not self._opened.superseded:
            self._request(lambda: self._server.send(self.run_id, [], record.tags))
            self._request(lambda: self._server.close(self.run_id, record.status, record.ended))
            for name, text in record.texts.items():
                self._request(lambda name=name, text=text: self._server.add_text(self.run_id, name, text))
        return closing

    def _request(self, send: Callable[[], None], size: int = 0) -> None:
        """Sends a request with `size` points. Counts them if the server refuses it. Raises if it does not answer."""
        try:
            send()
        except Exception as error:
            if not self._server.refused(error):
                raise
            self._refused_points += size
            log.warning("MLflow refused a part of %s: %s", self._name(), _one_line(error))
        self._answered = time.monotonic()

    def _is_logged(self, point: Point) -> bool:
        """Whether the run has this step of the metric. A resumed training repeats steps; a parent run has no steps."""
        if self._logged is None or not self.record.stage:
            return False
        if point.name not in self._logged:
            self._logged[point.name] = self._server.logged_steps(self.run_id, point.name)
        return point.step in self._logged[point.name]

    def _cannot_open(self, error: Exception) -> bool:
        """Warns once. A run from the outbox ends and leaves its file to a later process. Returns whether it ended."""
        if not self._warned:
            remedy = f". Remove {self._file} if you do not need it" if self._from_outbox else ""
            text = "MLflow at %s refused to open %s: %s%s"
            log.warning(text, self._server.uri, self._name(), _one_line(error), remedy)
            self._warned = True
        if self._from_outbox:
            self._end(arrived=False)
        return self._from_outbox

    def _keep(self) -> int:
        """Keeps the rest in the outbox. Returns the number of missing points, including the refused ones."""
        with self._lock:
            missing = self._refused_points + len(self.record.points)
            if self.done.is_set():
                if missing:
                    log.warning("MLflow at %s refused %d points of %s", self._server.uri, missing, self._name())
                return missing
            where = "in memory only, because no outbox is given"
            if self._folder is not None:
                try:
                    self._file = outbox.keep(self.record, self._folder)
                    where = f"in {self._file}"
                except (OSError, ValueError) as error:
                    where = f"in memory only, because {self._folder} cannot be written ({error})"
        text = "MLflow at %s has not accepted all of %s: %d points, its tags and its status are kept %s and sent later"
        log.warning(text, self._server.uri, self._name(), missing, where)
        return missing

    def _end(self, arrived: bool) -> None:
        with self._lock:
            if arrived and self._file is not None:
                with contextlib.suppress(OSError):  # a record that is sent twice changes nothing
                    self._file.unlink(missing_ok=True)
            self.done.set()

    def _name(self) -> str:
        return f"stage {self.record.stage}" if self.record.stage else "the parent run"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
