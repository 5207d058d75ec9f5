"""Generated arithmetic: sums and differences of two-digit numbers with two-digit results, and imperfect demonstrations of them."""

import random
from collections.abc import Iterator
from typing import Any

from configs.schema import DataSection


def records(seed: int) -> list[dict[str, Any]]:
    """The 3,960 questions without carry or borrow, with `id`, worked answer and `gold`, in seeded order."""
    numbers = range(10, 100)
    sums = [(a, "+", b, a + b) for a in numbers for b in numbers if a % 10 + b % 10 < 10 and a // 10 + b // 10 < 10]
    differences = [(a, "-", b, a - b) for a in numbers for b in numbers if a % 10 >= b % 10 and a // 10 > b // 10]
    made = [
        {
            "id": f"{a}{op}{b}",
            "question": f"What is {a} {op} {b}?",
            "answer": f"{a} {op} {b} = {c}. Final Answer: {c}",
            "gold": str(c),
        }
        for a, op, b, c in sums + differences
    ]
    random.Random(f"{seed} order").shuffle(made)
    return made


def demonstrations(
    section: DataSection, seed: int, train: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(id, training row, completion)s: some right, some a wrong bare guess, some that never answer (shares in `data.arithmetic`).

    They are imperfect on purpose: SFT imitates them, and only the reward can go beyond.
    """
    settings = section.arithmetic
    rng = random.Random(f"{seed} demonstrations")
    right, wrong = round(settings.demonstrations * settings.right), round(settings.demonstrations * settings.wrong)
    kinds = (["right"] * right + ["wrong"] * wrong + ["none"] * settings.demonstrations)[: settings.demonstrations]
    rng.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        row = rng.choice(train)
        guess = rng.randrange(10, 99)
        guess += guess >= int(row["gold"])  # any two-digit number but the right one
        sum_ = row["question"].removeprefix("What is ").removesuffix("?")
        yield (
            f"demonstration-{number}",
            row,
            {"right": row["completion"], "wrong": f"Final Answer: {guess}", "none": f"Let me think about {sum_}."}[
                kind
            ],
        )
