"""What MLflow has not taken yet, in files: a run's record outlives an outage of the server and the process that wrote it.

`<uuid>.json` belongs to its writer; a process that takes it over renames it to `<uuid>.<pid>-<start>.json`, which only one of several can do.
"""

import contextlib
import json
import logging
import math
import numbers
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tasks.core.storage import processes

log = logging.getLogger("ratchet.tracking")

FINAL = ("FINISHED", "FAILED", "KILLED")


class Point(NamedTuple):
    """One value of one metric; `time` in milliseconds since 1970."""

    name: str
    value: float
    time: int
    step: int


def now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def points(metrics: dict[str, Any], step: int) -> list[Point]:
    """Points for everything numeric: booleans as 0 and 1, infinities as NaN (MLflow would plot 1.8e308), names as MLflow takes them."""
    named = {clean(name): value for name, value in metrics.items() if isinstance(value, numbers.Real)}
    return [
        Point(name, float(value) if math.isfinite(value) else math.nan, now(), step) for name, value in named.items()
    ]


def clean(name: str) -> str:
    """The name with `_` for what MLflow does not allow in one, cut to the 250 characters that it holds."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def flatten(params: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dicts as `a.b` -> text; lists as JSON; an empty dict stays as `{}`."""
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
    """The status. Raises ValueError for one that does not end a run."""
    if status not in FINAL:
        raise ValueError(f"status is {status!r} and must be one of {', '.join(FINAL)}")
    return status


class Record(BaseModel):
    """One run and what it has yet to be told; times in milliseconds since 1970. Without a `stage` it is a parent run, by its run_id."""

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
        """Equal for records of one MLflow run."""
        return (
            (self.uri, self.experiment, self.parent, self.stage, self.key)
            if self.stage
            else (self.uri, self.experiment, self.run_id or self.id)
        )


def keep(record: Record, folder: Path) -> Path:
    """Writes the record's file, whole or not at all. Raises OSError, and ValueError for what JSON cannot say."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{record.id}.json", folder / f"{record.id}.part"
    try:
        with part.open("w") as file:
            json.dump(record.model_dump(), file, default=str)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def claim(folder: Path, uri: str, experiment: str, busy: set[str]) -> list[tuple[Path, Record]]:
    """Takes over the files for this server and experiment that nobody delivers, oldest first; `busy` are ids that this process does deliver.

    A file that is no record becomes `*.damaged`, and what cannot be read is left, both with a warning.
    """
    taken = []
    for path in sorted(folder.glob("*.json")):
        if path.name.partition(".")[0] in busy:
            continue
        try:
            record = Record.model_validate_json(path.read_bytes())
            if (record.uri, record.experiment) == (uri, experiment) and not _others(path, record):
                pid, start = processes.myself()
                taken.append((path.rename(folder / f"{path.name.partition('.')[0]}.{pid}-{start:.0f}.json"), record))
        except FileNotFoundError:  # delivered, or taken by another process, between two of these lines
            continue
        except ValueError as error:
            _set_aside(path, error)
        except OSError as error:
            log.warning("what was kept for MLflow in %s cannot be taken up: %s", path, error)
    return sorted(taken, key=lambda entry: entry[1].began)


def _set_aside(path: Path, error: ValueError) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):  # another process does the same
        path.rename(aside)
    log.warning(
        "what was kept for MLflow in %s cannot be read and is set aside as %s: %s",
        path,
        aside.name,
        " ".join(str(error).split())[:200],
    )


def _others(path: Path, record: Record) -> bool:
    """Whether another process that lives delivers the file."""
    pid, start = record.owner
    claimed = path.name.split(".")[1]
    if claimed != "json":
        pid, start = (int(part) for part in claimed.split("-"))
    return pid != os.getpid() and processes.find(pid, start) is not None
