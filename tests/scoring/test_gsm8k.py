"""All 8,792 gold answers of GSM8K, where they lie in $RATCHET_GSM8K or ../shared/data/gsm8k."""

import json

import pytest
from paths import GSM8K

from configs.schema import RewardConfig
from tasks.core.scoring import rewards
from tasks.core.scoring.answers import normal_gold
from tasks.core.scoring.compare import read_gold


@pytest.fixture(scope="module")
def gsm8k_golds():
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K in {GSM8K}")
    rows = [
        json.loads(line) for name in ("train", "test") for line in (GSM8K / f"{name}.jsonl").read_text().splitlines()
    ]
    return [row["answer"].rpartition("####")[2].strip() for row in rows]


def accuracies(answers: list[str], golds: list[str]) -> list[float]:
    texts = [f"Final Answer: {answer}" for answer in answers]
    return [row["accuracy"] for row in rewards.build("accuracy", RewardConfig()).score(texts, golds, [5] * len(texts))]


def test_every_gsm8k_answer_is_right_for_its_own_row(gsm8k_golds):
    assert len(gsm8k_golds) == 8792
    golds = [normal_gold(gold) for gold in gsm8k_golds]
    assert accuracies(gsm8k_golds, golds) == [1.0] * 8792
    assert accuracies(golds, golds) == [1.0] * 8792


def test_every_gsm8k_answer_is_wrong_for_the_row_before(gsm8k_golds):
    golds = [normal_gold(gold) for gold in gsm8k_golds]
    pairs = [
        (after, gold)
        for gold, after in zip(golds, golds[1:] + golds[:1], strict=True)
        if read_gold(after).value != read_gold(gold).value
    ]
    assert len(pairs) > 8500
    assert set(accuracies([answer for answer, _ in pairs], [gold for _, gold in pairs])) == {0.0}


def indian(digits: str) -> str:
    head, tail = digits[:-3], digits[-3:]
    pairs = [head[max(0, i - 2) : i] for i in range(len(head), 0, -2)][::-1]
    return ",".join([*pairs, tail])


CONVENTIONS = {
    "1,234": lambda sign, digits, rest: f"{sign}{int(digits):,}{rest}",
    "1 234": lambda sign, digits, rest: f"{sign}{int(digits):,}".replace(",", " ") + rest,
    "1 234 (no-break)": lambda sign, digits, rest: f"{sign}{int(digits):,}".replace(",", "\u202f") + rest,
    "1'234": lambda sign, digits, rest: f"{sign}{int(digits):,}".replace(",", "'") + rest,
    "1_234": lambda sign, digits, rest: f"{sign}{int(digits):,}".replace(",", "_") + rest,
    "12,34,567": lambda sign, digits, rest: f"{sign}{indian(digits)}{rest}",
    "1.234,00": lambda sign, digits, rest: (
        f"{sign}{int(digits):,}".replace(",", ".") + (rest.replace(".", ",") or ",00")
    ),
    "1{,}234": lambda sign, digits, rest: f"{sign}{int(digits):,}".replace(",", "{,}") + rest,
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_every_gsm8k_answer_with_thousands_separators(gsm8k_golds, convention):
    golds = [normal_gold(gold) for gold in gsm8k_golds]
    written = []
    for gold in golds:
        sign, digits = ("-", gold[1:]) if gold.startswith("-") else ("", gold)
        whole, point, fraction = digits.partition(".")
        written.append(CONVENTIONS[convention](sign, whole, point + fraction) if whole.isdecimal() else gold)
    assert sum(one != gold for one, gold in zip(written, golds, strict=True)) > 500
    assert accuracies(written, golds) == [1.0] * 8792
