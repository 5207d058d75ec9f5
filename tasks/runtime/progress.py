"""What a child process reports, shown in Prefect and MLflow."""

import contextvars
import math
import threading
import time
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import PrefectException

from tasks.core.tracking.background_run import BackgroundRun

CURVES = ("reward", "kl_k3", "loss")
# The shortest time between two updates of the progress bar, and how long the last update may take.
UPDATE_SECONDS, LAST_UPDATE_SECONDS = 1.0, 5.0


class Progress:
    """Turns a child's events into a progress artifact, log lines and curves.

    A Prefect server that is away costs updates of the progress bar; it never stops the work.
    """

    def __init__(self, stage: str, mlflow_run: BackgroundRun):
        self.stage, self.mlflow_run, self.log = stage, mlflow_run, get_run_logger()
        self.artifact: UUID | None = None
        self.update: threading.Thread | None = None
        self.next_update = 0.0
        self._show(0.0)

    def __call__(self, event: dict[str, Any]) -> None:
        """Handles one event: `message`, `progress` or `log` (docs/how-it-works.md)."""
        kind = event.pop("event")
        if kind == "message":
            show = self.log.warning if event.get("level") == "warning" else self.log.info
            show("%s: %s", self.stage, event["message"])
        elif kind == "progress":
            self._show(event["done"] / max(event["total"], 1))
        else:
            step, last = int(event["step"]), int(event["max_steps"])
            if not event.pop("again", False):
                self.log.info("%s: %s", self.stage, line(event))
            values = {k: v for k, v in event.items() if k not in ("step", "max_steps", "num_epochs")}
            self.mlflow_run.log(step, numbers(values))
            self._show(step / max(last, 1))

    def done(self) -> None:
        """Fills the bar, for stages that report no progress."""
        if self.update is not None:
            self.update.join(LAST_UPDATE_SECONDS)
        self.next_update = 0.0
        self._show(1.0)
        self.update.join(LAST_UPDATE_SECONDS)

    def _show(self, share: float) -> None:
        """Updates the bar in the background, unless an update is still running (Prefect may retry it for minutes)."""
        if time.monotonic() < self.next_update or (self.update is not None and self.update.is_alive()):
            return
        self.next_update = time.monotonic() + UPDATE_SECONDS
        context = contextvars.copy_context()
        self.update = threading.Thread(target=context.run, args=(self._send, 100 * share), daemon=True)
        self.update.start()

    def _send(self, percent: float) -> None:
        try:
            if self.artifact is None:
                key = self.stage.replace("_", "-")
                self.artifact = create_progress_artifact(percent, key=key, description=f"Progress of {self.stage}")
            else:
                update_progress_artifact(self.artifact, progress=percent)
        # Prefect's client raises any of these when the server is away.
        except (httpx.HTTPError, PrefectException, RuntimeError) as error:
            self.log.debug("the progress bar of %s is not updated: %s", self.stage, error)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def line(event: dict[str, Any]) -> str:
    """A log event as `epoch 1/2 | step 100/500 | reward 0.45 | kl 0.023 | loss 1.234`; values it lacks are left out."""
    parts = []
    if "num_epochs" in event:
        parts.append(f"epoch {max(1, math.ceil(event['epoch']))}/{math.ceil(event['num_epochs'])}")
    parts.append(f"step {event['step']}/{event['max_steps']}")
    for name in CURVES:
        if isinstance(event.get(name), int | float):
            parts.append(f"{name.removesuffix('_k3')} {event[name]:.4g}")
    return " | ".join(parts)
