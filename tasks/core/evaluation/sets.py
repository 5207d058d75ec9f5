"""Further evaluation sets: rows of the data artifact, or a JSON Lines file of questions and gold answers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import DataSection, EvaluationSet
from tasks.core.data.prepare import held_out
from tasks.core.evaluation import harness
from tasks.core.scoring import answers
from tasks.core.storage.jsonl import read_rows, sample


def rows(name: str, section: EvaluationSet, source: DataSection, data: Path, seed: int) -> list[dict[str, Any]]:
    """The prompts of a set, in the order of their file; `max_samples` of them are chosen by the seed alone.

    A file is read as the data section says that its own rows are read: columns, conversations, template. An answer may be the gold one alone.
    Raises DataError for a file that cannot be read and for a row that cannot be used; StorageUnavailable.
    """
    if section.path is None:
        found = read_rows(data / f"{section.split}.jsonl")
    else:
        lines = enumerate(read_file(name, section.path).decode("utf-8-sig", errors="replace").split("\n"), 1)
        found = [_row(name, number, line, source) for number, line in lines if line.strip()]
    if not found:
        raise DataError(
            f"evaluation.sets.{name} holds no prompts: name a split or a file that has some, or take the set out"
        )
    return chosen(found, section.max_samples, seed)


def chosen(rows: list[dict[str, Any]], most: int | None, seed: int) -> list[dict[str, Any]]:
    """At most so many rows, chosen by the seed, in their order."""
    return [rows[i] for i in sorted(sample(list(range(len(rows))), most, seed))]


def read_file(name: str, path: str) -> bytes:
    """The bytes of a set's file, on disk or at s3://. Raises DataError where there is none, StorageUnavailable where S3 does not answer."""
    if path.startswith("s3://"):
        from tasks.core.storage.store import open_store

        above, _, file = path.rpartition("/")
        store = open_store(above)
        if file in store.list(file):
            return store.get_bytes(file)
    else:
        local = Path(path.removeprefix("file://")).expanduser()
        if local.is_file():
            return local.read_bytes()
    raise DataError(
        f"evaluation.sets.{name}.path is {path}, and there is no such file: name a JSON Lines file on disk or at s3://"
    )


def digests(sets: dict[str, EvaluationSet]) -> dict[str, str]:
    """SHA-256 of every set's file or task, for the stage key: other content under the same path is another set. Raises as `read_file` and the harness do."""
    files = {
        name: hashlib.sha256(read_file(name, one.path)).hexdigest()
        for name, one in sets.items()
        if one.path is not None
    }
    return files | {name: harness.digest(one.task) for name, one in sets.items() if one.task is not None}


def check(sets: dict[str, EvaluationSet], source: DataSection, data: Path, seed: int) -> str:
    """What every set holds, in words. Raises what measuring on it would: DataError, ConfigError, StorageUnavailable."""
    said = {
        name: f"{len(rows(name, one, source, data, seed)):,} prompts" for name, one in sets.items() if one.task is None
    }
    said |= {name: f"the task {harness.find(one.task)[0]}" for name, one in sets.items() if one.task is not None}
    return "; ".join(f"{name}: {said[name]}" for name in sets)


def _row(name: str, number: int, line: str, source: DataSection) -> dict[str, Any]:
    where = f"line {number} of evaluation.sets.{name}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}): correct the line or take it out") from error
    return held_out(source, f"{name}-{number}", where, _marked(record, source))


def _marked(record: Any, source: DataSection) -> Any:
    """The record, its answer marked as gold where it states none: a set needs no demonstrations."""
    answer = (
        record.get(source.answer_column)
        if isinstance(record, dict) and source.gold_column is None and source.messages_column is None
        else None
    )
    whole = isinstance(answer, str) and answer.strip() and answers.extract_answer(answer) is None
    return {**record, source.answer_column: f"#### {answer}"} if whole else record
