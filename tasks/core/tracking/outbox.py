"""The outbox: a folder of records that MLflow has not accepted yet.

Records outlive an outage and the process that wrote them.
`<id>.json` belongs to the process that wrote it. A process that takes a record over renames the file to
`<id>.<pid>-<start>.json`, and a rename succeeds for one process only.
"""

import contextlib
import json
import logging
import os
from pathlib import Path

from tasks.core.storage import processes
from tasks.core.tracking.records import Record

log = logging.getLogger("ratchet.tracking")


def keep(record: Record, folder: Path) -> Path:
    """Writes the record to a file, whole or not at all.

    Raises OSError if the folder cannot be written, and ValueError if JSON cannot hold the record.
    """
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
    """Takes over the records for this server and experiment that no live process delivers, oldest first.

    `busy` holds the ids that this process delivers already. A file without a valid record is renamed to `*.damaged`,
    and a file that cannot be read stays where it is, both with a warning.
    """
    taken = []
    for path in sorted(folder.glob("*.json")):
        record_id = path.name.partition(".")[0]
        if record_id in busy:
            continue
        try:
            record = Record.model_validate_json(path.read_bytes())
            if (record.uri, record.experiment) == (uri, experiment) and not _has_live_owner(path, record):
                pid, start = processes.myself()
                taken.append((path.rename(folder / f"{record_id}.{pid}-{start:.0f}.json"), record))
        except FileNotFoundError:  # another process delivered it or took it over in the meantime
            continue
        except ValueError as error:
            _set_aside(path, error)
        except OSError as error:
            log.warning("%s is kept for MLflow and cannot be taken over: %s", path, error)
    return sorted(taken, key=lambda entry: entry[1].began)


def _set_aside(path: Path, error: ValueError) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    with contextlib.suppress(OSError):  # another process does the same
        path.rename(aside)
    reason = " ".join(str(error).split())[:200]
    log.warning("%s was kept for MLflow and is damaged. It is renamed to %s: %s", path, aside.name, reason)


def _has_live_owner(path: Path, record: Record) -> bool:
    """Whether another live process delivers the file: the process that took it over, or else the one that wrote it."""
    pid, start = record.owner
    claimed = path.name.split(".")[1]
    if claimed != "json":
        pid, start = (int(part) for part in claimed.split("-"))
    return pid != os.getpid() and processes.find(pid, start) is not None
