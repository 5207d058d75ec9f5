"""Memory and time of data preparation: `python benchmarks/data.py 10000 100000 300000 [--format parquet]`. Exit code 1 where memory grows with the rows.

Each size is prepared in a process of its own. Memory is the peak of its resident set while it prepares, over what it has with everything imported
and a first small data set prepared.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

WORDS = [
    "apples",
    "pears",
    "boxes",
    "shelves",
    "market",
    "garden",
    "teacher",
    "window",
    "paper",
    "river",
    "bottle",
    "morning",
    "friend",
    "sister",
    "brother",
    "uncle",
    "ticket",
    "basket",
]
WORDS += [
    "buys",
    "sells",
    "counts",
    "paints",
    "reads",
    "walks",
    "plants",
    "fixes",
    "shares",
    "every",
    "other",
    "second",
    "third",
    "large",
    "small",
    "yellow",
    "green",
    "wooden",
    "old",
    "new",
    "heavy",
    "slowly",
]
LIMIT_MIB = 32  # by which the peaks of different sizes may differ


def rows(count: int, seed: int = 7):
    """Questions of 20 to 70 words with numbers in them, one in a hundred repeated, one in a hundred changed a little."""
    rng, before = random.Random(seed), "How many?"
    for number in range(count):
        a, b = rng.randrange(1000), rng.randrange(1000)
        words = [rng.choice(WORDS) for _ in range(rng.randrange(20, 70))]
        question = f"{' '.join(words[:10])} {a} {' '.join(words[10:])} {b}. How many are there in all?"
        if number % 100 == 1:
            question = before
        elif number % 100 == 2:
            question = before.replace("How many are there", "How many of them are there")
        before = question
        numbers = [int(w.rstrip(".")) for w in question.split() if w.rstrip(".").isdigit()]
        yield {
            "question": question,
            "answer": f"We add {numbers[0]} and {numbers[1]}.\n#### {sum(numbers)}",
            "category": WORDS[number % 5],
        }


def write(folder: Path, count: int, form: str) -> Path:
    """A file of so many rows."""
    file = folder / f"rows.{form}"
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.schema([(name, pyarrow.string()) for name in ("question", "answer", "category")])
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            batch = []
            for row in rows(count):
                batch.append(row)
                if len(batch) == 10_000:
                    writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                    batch = []
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))
        return file
    with file.open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows(count))
    return file


def measure(file: Path, warm: Path, out: Path) -> dict:
    """Prepares a file in this process, after a small one."""
    import psutil

    from configs.schema import DataSection
    from tasks.core.data import card, prepare

    prepare.prepare(DataSection(path=str(warm)), 1, out / "warm")
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.monotonic(), time.process_time()
    try:
        report = prepare.prepare(DataSection(path=str(file), test_size=1000), 1, out / "data")
    finally:
        done.set()
        watcher.join()
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "before_mib": round(before / 2**20, 1),
        "over_mib": round((peak[0] - before) / 2**20, 1),
        "report": report,
        "digest": card.digest(out / "data"),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="+")
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl")
    parser.add_argument("--child", nargs=3, metavar=("FILE", "WARM", "OUT"))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*map(Path, options.child))))
        return 0
    peaks = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "warm").mkdir()
            file, warm = write(root, size, options.format), write(root / "warm", 3000, options.format)
            command = [sys.executable, __file__, "0", "--child", str(file), str(warm), str(root)]
            found = json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
            )
            report, mib = found["report"], file.stat().st_size / 2**20
            peaks.append(found["over_mib"])
            print(
                f"{size:>9,} rows ({mib:.0f} MiB): {found['seconds']} s ({found['cpu_seconds']} of processor time), "
                f"peak {found['over_mib']} MiB over {found['before_mib']} MiB; "
                f""
                f"{report['num_train_duplicates']:,} duplicates, {report['num_near_duplicates']:,} near duplicates, "
                f"{report['num_contamination']:,} contaminated; digest {found['digest'][:12]}",
                flush=True,
            )
    return int(max(peaks) - min(peaks) > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
