"""Data preparation: any source becomes demonstrations for SFT, prompts for GRPO, and prompts held out for validation and test."""

import errno
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import DataSection
from tasks.core.data import arithmetic, card, checks, sources
from tasks.core.data.findings import Findings
from tasks.core.data.rows import Reader, Row, Unusable, messages
from tasks.core.data.table import Table, told
from tasks.core.scoring import answers

__all__ = ["held_out", "messages", "prepare", "source_digest"]

source_digest = sources.digest
# Shares of the time that reading, looking for contamination, looking for near duplicates and writing take, roughly.
_READ, _CONTAMINATION, _NEAR = 0.5, 0.6, 0.85
_EVERY = 1000  # rows between two events


def prepare(
    section: DataSection, seed: int, out: Path, emit: Callable[..., None] = lambda **event: None
) -> dict[str, int]:
    """Writes the `data` artifact into `out` and returns its report's counts.

    It holds sft.jsonl, grpo.jsonl, validation.jsonl and test.jsonl (JSON Lines), report.json, and the card (card.json, card.md).

    The same section, seed and source content give the same bytes. Everything is checked before the first byte is in `out`; rows lie in a file beside
    it meanwhile, so that memory does not grow with them. `emit` is told of the progress.
    Raises DataError for input that cannot be used, StorageUnavailable where the data lies on S3 and that does not answer.
    """

    def say(share: float) -> None:
        emit(event="progress", done=round(1000 * share), total=1000)

    findings = Findings(section.checks, section.source)
    with tempfile.TemporaryDirectory(prefix="ratchet-data-", dir=_folder(out)) as work:
        table = Table(Path(work) / "rows.sqlite")
        try:
            _read(section, seed, table, findings, lambda share: say(_READ * share))
            checks.conflicts(table, findings)
            repeated = checks.duplicates(table, findings)
            checks.leaks(table, findings)
            checks.contamination(table, findings, lambda share: say(_READ + (_CONTAMINATION - _READ) * share))
            checks.near_duplicates(
                table,
                findings,
                section.checks.similarity,
                lambda share: say(_CONTAMINATION + (_NEAR - _CONTAMINATION) * share),
            )
            for split in ("train", "test"):
                if not table.count(split):
                    raise DataError(f"no row is left for {split} after the checks of data.checks: {_dropped(findings)}")
            left_out = table.limit(section.max_samples, seed) if section.max_samples else 0
            files = Path(work) / "files"
            files.mkdir()
            report = _write(
                section,
                seed,
                table,
                findings,
                repeated,
                left_out,
                files,
                lambda share: say(_NEAR + (1 - _NEAR) * share),
            )
        except sqlite3.OperationalError as error:
            if "full" in str(error):  # SQLite's "database or disk is full"
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        finally:
            table.close()
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(files.iterdir()):
            shutil.move(file, out / file.name)
    say(1.0)
    return report


def held_out(section: DataSection, id_: str, where: str, record: Any) -> dict[str, Any]:
    """A record of some other file as a row of test.jsonl: the columns, the gold answer and the prompt are the data section's. Raises DataError."""
    try:
        return Reader(section, lambda *finding: None).row(id_, where, record).plain()
    except Unusable as error:
        raise DataError(str(error)) from error


def _folder(out: Path) -> Path:
    """The nearest folder above `out` that is there: on the disk that has room for the result."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())


def _read(section: DataSection, seed: int, table: Table, findings: Findings, say: Callable[[float], None]) -> None:
    """Fills the table, and splits what the source has no split of."""
    with sources.read(section, seed) as (named, label, splits):
        reader = Reader(named, findings.note)
        for number, source in enumerate(splits):
            table.add(_rows(source, reader, findings, lambda share, number=number: say((number + share) / len(splits))))
    for check in ("missing", "unreadable", "encoding"):
        findings.judge(check)
    table.index()
    roles = {source.role for source in splits}
    if "test" not in roles:
        table.hold_out("test", section.test_size, seed, label)
    if "validation" not in roles:
        table.hold_out("validation", section.validation_size, seed, label)


def _rows(
    source: sources.Source, reader: Reader, findings: Findings, say: Callable[[float], None]
) -> Iterator[tuple[str, Row]]:
    """(split, row)s of one split of the source. Raises DataError for the first row that a check refuses, and for a split without rows."""
    split, kept, number = "train" if source.role == "all" else source.role, 0, 0
    for number, (where, record, share) in enumerate(source.records, 1):
        if number % _EVERY == 0:
            say(share)
        try:
            if isinstance(record, ValueError):
                raise Unusable("unreadable", where, str(record))
            id_ = record["id"] if source.own_ids else f"{source.role}-{number}"
            row = reader.row(id_, where, record)
        except Unusable as error:
            if findings[error.check].policy == "fail":
                droppable = (
                    f", or set data.checks.{error.check} to drop" if error.check in ("missing", "unreadable") else ""
                )
                raise DataError(f"{error}{droppable}") from error
            findings.note(error.check, error.where, error.why, "dropped")
            continue
        kept += 1
        yield split, row
    if not number:
        raise DataError(f"{source.label} has no rows: it must hold at least one question with its answer")
    if not kept:
        raise DataError(f"{source.label} has {number:,} rows and none that can be used: {_dropped(findings)}")


def _write(
    section: DataSection,
    seed: int,
    table: Table,
    findings: Findings,
    repeated: dict[str, int],
    left_out: int,
    folder: Path,
    say: Callable[[float], None],
) -> dict[str, int]:
    """Writes all files of the artifact into a folder; returns the report's counts."""
    splits = {name: card.Lengths() for name in ("train", "validation", "test")}
    answered = dict.fromkeys(("right", "wrong", "without_an_answer"), 0)
    totals = {name: table.count(name, "is_prompt") for name in splits}
    demonstrations = section.arithmetic.demonstrations if section.source == "arithmetic" else table.count("train")
    total, done = sum(totals.values()) + demonstrations, 0

    def through(rows: Iterator[Any], count: int) -> Iterator[Any]:
        nonlocal done
        yield from told(rows, count, lambda share: say((done + share * count) / total))
        done += count

    rows = through(_demonstrations(section, seed, table), demonstrations)
    written = _lines(folder / "sft.jsonl", _agreeing(rows, findings, answered))
    findings.judge("disagreements")
    if not written:
        raise DataError(f"no demonstration is left for SFT after the checks of data.checks: {_dropped(findings)}")
    for name, file in (("train", "grpo"), ("validation", "validation"), ("test", "test")):
        prompts = through(table.rows(name, "is_prompt"), totals[name])
        _lines(folder / f"{file}.jsonl", _counted((_prompt(row) for row in prompts), splits[name]))
    report = {
        "num_demonstrations": written,
        "num_train_prompts": splits["train"].rows,
        "num_validation": splits["validation"].rows,
        "num_test": splits["test"].rows,
        "num_left_out": left_out,
        **{f"num_{name}_duplicates": repeated[name] for name in splits},
        **{f"num_{check}": finding.found for check, finding in findings.by_check.items() if check != "duplicates"},
        "num_dropped": sum(finding.dropped for finding in findings.by_check.values()),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    card.write(folder, section, report, splits, answered, findings)
    return report


def _demonstrations(
    section: DataSection, seed: int, table: Table
) -> Iterator[tuple[str, dict[str, Any], str, str | None]]:
    """(id, training row, completion, the answer that it states where that is not the gold one)s."""
    if section.source != "arithmetic":
        yield from ((row["id"], row, row["completion"], row["stated"]) for row in table.rows("train"))
        return
    for id_, row, completion in arithmetic.demonstrations(section, seed, list(table.rows("train"))):
        own = answers.extract_answer(completion)
        yield id_, row, completion, None if own is None or answers.same_answer(own, row["gold"]) else own


def _agreeing(rows: Iterator[tuple], findings: Findings, answered: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The demonstrations that are written: those that state another answer than gold are found, and dropped where the configuration says so."""
    dropping = findings["disagreements"].policy == "drop"
    for id_, row, completion, stated in rows:
        if stated is not None:
            why = f"states {' '.join(stated.split())[:60]!r}, and gold is {row['gold']!r}"
            findings.note("disagreements", f"{row['place']} ({id_})", why, "dropped" if dropping else "kept")
            if dropping:
                continue
        answered[
            "wrong"
            if stated is not None
            else "right"
            if answers.extract_answer(completion) is not None
            else "without_an_answer"
        ] += 1
        yield {"id": id_, "prompt": json.loads(row["prompt"]), "completion": completion}


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    # A row of the table, in the form of Row.plain.
    return {
        "id": row["id"],
        "prompt": json.loads(row["prompt"]),
        "question": row["question"],
        "gold": row["gold"],
        **json.loads(row["columns"]),
    }


def _counted(rows: Iterator[dict[str, Any]], lengths: card.Lengths) -> Iterator[dict[str, Any]]:
    for row in rows:
        lengths.add(row)
        yield row


def _lines(file: Path, rows: Iterator[dict[str, Any]]) -> int:
    # Escaped to ASCII: a U+2028 in a text would otherwise end a line for readers that use str.splitlines.
    count = 0
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            stream.write(json.dumps(row, sort_keys=True) + "\n")
            count += 1
    return count


def _dropped(findings: Findings) -> str:
    """What the checks have dropped, in words."""
    dropped = [(name, finding) for name, finding in findings.by_check.items() if finding.dropped]
    return ", ".join(
        f"{name} dropped {f.dropped:,} (such as {f.examples[0]['where']}, which {f.examples[0]['why']})"
        for name, f in dropped
    )
