"""Where records come from: generated arithmetic, files on disk or S3, a Hugging Face data set, tasks of reasoning-gym."""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, DataError
from configs.schema import DataSection
from tasks.core.data import arithmetic
from tasks.core.data.files import Record, local_files, records
from tasks.core.scoring import answers


@dataclass(frozen=True)
class Source:
    """One split of a source; `all` is one that is yet to be split."""

    role: str
    label: str
    records: Iterable[Record]
    own_ids: bool = False  # whether records have an `id`


@contextmanager
def read(section: DataSection, seed: int) -> Iterator[tuple[DataSection, str, list[Source]]]:
    """The section (columns as the source names them), a label for the whole, and its splits. Raises DataError for what is not there."""
    if section.source == "files":
        with local_files(section.path) as files:
            yield (
                section,
                f"data.path {section.path}",
                [Source(role, _label(role, parts), _chained(parts)) for role, parts in files.items()],
            )
    elif section.source == "hub":
        hub = section.hub
        names = {"train": hub.train_split, "validation": hub.validation_split, "test": hub.test_split}
        splits = [Source(role, f"split {name}", _hub(section, name)) for role, name in names.items() if name]
        yield section, f"data.hub.name {hub.name}", splits
    else:
        own = {
            "question_column": "question",
            "answer_column": "answer",
            "gold_column": "gold",
            "messages_column": None,
            "category_column": "category",
        }
        label = f"data.source {section.source}"
        rows = _arithmetic(label, seed) if section.source == "arithmetic" else _reasoning_gym(section, seed)
        yield (
            section.model_copy(update=own),
            label,
            [Source("all", label, rows, own_ids=section.source == "arithmetic")],
        )


def digest(section: DataSection) -> str:
    """SHA-256 of what the source reads besides its section, for the stage key: a changed file is other data under the same path.

    "" for arithmetic, which the section describes whole. A data set on the Hub goes by name, config and revision; without a revision,
    a change on the Hub goes unseen. reasoning-gym goes by its version. Raises as `read` does for what is not there. Imports neither torch nor datasets.
    """
    if section.source == "arithmetic":
        return ""
    total = hashlib.sha256()
    if section.source == "reasoning_gym":
        total.update(_version().encode())
    elif section.source == "files":
        with local_files(section.path) as files:
            for role, parts in sorted(files.items()):
                for file, _ in parts:
                    total.update(f"{role} {file.suffix.lower()} {_file_digest(file)}\n".encode())
    else:
        hub = section.hub
        total.update(json.dumps([hub.name, hub.config, hub.revision]).encode())
        folder = Path(hub.name)
        for file in sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []:
            total.update(f"{file.relative_to(folder).as_posix()} {_file_digest(file)}\n".encode())
    return total.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _label(role: str, parts: list[tuple[Path, str]]) -> str:
    return parts[0][1] if len(parts) == 1 else f"the {role} files"


def _chained(parts: list[tuple[Path, str]]) -> Iterator[Record]:
    for number, (file, label) in enumerate(parts):
        for where, record, share in records(file, label):
            yield where, record, (number + share) / len(parts)


def _arithmetic(label: str, seed: int) -> Iterator[Record]:
    made = arithmetic.records(seed)
    for number, record in enumerate(made, 1):
        yield label, record, number / len(made)


def _hub(section: DataSection, split: str) -> Iterator[Record]:
    """The rows of a split of a data set on the Hub, or in a local folder that `load_dataset` understands; Arrow maps them from disk."""
    import datasets
    import httpx

    hub = section.hub
    try:
        table = datasets.load_dataset(hub.name, hub.config, revision=hub.revision, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError, httpx.HTTPError) as error:
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise DataError(
            f"data.hub.name is {hub.name} (config {hub.config}, revision {hub.revision}, split {split}) and cannot be loaded ({why}): "
            "check these fields and the network, or name a local copy with data.path"
        ) from error
    for number, record in enumerate(table, 1):
        yield f"split {split} row {number}", record, number / len(table)


def _version() -> str:
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "data.source is reasoning_gym, which is not installed: pip install 'ratchet[reasoning-gym]'"
        ) from None


def _reasoning_gym(section: DataSection, seed: int) -> Iterator[Record]:
    """`size` rows of every task. A gold answer that is neither a number nor an expression is a text."""
    _version()
    from reasoning_gym.factory import DATASETS, create_dataset

    settings, size = section.reasoning_gym, section.reasoning_gym.size
    for name in (*settings.tasks, *settings.settings):
        if name not in DATASETS:
            raise ConfigError(
                f"data.reasoning_gym names the task {name}, which reasoning-gym does not have: its tasks are {', '.join(sorted(DATASETS))}"
            )
    for task_number, name in enumerate(settings.tasks):
        try:
            rows = create_dataset(name, **{"seed": seed, "size": size, **settings.settings.get(name, {})})
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"data.reasoning_gym.settings of {name} are refused ({error}): correct them") from error
        for number in range(len(rows)):
            row = rows[number]
            yield (
                f"{name} row {number + 1}",
                _plain(row, name),
                (task_number + (number + 1) / len(rows)) / len(settings.tasks),
            )


def _plain(row: dict[str, Any], task: str) -> dict[str, Any]:
    gold = row["answer"]
    if isinstance(gold, str) and answers.normal_gold(gold) is None:
        gold = rf"\text{{{gold}}}"
    return {"question": row["question"], "gold": gold, "category": task, "metadata": row.get("metadata")}
