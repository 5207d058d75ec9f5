"""What an MLflow run still has to receive, as plain data that can wait in memory or in a file."""

import json
import math
import numbers
import re
import time
import uuid
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tasks.core.storage import processes

FINAL_STATUSES = ("FINISHED", "FAILED", "KILLED")
MAX_NAME = 250


def now() -> int:
    """The current time in milliseconds since 1970."""
    return int(time.time() * 1000)


class Point(NamedTuple):
    """One value of one metric. `time` is in milliseconds since 1970."""

    name: str
    value: float
    time: int
    step: int


class Record(BaseModel):
    """One MLflow run and everything that has not reached it yet. Times are in milliseconds since 1970.

    A record with a `stage` describes a stage's run. A record without a `stage` describes the parent run with `run_id`.
    """

    model_config = ConfigDict(extra="forbid")

    uri: str
    experiment: str
    parent: str = ""
    stage: str = ""
    key: str = ""
    attempt: int = 1
    params: dict[str, Any] = {}
    run_id: str | None = None
    id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    owner: tuple[int, float] = Field(default_factory=processes.myself)
    began: int = Field(default_factory=now)
    ended: int | None = None
    status: str | None = None
    datasets: list[tuple[str, str, str]] = []
    points: list[Point] = []
    tags: dict[str, str] = {}
    texts: dict[str, str] = {}

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for all records of the same MLflow run."""
        if self.stage:
            return (self.uri, self.experiment, self.parent, self.stage, self.key)
        return (self.uri, self.experiment, self.run_id or self.id)


def points(metrics: dict[str, Any], step: int) -> list[Point]:
    """One point per numeric metric. Other values are left out.

    Booleans become 0 and 1. Infinities become NaN, because MLflow would plot them as 1.8e308.
    """
    named = {clean(name): value for name, value in metrics.items() if isinstance(value, numbers.Real)}
    return [Point(k, float(v) if math.isfinite(v) else math.nan, now(), step) for k, v in named.items()]


def clean(name: str) -> str:
    """The name as MLflow accepts it: other characters become `_`, and the name is cut to 250 characters."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:MAX_NAME]


def flatten(params: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested dicts to `a.b` -> text. Lists and empty dicts become JSON."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        path = clean(f"{prefix}{name}")
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{path}.")
        elif isinstance(value, (dict, list, tuple)):
            flat[path] = json.dumps(value, ensure_ascii=False, default=str)
        else:
            flat[path] = str(value)
    return flat


def final(status: str) -> str:
    """Returns the status. Raises ValueError for a status that does not end a run."""
    if status not in FINAL_STATUSES:
        raise ValueError(f"status is {status!r} and must be one of {', '.join(FINAL_STATUSES)}")
    return status
