"""Checks of a whole data set: conflicting gold answers, duplicates, leaks between splits, contamination, near duplicates.

Each works on the table on disk, with hashes of the held-out questions' words in memory at most. All are exact but near duplicates, whose candidates
MinHash finds.
"""

import re
import struct
import unicodedata
from collections.abc import Callable, Iterator
from functools import lru_cache

import xxhash

from configs.errors import DataError
from tasks.core.data.findings import Findings
from tasks.core.data.table import SPLITS, Table, paged, told
from tasks.core.scoring.answers import same_answer

GRAM = 13  # words, as GPT-3 and most after it
COMMON = 10  # questions: words in a row that more training questions share are a form of words, not a copy
SHINGLE = 5  # characters
BANDS, DEPTH = 20, 5  # of the MinHash signature: two questions of similarity 0.8 meet with a probability of 0.9996
# Words, and signs that are no punctuation: 12 + 34 is not 12 - 34.
_WORD = re.compile(r"\w+|(?<!\w)-|[^\w\s.,;:!?'\"()\[\]{}’‘“”–—-]")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def conflicts(table: Table, findings: Findings) -> None:
    """The same question with gold answers that are not the same: nobody knows which is right."""
    policy, query = (
        findings["conflicts"].policy,
        "SELECT key FROM rows WHERE gone IS NULL GROUP BY key HAVING COUNT(DISTINCT gold) > 1 ORDER BY MIN(n)",
    )
    dropped = []
    for (key,) in table.db.execute(query).fetchall():
        rows = table.db.execute("SELECT n, place, question, gold FROM rows WHERE key = ? ORDER BY n", (key,)).fetchall()
        first = rows[0]
        other = next(
            (row for row in rows if not same_answer(row[3], first[3]) and not same_answer(first[3], row[3])), None
        )
        if other is None:
            continue
        for n, place, question, gold in rows:
            against = other if gold == first[3] else first
            findings.note(
                "conflicts",
                place,
                f"{gold} here and {against[3]} at {against[1]}: {_short(question)}",
                _outcome(policy),
            )
            dropped.append((n,))
    findings.judge("conflicts")
    _drop(table, "conflicts", policy, dropped)


def duplicates(table: Table, findings: Findings) -> dict[str, int]:
    """The same question again in a split; returns how many there are in each. `fix` makes one prompt of them and keeps all demonstrations."""
    policy = findings["duplicates"].policy
    later = "SELECT r.n, r.place, r.question, r.split, f.place FROM rows r JOIN first f ON r.key = f.key AND r.split = f.split AND r.n > f.n"
    with table.writing() as db:
        db.execute(
            "CREATE TABLE first AS SELECT key, split, MIN(n) AS n, NULL AS place FROM rows WHERE gone IS NULL GROUP BY key, split HAVING COUNT(*) > 1"
        )
        db.execute("UPDATE first SET place = (SELECT place FROM rows WHERE rows.n = first.n)")
        db.execute("CREATE INDEX first_key ON first (key, split)")
    counts = dict.fromkeys(SPLITS, 0)
    for _, place, question, split, first in paged(table.db.execute(f"{later} WHERE r.gone IS NULL ORDER BY r.n")):
        findings.note(
            "duplicates",
            place,
            f"asked before at {first}: {_short(question)}",
            "fixed" if policy == "fix" else _outcome(policy),
        )
        counts[split] += 1
    findings.judge("duplicates")
    if policy != "warn":
        change = "is_prompt = 0" if policy == "fix" else "gone = 'duplicates'"
        table.db.execute(f"UPDATE rows SET {change} WHERE gone IS NULL AND n IN (SELECT n FROM ({later}))")
    return counts


def leaks(table: Table, findings: Findings) -> None:
    """The same question in two splits: what judges a model must not have trained it."""
    policy = findings["leaks"].policy
    for one, other in (("test", "train"), ("validation", "train"), ("test", "validation")):
        shared = "SELECT a.place, a.question, MIN(b.n), a.key FROM rows a JOIN rows b ON a.key = b.key WHERE a.split = ? AND b.split = ? "
        shared += "AND a.gone IS NULL AND b.gone IS NULL AND a.is_prompt AND b.is_prompt GROUP BY a.n ORDER BY a.n"
        found = 0
        for place, question, n, _ in paged(table.db.execute(shared, (one, other))):
            there = table.db.execute("SELECT place FROM rows WHERE n = ?", (n,)).fetchone()[0]
            if not found:
                first = f"{place} and {there} ({question[:60]!r})"
            found += 1
            findings.note("leaks", there, f"held out at {place}: {_short(question)}", _outcome(policy))
        if found and policy == "fail":
            raise DataError(
                f"{found} held-out question(s) also occur in another split, the first at {first}: take them out of one of the two, "
                "or set data.checks.leaks to drop"
            )
        if found:
            inside = "SELECT key FROM rows WHERE split = ? AND gone IS NULL"
            gone = table.db.execute(
                f"UPDATE rows SET gone = 'leaks' WHERE split = ? AND gone IS NULL AND key IN ({inside})", (other, one)
            )
            findings["leaks"].dropped += (
                gone.rowcount - found
            )  # the rows that only demonstrate a question go with its prompt
    findings.judge("leaks")


def contamination(table: Table, findings: Findings, say: Callable[[float], None]) -> None:
    """Training rows that share 13 words in a row, case and punctuation aside, with a held-out question; shorter questions must be the same words.

    Words in a row that more than ten different training questions share are a form of words (an instruction, a template) and count for nothing.
    """
    import numpy as np

    policy = findings["contamination"].policy

    def held() -> Iterator[tuple[int, int]]:
        for split in ("test", "validation"):
            yield from ((gram, row["n"]) for row in table.rows(split) for gram in _grams(row["asked"]))

    with table.writing() as db:
        db.execute("CREATE TABLE held_grams (gram INTEGER PRIMARY KEY, n INTEGER)")
        db.executemany("INSERT OR IGNORE INTO held_grams VALUES (?, ?)", held())
    # Eight bytes for each.
    grams = np.fromiter(
        (gram for (gram,) in paged(table.db.execute("SELECT gram FROM held_grams ORDER BY gram"))), dtype=np.int64
    )
    if not len(grams):
        return

    def hits() -> Iterator[tuple[int, int, bytes]]:
        for row in told(table.rows("train"), table.count("train"), say):
            mine = np.fromiter(_grams(row["asked"]), dtype=np.int64)
            places = np.searchsorted(grams, mine).clip(max=len(grams) - 1)
            for gram in mine[grams[places] == mine].tolist():
                yield gram, row["n"], row["key"]

    with table.writing() as db:
        db.execute("CREATE TABLE hits (gram INTEGER, n INTEGER, key BLOB)")
        db.executemany("INSERT INTO hits VALUES (?, ?, ?)", hits())
        db.execute("CREATE INDEX hits_gram ON hits (gram, key)")
        db.execute(
            f"CREATE TABLE telling AS SELECT gram FROM hits GROUP BY gram HAVING COUNT(DISTINCT key) <= {COMMON}"
        )
    query = "SELECT n, MIN(gram) FROM hits WHERE gram IN (SELECT gram FROM telling) GROUP BY n ORDER BY n"
    dropped = []
    for n, gram in paged(table.db.execute(query)):
        where, question = table.db.execute("SELECT place, question FROM rows WHERE n = ?", (n,)).fetchone()
        there, other = table.db.execute(
            "SELECT place, question FROM rows WHERE n = (SELECT n FROM held_grams WHERE gram = ?)", (gram,)
        ).fetchone()
        findings.note("contamination", where, f"{_short(question)}; {there}: {_short(other)}", _outcome(policy))
        if policy == "drop":
            dropped.append((n,))
    findings.judge("contamination")
    _drop(table, "contamination", policy, dropped)


def near_duplicates(table: Table, findings: Findings, similarity: float, say: Callable[[float], None]) -> None:
    """Prompts that ask almost the same as an earlier one of their split, or a held-out one: their sets of 5-character pieces overlap to `similarity` (Jaccard).

    Questions with different numbers are different questions, however alike their words: templates make many of them.
    """
    policy = findings["near_duplicates"].policy
    total = sum(table.count(split, "is_prompt") for split in SPLITS)

    def everything() -> Iterator[dict]:
        for split in SPLITS:
            yield from table.rows(split, "is_prompt")

    def bands() -> Iterator[tuple[int, int, int]]:
        # A place in the order of what may stay: held-out rows first.
        for rank, row in enumerate(told(everything(), total, lambda share: say(0.7 * share))):
            for band in _bands(row["asked"]):
                yield band, rank, row["n"]

    with table.writing() as db:
        db.execute("CREATE TABLE bands (band INTEGER, rank INTEGER, n INTEGER)")
        db.executemany("INSERT INTO bands VALUES (?, ?, ?)", bands())
        # Of the rows that meet in a band each is compared with the first alone, so that a thousand alike are a thousand comparisons and not a million.
        # (SQLite's min() takes the other columns from the same row.)
        db.execute(
            "CREATE TABLE leaders AS SELECT band, MIN(rank) AS rank, n FROM bands GROUP BY band HAVING COUNT(*) > 1"
        )
        db.execute("CREATE INDEX leaders_band ON leaders (band)")
        query = "SELECT DISTINCT b.rank, b.n, l.rank AS first, l.n AS leader FROM leaders l JOIN bands b ON l.band = b.band WHERE b.rank > l.rank"
        db.execute(f"CREATE TABLE pairs AS {query} ORDER BY b.rank, first")
    pieces = lru_cache(maxsize=256)(lambda n: _pieces(_row(table, n)[2]))
    dropped, last = set(), None
    pairs = table.db.execute("SELECT n, leader FROM pairs ORDER BY rowid")
    for n, leader in told(
        paged(pairs), table.db.execute("SELECT COUNT(*) FROM pairs").fetchone()[0], lambda share: say(0.7 + 0.3 * share)
    ):
        if n == last or leader in dropped:
            continue
        one, other = pieces(n), pieces(leader)
        if len(one & other) < similarity * len(one | other):
            continue
        last = n
        place, question, _ = _row(table, n)
        there, before, _ = _row(table, leader)
        findings.note("near_duplicates", place, f"{_short(question)}; {there}: {_short(before)}", _outcome(policy))
        if policy == "drop":
            dropped.add(n)
    findings.judge("near_duplicates")
    # With every row of the same question: those that only demonstrate must not stay without their prompt.
    if dropped:
        with table.writing() as db:
            query = "UPDATE rows SET gone = 'near_duplicates' WHERE gone IS NULL AND (key, split) = (SELECT key, split FROM rows WHERE n = ?)"
            findings["near_duplicates"].dropped += db.executemany(
                query, [(n,) for n in sorted(dropped)]
            ).rowcount - len(dropped)


def _outcome(policy: str) -> str:
    return "dropped" if policy == "drop" else "kept"


def _drop(table: Table, check: str, policy: str, rows: list[tuple[int]]) -> None:
    if policy == "drop":
        with table.writing() as db:
            db.executemany(f"UPDATE rows SET gone = '{check}' WHERE n = ?", rows)


def _row(table: Table, n: int) -> tuple[str, str, str]:
    return table.db.execute("SELECT place, question, asked FROM rows WHERE n = ?", (n,)).fetchone()


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 160 else f"{text[:157]}...")


def _grams(text: str) -> set[int]:
    """Hashes of every 13 words in a row, or of all words where there are fewer."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = _WORD.findall(plain) or [plain]
    if len(words) < GRAM:
        return {_hash(f"all {' '.join(words)}".encode())}
    return {_hash(" ".join(words[i : i + GRAM]).encode()) for i in range(len(words) - GRAM + 1)}


def _hash(piece: bytes) -> int:
    """63 bits: SQLite's integers have a sign."""
    return xxhash.xxh3_64_intdigest(piece) >> 1


def _pieces(text: str) -> set[str]:
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return {plain[i : i + SHINGLE] for i in range(max(1, len(plain) - SHINGLE + 1))}


def _bands(text: str) -> list[int]:
    """Hashes under which this question meets those like it: the bands of its MinHash signature, each with its numbers."""
    from rensa import RMinHash

    signature = RMinHash(num_perm=BANDS * DEPTH, seed=1)
    signature.update(list(_pieces(text)))
    digest = struct.pack(f"<{BANDS * DEPTH}I", *signature.digest())
    numbers = " ".join(sorted(_NUMBER.findall(text))).encode()
    return [_hash(bytes([i]) + digest[4 * i * DEPTH : 4 * (i + 1) * DEPTH] + numbers) for i in range(BANDS)]
