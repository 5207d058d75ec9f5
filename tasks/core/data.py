"""Data preparation: any source becomes demonstrations for SFT, prompts for GRPO, and prompts held out for validation and test."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import DataSection
from tasks.core import sources
from tasks.core.sources import Row


def prepare(section: DataSection, seed: int, out: Path) -> dict[str, int]:
    """Writes the `data` artifact into `out` (sft.jsonl, grpo.jsonl, validation.jsonl, test.jsonl, report.json) and returns the report's counts.

    The same section, seed and source content give the same bytes. Everything is checked before the first byte is written.
    Raises DataError for input that cannot be used, StorageUnavailable where the data lies on S3 and that does not answer.
    """
    splits = sources.read(section, seed)
    read = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    kept = {name: sources.unique(rows) for name, rows in read.items()}
    for one, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        _disjoint(kept[one], kept[other])
    report = {
        "num_demonstrations": len(splits.demonstrations),
        "num_train_prompts": len(kept["train"]),
        "num_validation": len(kept["validation"]),
        "num_test": len(kept["test"]),
        **{f"num_{name}_duplicates": len(rows) - len(kept[name]) for name, rows in read.items()},
    }
    out.mkdir(parents=True, exist_ok=True)
    demonstrations = ({"id": i, "prompt": messages(section, q), "completion": c} for i, q, c in splits.demonstrations)
    _write(out / "sft.jsonl", demonstrations)
    for name, file in (("train", "grpo"), ("validation", "validation"), ("test", "test")):
        _write(out / f"{file}.jsonl", (_prompt_row(section, row) for row in kept[name]))
    (out / "report.json").write_text(json.dumps(report, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return report


def messages(section: DataSection, question: str) -> list[dict[str, str]]:
    """The chat that asks a question: the system message where there is one, then the question with the instruction on a line of its own."""
    system = [{"role": "system", "content": section.system_prompt}] if section.system_prompt else []
    return [*system, {"role": "user", "content": f"{question}\n{section.instruction}" if section.instruction else question}]


def source_digest(section: DataSection) -> str:
    """SHA-256 of what the source reads besides its section, for the stage key: a changed file is other data under the same path.

    "" for arithmetic, which the section describes whole. A data set on the Hub goes by name, config and revision; without a revision,
    a change on the Hub goes unseen. Raises as `prepare` does for files that are not there. Imports neither torch nor datasets.
    """
    if section.source == "arithmetic":
        return ""
    digest = hashlib.sha256()
    if section.source == "jsonl":
        with sources.local_files(section.path) as files:
            for role, (file, _) in sorted(files.items()):
                digest.update(f"{role} {_file_digest(file)}\n".encode())
        return digest.hexdigest()
    hub = section.hub
    digest.update(json.dumps([hub.name, hub.config, hub.revision]).encode())
    folder = Path(hub.name)
    for file in sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []:
        digest.update(f"{file.relative_to(folder).as_posix()} {_file_digest(file)}\n".encode())
    return digest.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _disjoint(rows: list[Row], others: list[Row]) -> None:
    """Raises DataError where a question is in both: what judges a model must not have trained it."""
    by_key = {row.key: row for row in others}
    shared = [(row, by_key[row.key]) for row in rows if row.key in by_key]
    if shared:
        row, other = shared[0]
        raise DataError(
            f"{len(shared)} held-out question(s) also occur in another split, the first at {row.where} and {other.where} "
            f"({row.question[:60]!r}): take them out of one of the two"
        )


def _prompt_row(section: DataSection, row: Row) -> dict[str, Any]:
    return {"id": row.id, "prompt": messages(section, row.question), "question": row.question, "gold": row.gold}


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    # Escaped to ASCII: a U+2028 in a text would otherwise end a line for readers that use str.splitlines.
    with file.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(json.dumps(row, sort_keys=True) + "\n" for row in rows)
