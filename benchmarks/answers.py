"""Scores fuzzed completions and times plain numbers: `python benchmarks/answers.py fuzz 1000000`. Exit code 1 where anything raises or is no score."""

import argparse
import random
import statistics
import sys
import time

from configs.schema import RewardComponent, RewardConfig
from tasks.core.scoring import rewards

GOLDS = ["72", "1234.5", "-3/4", "50%", "$18.50", "5 km", "3:4", "yes", "B", "\\text{Evelyn}", "blue whale"]
EXPRESSIONS = ["\\sqrt{2}", "x^2 + 2x + 1", "(1, 2)"]
EXPRESSION_SHARE = 1 / 1000  # of the completions; each may cost its two seconds of processor time
PIECES = [
    "Final Answer:", "**Final Answer**: ", "final answer", "\\boxed{", "\\boxed", "{", "}", "####", "Step 1:", "1. ", "\n", "\r\n", "\t", " ", "=", "≠", "≈",
    "72", "1,234.5", "1.234,5", "1 234", "1'234", "1_234", "12,34,567", "0,5", "1.234", ".5", "72.", "١٢", "７２", "½", "1½", "²", "10^6", "1.5e3",
    "1e999999999",
    "9^9^9^9", "10^{10^{10}}", "9" * 30, "9" * 5000, "0" * 300, "1/0", "1/3", "3:4", "3 to 4", "-", "−", "--", "+", "±", "*", "/", "^", "!", "%", "\\%",
    "$", "\\$", "€", "£", "Rs.", "km", "m/s", " per ", "pounds", "million", "clips", "or", "and a half", "maybe", "yes", "No", "true", "(B)", "B) ", "A or B",
    "\\frac{1}{2}", "\\frac12", "\\frac{", "\\sqrt{2}", "\\sqrt", "\\text{", "\\text{ km}", "\\left(", "\\right)", "\\!", "\\,",
    "{,}", "\\pi", "\\circ", "\\\\",
    "x", "x = ", "(", ")", "[", "]", "(1, 2)", "x^2+2x+1", "\\begin{pmatrix}", "\\int_0^1", "\\sum_{n=1}^{99}", "\x00", "\ud800", "\u202e", "\u200b", "🐳",
    "nan", "inf", "None", "the answer is ", "48 + 24 = 72. ", "Let me think... ", ",", ".", ";", ":", "'", '"', "`", "_",
]  # fmt: skip


def completion(rng: random.Random) -> str:
    """Pieces at random, sometimes many times over, sometimes with the form of an answer before them."""
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(12)))
    if rng.random() < 0.002:
        text *= rng.randrange(1, 500)
    if rng.random() < 0.05:
        text += "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))
            for _ in range(rng.randrange(20))
        )
    return rng.choice(("Final Answer: ", "Final Answer: ", "\\boxed{", "#### ", "")) + text


def fuzz(count: int, seed: int) -> int:
    """Scores `count` fuzzed completions, each by every component and in every kind of gold answer; returns the exit code."""
    rng = random.Random(seed)
    components = [RewardComponent(type=t) for t in ("accuracy", "length_penalty", "step", "format")]
    reward = rewards.build("combined", RewardConfig(components=components, last_number=True))
    failures, right, slowest, began = 0, 0, (0.0, ""), time.monotonic()
    for number in range(count):
        text = completion(rng)
        gold = rng.choice(EXPRESSIONS if rng.random() < EXPRESSION_SHARE else GOLDS)
        start = time.perf_counter()
        try:
            row = reward.score([text], [gold], [len(text)])[0]
            valid = (
                row["accuracy"] in (0.0, 1.0)
                and row["format"] in (0.0, 1.0)
                and 0 <= row["step"] <= 0.5
                and -1 <= row["length_penalty"] <= 0
            )
        except Exception as error:  # what this command looks for
            valid = False
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if not valid:
            failures += 1
            print(f"gold {gold!r}, completion {text[:500]!r}", file=sys.stderr)
        else:
            right += int(row["accuracy"])
        slowest = max(slowest, (time.perf_counter() - start, f"gold {gold!r}, completion {text[:80]!r}"))
        if (number + 1) % 100_000 == 0:
            print(f"{number + 1:,} scored, {failures} failures, {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(
        f"{count:,} completions scored in {time.monotonic() - began:.0f} s: {failures} failures, {right:,} right; slowest {slowest[0]:.2f} s ({slowest[1]})"
    )
    return 1 if failures else 0


def plain(count: int, seed: int) -> float:
    """Prints the median and 99th percentile of the time that accuracy takes for a plain number, in microseconds."""
    rng = random.Random(seed)
    reward = rewards.build("accuracy", RewardConfig())
    (accuracy,) = reward.functions
    times = []
    for _ in range(count):
        gold = rng.randrange(10**6)
        written = rng.choice((str(gold), f"{gold:,}", f"${gold:,}.00", f"{gold} clips", str(gold + 1)))
        text, golds = (
            f"Natalia sold 48/2 = 24 clips in May.\n48+24 = 72 clips altogether.\nFinal Answer: {written}",
            [str(gold)],
        )
        start = time.perf_counter()
        accuracy([""], [text], gold=golds)
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    print(
        f"plain numbers: median {statistics.median(times):.1f} microseconds, 99th percentile {times[int(0.99 * count)]:.1f} (of {count:,})"
    )
    return statistics.median(times)


def main() -> int:
    """`fuzz COUNT [--seed N]` or `plain [COUNT]`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("fuzz", "plain"))
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    code = fuzz(given.count, given.seed) if given.command == "fuzz" else 0
    return 1 if plain(100_000, given.seed) >= 100 else code


if __name__ == "__main__":
    sys.exit(main())
