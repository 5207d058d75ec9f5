"""JSON Lines: row files of artifacts, read, written, and sampled by a seed."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file, one at a time."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if line != "\n":
                yield json.loads(line)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return list(each_row(path))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSON Lines: UTF-8, sorted keys, one object a line; the same rows give the same bytes."""
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


def sample(rows: list[Any], most: int | None, seed: int) -> list[Any]:
    """The first `most` rows after a seeded shuffle; all of them, in their order, where `most` is None."""
    if most is None:
        return rows
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return [rows[i] for i in order[:most]]
