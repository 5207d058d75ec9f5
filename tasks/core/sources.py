"""Where rows come from: generated arithmetic, JSON Lines on disk or S3, a Hugging Face data set. Every row is checked as it is read."""

import json
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import DataSection
from tasks.core import answers

ROLES = ("train", "validation", "test")
_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


@dataclass(frozen=True)
class Row:
    """A question with its gold answer (as `answers.normal_gold` writes it) and a worked answer that ends in `Final Answer: gold`."""

    id: str
    question: str
    gold: str
    target: str
    where: str  # for messages, such as "train.jsonl line 12"

    @property
    def key(self) -> str:
        """What makes two questions the same: the text but for case and space."""
        return " ".join(self.question.split()).casefold()


@dataclass(frozen=True)
class Splits:
    """Rows of each split, and demonstrations as (id, question, completion), all of them over training questions."""

    demonstrations: list[tuple[str, str, str]]
    train: list[Row]
    validation: list[Row]
    test: list[Row]


def read(section: DataSection, seed: int) -> Splits:
    """The rows of `data.source`. Raises DataError for any row, column, file or size that cannot be used."""
    return {"arithmetic": arithmetic, "jsonl": jsonl, "hub": hub}[section.source](section, seed)


def unique(rows: list[Row]) -> list[Row]:
    """The first row of every question, in order."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return list(first.values())


def _hold_out(rows: list[Row], size: int, split: str, seed: int, label: str) -> tuple[list[Row], list[Row]]:
    """Takes `size` different questions, with all their rows, out of `rows`; gives what is left, in order, and what was taken, in the order drawn."""
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    if size >= len(by_key):
        raise DataError(
            f"data.{split}_size is {size} and {label} has {len(by_key)} different questions left to take them from, "
            f"of which at least one must stay for training: lower data.{split}_size or add rows"
        )
    taken = random.Random(f"{seed} {split}").sample(list(by_key), size)
    held = set(taken)
    return [r for r in rows if r.key not in held], [r for k in taken for r in by_key[k]]


def _from_tables(section: DataSection, seed: int, label: str, train: list[Row], validation: list[Row] | None, test: list[Row] | None) -> Splits:
    """Splits what the source has no split of, and takes every training row as a demonstration."""
    if test is None:
        train, test = _hold_out(train, section.test_size, "test", seed, label)
    if validation is None:
        train, validation = _hold_out(train, section.validation_size, "validation", seed, label)
    return Splits([(r.id, r.question, r.target) for r in train], train, validation, test)


# --- arithmetic ---


def arithmetic(section: DataSection, seed: int) -> Splits:
    """Sums and differences of two-digit numbers with two-digit results, without carry or borrow: 3,960 questions, in seeded order.

    Demonstrations are imperfect on purpose (shares in `data.arithmetic`): SFT imitates them, and only the reward can go beyond.
    """
    numbers = range(10, 100)
    sums = [(a, "+", b, a + b) for a in numbers for b in numbers if a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10]
    differences = [(a, "-", b, a - b) for a in numbers for b in numbers if a % 10 >= b % 10 and a // 10 > b // 10]
    rows = [
        Row(f"{a}{op}{b}", f"What is {a} {op} {b}?", str(c), f"{a} {op} {b} = {c}. Final Answer: {c}", "data.source arithmetic")
        for a, op, b, c in sums + differences
    ]
    random.Random(f"{seed} order").shuffle(rows)
    splits = _from_tables(section, seed, "data.source arithmetic", rows, None, None)
    return Splits(_imperfect(section, seed, splits.train), splits.train, splits.validation, splits.test)


def _imperfect(section: DataSection, seed: int, train: list[Row]) -> list[tuple[str, str, str]]:
    """Demonstrations over training questions: some right, some a wrong bare guess, some that never answer."""
    settings = section.arithmetic
    rng = random.Random(f"{seed} demonstrations")
    right, wrong = round(settings.demonstrations * settings.right), round(settings.demonstrations * settings.wrong)
    kinds = (["right"] * right + ["wrong"] * wrong + ["none"] * settings.demonstrations)[: settings.demonstrations]
    rng.shuffle(kinds)
    made = []
    for number, kind in enumerate(kinds, 1):
        row = rng.choice(train)
        guess = rng.randrange(10, 99)
        guess += guess >= int(row.gold)  # any two-digit number but the right one
        sum_ = row.question.removeprefix("What is ").removesuffix("?")
        completion = {"right": row.target, "wrong": f"Final Answer: {guess}", "none": f"Let me think about {sum_}."}[kind]
        made.append((f"demonstration-{number}", row.question, completion))
    return made


# --- JSON Lines ---


def jsonl(section: DataSection, seed: int) -> Splits:
    """`data.path`: one file, split by the seed, or a folder with train.jsonl, test.jsonl and perhaps validation.jsonl."""
    with local_files(section.path) as files:
        tables = {role: _rows(section, role, _json_lines(file, label), label, "line") for role, (file, label) in files.items()}
    label = f"data.path {section.path}"
    train = tables["all"] if "all" in tables else tables["train"]
    return _from_tables(section, seed, label, train, tables.get("validation"), tables.get("test"))


@contextmanager
def local_files(path: str) -> Iterator[dict[str, tuple[Path, str]]]:
    """The files of `data.path` by role (`all` for a single file) with a label for messages; those on S3 are downloaded for as long as this is open.

    Raises DataError where one is missing, StorageUnavailable where S3 does not answer.
    """
    if path.startswith("s3://"):
        with tempfile.TemporaryDirectory(prefix="ratchet-data-") as folder:
            yield _downloaded(path.rstrip("/"), Path(folder))
        return
    local = Path(path.removeprefix("file://")).expanduser()
    if local.is_file():
        found = {"all": (local, local.name)}
    elif local.is_dir():
        found = _complete(path, {role: (local / f"{role}.jsonl", f"{role}.jsonl") for role in ROLES if (local / f"{role}.jsonl").is_file()})
    else:
        raise DataError(f"data.path is {path} and does not exist: name a JSON Lines file, or a folder with train.jsonl and test.jsonl")
    for file, label in found.values():
        if not os.access(file, os.R_OK):
            raise DataError(f"data.path is {path} and {label} may not be read: change its permissions")
    yield found


def _complete(path: str, found: dict[str, tuple[Path, str]]) -> dict[str, tuple[Path, str]]:
    missing = [f"{role}.jsonl" for role in ("train", "test") if role not in found]
    if missing:
        raise DataError(f"data.path is {path} and has no {' and no '.join(missing)}: add what is missing, or name a single JSON Lines file to be split")
    return found


def _downloaded(path: str, folder: Path) -> dict[str, tuple[Path, str]]:
    # Here, so that a local path does not need the S3 client.
    from tasks.core import store

    parent, _, name = path.rpartition("/")
    if parent != "s3:/":
        above = store.open_store(parent)
        if name in above.list(name):
            above.get_file(name, folder / "all.jsonl")
            return {"all": (folder / "all.jsonl", name)}
    inside = store.open_store(path)
    roles = [role for role in ROLES if f"{role}.jsonl" in inside.list(f"{role}.jsonl")]
    if not roles:
        raise DataError(f"data.path is {path} and does not exist: name a JSON Lines object, or a prefix with train.jsonl and test.jsonl")
    found = _complete(path, {role: (folder / f"{role}.jsonl", f"{role}.jsonl") for role in roles})
    for role, (file, _) in found.items():
        inside.get_file(f"{role}.jsonl", file)
    return found


def _json_lines(file: Path, label: str) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1 and parsed lines; blank lines are passed over."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{label} line {number} is not valid JSON in UTF-8 ({error}): correct the line or take it out") from error


# --- Hugging Face data sets ---


def hub(section: DataSection, seed: int) -> Splits:
    """The splits `data.hub.train_split` and `data.hub.test_split` of a data set on the Hub, or in a local folder that `load_dataset` understands."""
    names = {"train": section.hub.train_split, "test": section.hub.test_split}
    tables = {role: _rows(section, role, enumerate(_load(section, name), 1), f"split {name}", "row") for role, name in names.items()}
    return _from_tables(section, seed, f"data.hub.name {section.hub.name}", tables["train"], None, tables["test"])


def _load(section: DataSection, split: str) -> Any:
    import datasets
    import httpx

    hub = section.hub
    try:
        return datasets.load_dataset(hub.name, hub.config, revision=hub.revision, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError, httpx.HTTPError) as error:
        why = " ".join(str(error).split())[:300].rstrip(".")
        raise DataError(
            f"data.hub.name is {hub.name} (config {hub.config}, revision {hub.revision}, split {split}) and cannot be loaded ({why}): "
            "check these fields and the network, or name a local copy with data.path"
        ) from error


# --- rows ---


def _rows(section: DataSection, role: str, records: Iterable[tuple[int, Any]], label: str, unit: str) -> list[Row]:
    """Checked rows of one table. Raises DataError with the number of the first line that cannot be used, and for a table without rows."""
    rows = [_row(section, f"{role}-{number}", record, f"{label} {unit} {number}") for number, record in records]
    if not rows:
        raise DataError(f"{label} has no rows: it must hold at least one question with its answer")
    return rows


def _row(section: DataSection, id_: str, record: Any, where: str) -> Row:
    if not isinstance(record, dict):
        raise DataError(f"{where} holds {type(record).__name__} and must be an object with columns: correct the line or take it out")
    question = _text(record, "question_column", section.question_column, where)
    answer = _text(record, "answer_column", section.answer_column, where)
    work, mark, stated = answer.rpartition("####")
    if not mark:
        raise DataError(f"{where} has no #### in {section.answer_column}: an answer must end in `#### N`, where N is the gold answer")
    gold = answers.normal_gold(stated)
    if gold is None:
        raise DataError(
            f"{where} has the gold answer {stated.strip()[:60]!r}, which no answer could be compared with: "
            r"write a number, a ratio, yes or no, a choice such as B, LaTeX, or \text{words} after the last ####"
        )
    work = _CALCULATOR_MARK.sub("", work).strip()
    return Row(id_, question, gold, f"{work}\nFinal Answer: {gold}".lstrip(), where)


def _text(record: dict, field: str, column: str, where: str) -> str:
    """A column's text, stripped. Raises DataError for one that is missing, not text or blank."""
    if column not in record:
        has = ", ".join(sorted(record)) or "none"
        raise DataError(f"{where} has no column {column} (data.{field}), it has {has}: add the column or change data.{field}")
    value = record[column]
    if not isinstance(value, str):
        raise DataError(f"{where} has {type(value).__name__} in column {column} (data.{field}) and must have text: put it in quotes")
    if not value.strip():
        raise DataError(f"{where} has nothing in column {column} (data.{field}): fill it in or take the line out")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(f"{where} has half a surrogate pair in column {column} (data.{field}), which is no text: correct the line or take it out")
    return value.strip()
