"""What a child reports, shown in Prefect and MLflow."""

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

from tasks.core.curves import StageRun

CURVES = ("reward", "kl_k3", "loss")
# Between two calls for the bar; and what the last one is waited for.
BAR_SECONDS, LAST_SECONDS = 1.0, 5.0


class Progress:
    """Turns a child's events into a progress artifact, log lines and curves. A Prefect server that is away costs the bar and never the work."""

    def __init__(self, stage: str, child_run: StageRun):
        self.stage, self.child_run, self.log = stage, child_run, get_run_logger()
        self.artifact: UUID | None = None
        self.call: threading.Thread | None = None
        self.next_call = 0.0
        self._show(0.0)

    def __call__(self, event: dict[str, Any]) -> None:
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
            self.child_run.log(step, numbers({k: v for k, v in event.items() if k not in ("step", "max_steps", "num_epochs")}))
            self._show(step / max(last, 1))

    def done(self) -> None:
        """The bar is full: some stages have nothing to count."""
        if self.call is not None:
            self.call.join(LAST_SECONDS)
        self.next_call = 0.0
        self._show(1.0)
        self.call.join(LAST_SECONDS)

    def _show(self, share: float) -> None:
        """Shows the share in the background, unless it is not time yet or the call before has no answer yet: it may be tried for minutes."""
        if time.monotonic() < self.next_call or (self.call is not None and self.call.is_alive()):
            return
        self.next_call = time.monotonic() + BAR_SECONDS
        self.call = threading.Thread(target=contextvars.copy_context().run, args=(self._send, 100 * share), daemon=True)
        self.call.start()

    def _send(self, percent: float) -> None:
        try:
            if self.artifact is None:
                self.artifact = create_progress_artifact(percent, key=self.stage.replace("_", "-"), description=f"Progress of {self.stage}")
            else:
                update_progress_artifact(self.artifact, progress=percent)
        except (httpx.HTTPError, PrefectException, RuntimeError) as error:  # the client turns a server that is away into any of these
            self.log.debug("the bar of %s is not shown: %s", self.stage, error)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def line(event: dict[str, Any]) -> str:
    """`epoch 1/2 | step 100/500 | reward 0.45 | kl 0.023 | loss 1.234` of a log event, with what it has of these."""
    parts = [f"epoch {max(1, math.ceil(event['epoch']))}/{math.ceil(event['num_epochs'])}"] if "num_epochs" in event else []
    parts.append(f"step {event['step']}/{event['max_steps']}")
    parts += [f"{name.removesuffix('_k3')} {event[name]:.4g}" for name in CURVES if isinstance(event.get(name), int | float)]
    return " | ".join(parts)
