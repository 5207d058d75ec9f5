"""Records of files: JSON Lines, Parquet and CSV, on disk or S3, read a piece at a time."""

import csv
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.errors import DataError

ROLES = ("train", "validation", "test")
# Where a record stands, for messages; the record; and which share of its file is read, 0 to 1.
Record = tuple[str, Any, float]
Files = dict[str, list[tuple[Path, str]]]


@contextmanager
def local_files(path: str) -> Iterator[Files]:
    """The files of `data.path` by role (`all` for a single file), each with a label for messages; those on S3 are downloaded for as long as this is open.

    Raises DataError where one is missing, StorageUnavailable where S3 does not answer.
    """
    if path.startswith("s3://"):
        with tempfile.TemporaryDirectory(prefix="ratchet-data-") as folder:
            yield _downloaded(path.rstrip("/"), Path(folder))
        return
    local = Path(path.removeprefix("file://")).expanduser()
    if local.is_file():
        _reader(local.name)
        found = {"all": [(local, local.name)]}
    elif local.is_dir():
        names = [p.relative_to(local).as_posix() for p in local.rglob("*") if p.is_file()]
        found = {role: [(local / name, name) for name in inside] for role, inside in _by_role(path, names).items()}
    else:
        raise DataError(
            f"data.path is {path} and does not exist (seen from {Path.cwd()}): name a .jsonl, .parquet or .csv file, or a folder with train and test files"
        )
    for file, label in (f for files in found.values() for f in files):
        if not os.access(file, os.R_OK):
            raise DataError(f"data.path is {path} and {label} may not be read: change its permissions")
    yield found


def records(file: Path, label: str) -> Iterator[Record]:
    """What a file holds. Raises DataError for a file that cannot be read to its end; a line of JSON that is none is an Exception in place of its record."""
    yield from _reader(label)(file, label)


def _by_role(path: str, names: list[str]) -> dict[str, list[str]]:
    """Names of files by role: train.jsonl, train-00000-of-00002.parquet, train/0.csv. Raises DataError where train or test is missing or comes in two forms."""
    found: dict[str, list[str]] = {}
    kinds = "|".join(READERS)
    if other := next(
        (
            name
            for name in sorted(names)
            if re.fullmatch(rf"(?:val|valid|dev|eval)(?:-\d[^/]*|/.*)?\.(?i:{kinds})", name)
        ),
        None,
    ):
        raise DataError(
            f"data.path is {path} and has {other}, which is none of {', '.join(ROLES)} and would not be read: name it validation, or take it out"
        )
    # Hidden files are a system's or an editor's own (._train.jsonl, train/.ipynb_checkpoints/rows.jsonl), and no data.
    for name in sorted(name for name in names if not any(part.startswith(".") for part in name.split("/"))):
        role = re.fullmatch(rf"({'|'.join(ROLES)})(?:-\d[^/]*|/.*)?\.(?i:{kinds})", name)
        if role:
            found.setdefault(role[1], []).append(name)
    missing = [f"{role}.jsonl" for role in ("train", "test") if role not in found]
    if missing:
        raise DataError(
            f"data.path is {path} and has no {' and no '.join(missing)} (nor .parquet nor .csv): add what is missing, or name a single file to be split"
        )
    for role, files in found.items():
        endings = {name.rpartition(".")[2].lower() for name in files}
        if len(endings) > 1:
            raise DataError(
                f"data.path is {path} and has {files[0]} and {files[-1]}: keep the {role} files in one of the two forms"
            )
    return {role: found[role] for role in ROLES if role in found}


def _downloaded(path: str, folder: Path) -> Files:
    # Here, so that a local path does not need the S3 client.
    from tasks.core.storage import store

    parent, _, name = path.rpartition("/")
    if parent != "s3:/":
        above = store.open_store(parent)
        if name in above.list(name):
            _reader(name)
            above.get_file(name, folder / name)
            return {"all": [(folder / name, name)]}
    inside = store.open_store(path)
    names = list(inside.list())
    if not names:
        raise DataError(
            f"data.path is {path} and does not exist: name a .jsonl, .parquet or .csv object, or a prefix with train and test files"
        )
    found = _by_role(path, names)
    for name in (n for files in found.values() for n in files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        inside.get_file(name, folder / name)
    return {role: [(folder / name, name) for name in files] for role, files in found.items()}


def _reader(name: str) -> Callable[[Path, str], Iterator[Record]]:
    ending = name.rpartition(".")[2].lower()
    if ending not in READERS:
        raise DataError(
            f"data.path names {name}, and its ending says neither .jsonl nor .parquet nor .csv: give the file the ending of its format"
        )
    return READERS[ending]


def _json_lines(file: Path, label: str) -> Iterator[Record]:
    """Parsed lines, blank ones passed over."""
    for number, line, share in _lines(file):
        if not line.strip():
            continue
        where = f"{label} line {number}"
        try:
            yield where, json.loads(line.decode("utf-8")), share
        except (ValueError, RecursionError) as error:
            yield where, ValueError(f"is not valid JSON in UTF-8 ({error}): correct the line or take it out"), share


def _csv(file: Path, label: str) -> Iterator[Record]:
    """Rows under the names of the first line; every value is text."""
    csv.field_size_limit(2**31 - 1)  # the default refuses texts of more than 128 KiB
    place = [0, 0.0]

    def texts() -> Iterable[str]:
        for number, line, share in _lines(file):
            place[:] = number, share
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{label} line {number} is not UTF-8 ({error}): save the file as UTF-8") from error

    rows = csv.reader(texts(), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names) or not all(names):
            raise DataError(
                f"{label} line 1 has the columns {', '.join(names)[:200]}: each must have a name, and each name may occur once"
            )
        begin = place[0] + 1
        for values in rows:
            where, begin = f"{label} line {begin}", place[0] + 1
            if len(values) == len(names):
                yield where, dict(zip(names, values, strict=True)), place[1]
            elif values:
                yield (
                    where,
                    ValueError(f"has {len(values)} values for {len(names)} columns: correct the line or take it out"),
                    place[1],
                )
    except csv.Error as error:
        raise DataError(f"{label} line {place[0]} is not valid CSV ({error}): correct the line") from error


def _parquet(file: Path, label: str) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1000, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{label} row {number}", record, number / table.metadata.num_rows
    except (
        pyarrow.ArrowException,
        OSError,
        OverflowError,
        ValueError,
    ) as error:  # the latter two: a date that Python has not
        raise DataError(
            f"{label} cannot be read as Parquet after row {number} ({' '.join(str(error).split())[:200]}): write the file again"
        ) from error


def _lines(file: Path) -> Iterator[tuple[int, bytes, float]]:
    """Numbers from 1, lines, and which share of the file is read."""
    size, done = max(1, file.stat().st_size), 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            done += len(line)
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, done / size


READERS = {"jsonl": _json_lines, "json": _json_lines, "parquet": _parquet, "csv": _csv}
