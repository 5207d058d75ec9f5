"""The rows of a data set while they are prepared, in a SQLite file on disk: memory does not grow with them."""

import json
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from configs.errors import DataError
from tasks.core.data.rows import Row

# A row that is in two splits counts in the first of these.
SPLITS = ("test", "validation", "train")
CACHE_BYTES = 8 * 2**20
_PAGE = 1000  # rows fetched at once

_SCHEMA = """
CREATE TABLE rows (
    n INTEGER PRIMARY KEY, split TEXT NOT NULL, id TEXT NOT NULL, place TEXT NOT NULL, question TEXT NOT NULL, gold TEXT NOT NULL, key BLOB NOT NULL,
    prompt TEXT NOT NULL, completion TEXT NOT NULL, asked TEXT NOT NULL, stated TEXT, columns TEXT NOT NULL,
    draw INTEGER, is_prompt INTEGER NOT NULL DEFAULT 1, gone TEXT
);
"""


class Table:
    """Rows in the order in which they were read. `gone` names the check that dropped a row; `is_prompt` is 0 where a row only demonstrates."""

    def __init__(self, file: Path):
        self.db = sqlite3.connect(file, isolation_level=None)
        # Nothing here outlives the process: no journal, no waiting for the disk.
        for pragma in (
            "journal_mode=OFF",
            "synchronous=OFF",
            "temp_store=FILE",
            f"cache_size=-{CACHE_BYTES // 1024}",
            "locking_mode=EXCLUSIVE",
        ):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute(_SCHEMA)

    def add(self, rows: Iterable[tuple[str, Row]]) -> None:
        """Appends (split, row)s."""

        def values() -> Iterator[tuple]:
            for split, r in rows:
                prompt, columns = json.dumps(r.prompt), json.dumps(r.columns, sort_keys=True)
                yield split, r.id, r.where, r.question, r.gold, r.key, prompt, r.completion, r.asked, r.stated, columns

        names = "split, id, place, question, gold, key, prompt, completion, asked, stated, columns"
        with self.writing():
            self.db.executemany(f"INSERT INTO rows ({names}) VALUES ({', '.join('?' * 11)})", values())

    def writing(self) -> "_Transaction":
        """A transaction: many small writes at the price of one."""
        return _Transaction(self.db)

    def index(self) -> None:
        """To be called when every row is in."""
        self.db.execute("CREATE INDEX by_key ON rows (key, split, n)")

    def count(self, split: str, what: str = "1") -> int:
        """How many rows of a split are left for which `what` (SQL) holds."""
        return self.db.execute(
            f"SELECT COUNT(*) FROM rows WHERE split = ? AND gone IS NULL AND {what}", (split,)
        ).fetchone()[0]

    def rows(self, split: str, what: str = "1") -> Iterator[dict[str, Any]]:
        """The rows of a split that are left and for which `what` (SQL) holds: held-out ones as they were drawn, others as they were read."""
        query = f"SELECT * FROM rows WHERE split = ? AND gone IS NULL AND {what} ORDER BY draw, n"
        cursor = self.db.execute(query, (split,))
        names = [column[0] for column in cursor.description]
        for row in paged(cursor):
            yield dict(zip(names, row, strict=True))

    def hold_out(self, split: str, size: int, seed: int, label: str) -> None:
        """Moves `size` different questions, with all their rows, out of training into a split. Raises DataError where none would stay."""
        there = self.db.execute(
            "SELECT COUNT(DISTINCT key) FROM rows WHERE split = 'train' AND gone IS NULL"
        ).fetchone()[0]
        if size >= there:
            raise DataError(
                f"data.{split}_size is {size} and {label} has {there} different questions left to take them from, "
                f"of which at least one must stay for training: lower data.{split}_size or add rows"
            )
        drawn = {place: draw for draw, place in enumerate(random.Random(f"{seed} {split}").sample(range(there), size))}
        keys = self.db.execute(
            "SELECT key FROM rows WHERE split = 'train' AND gone IS NULL GROUP BY key ORDER BY MIN(n)"
        )
        with self.writing():
            self.db.execute("CREATE TABLE held (key BLOB PRIMARY KEY, draw INTEGER) WITHOUT ROWID")
            chosen = ((key, drawn[place]) for place, (key,) in enumerate(paged(keys)) if place in drawn)
            self.db.executemany("INSERT INTO held VALUES (?, ?)", chosen)
            self.db.execute(
                "UPDATE rows SET split = ?, draw = (SELECT draw FROM held WHERE held.key = rows.key) WHERE key IN (SELECT key FROM held)",
                (split,),
            )
        self.db.execute("DROP TABLE held")

    def limit(self, size: int, seed: int) -> int:
        """Leaves `size` different questions for training; returns how many rows that takes out."""
        self.db.create_function(
            "drawn", 1, lambda key: xxhash.xxh3_64_intdigest(key, seed=seed) >> 1, deterministic=True
        )
        keys = "SELECT DISTINCT key FROM rows WHERE split = 'train' AND gone IS NULL"
        with self.writing():
            self.db.execute("CREATE TABLE chosen (key BLOB PRIMARY KEY) WITHOUT ROWID")
            self.db.execute(f"INSERT INTO chosen SELECT key FROM ({keys}) ORDER BY drawn(key), key LIMIT ?", (size,))
            query = "UPDATE rows SET gone = 'max_samples' WHERE split = 'train' AND gone IS NULL AND key NOT IN (SELECT key FROM chosen)"
            return self.db.execute(query).rowcount

    def close(self) -> None:
        self.db.close()


class _Transaction:
    def __init__(self, db: sqlite3.Connection):
        self.db = db

    def __enter__(self) -> sqlite3.Connection:
        self.db.execute("BEGIN")
        return self.db

    def __exit__(self, kind: Any, *rest: Any) -> None:
        # Without a journal there is no way back: after an error the file is thrown away.
        self.db.execute("COMMIT") if kind is None else None


def paged(cursor: sqlite3.Cursor) -> Iterator[tuple]:
    """The rows of a cursor, some at a time."""
    while page := cursor.fetchmany(_PAGE):
        yield from page


def told(rows: Iterable[Any], total: int, say: Callable[[float], None]) -> Iterator[Any]:
    """The rows, with `say` told now and then which share of them is through."""
    for number, row in enumerate(rows):
        if number % _PAGE == 0:
            say(number / max(total, 1))
        yield row
