"""The reward audit: before anything is trained, what nobody wants is scored beside the gold demonstrations, and must not be worth more."""

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from tasks.core.scoring.answers import extract_answer, same_answer
from tasks.core.scoring.rewards import Reward
from tasks.core.storage.jsonl import each_row

ROWS = 16
GOLD = "the gold demonstration"
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Sample:
    """A training prompt as text, its gold answer, a demonstration that is right, and the data set's further columns."""

    prompt: str
    gold: str
    demonstration: str
    columns: dict[str, Any] = field(default_factory=dict)


def samples(data: Path, rows: int = ROWS) -> list[Sample]:
    """Some training prompts of a `data` artifact, always the same ones, each with a right demonstration: its own where it has one, else `Final Answer: <gold>`.

    Reads grpo.jsonl and sft.jsonl line by line; demonstrations may be wrong on purpose.
    """
    chosen: list[dict[str, Any]] = []
    rng = random.Random(0)
    for number, row in enumerate(each_row(data / "grpo.jsonl")):
        if number < rows:
            chosen.append(row)
        elif (place := rng.randrange(number + 1)) < rows:
            chosen[place] = row
    golds = {_text(row["prompt"]): row["gold"] for row in chosen}
    worked: dict[str, str] = {}
    for row in each_row(data / "sft.jsonl"):
        prompt = _text(row["prompt"])
        if prompt in golds and prompt not in worked and same_answer(extract_answer(row["completion"]), golds[prompt]):
            worked[prompt] = row["completion"]
    found = []
    for row in chosen:
        prompt = _text(row["prompt"])
        columns = {name: value for name, value in row.items() if name not in ("prompt", "gold")}
        found.append(Sample(prompt, row["gold"], worked.get(prompt, f"Final Answer: {row['gold']}"), columns))
    return found


def audit(reward: Reward, given: list[Sample]) -> dict[str, float]:
    """The mean total of each kind of completion: the gold demonstrations, nothing, the prompt repeated, another row's answer, and 2,000 newlines.

    Lengths are counted roughly, in words and marks: the tokenizer is not there yet. Raises ConfigError where one of them is worth more than the
    gold demonstration of the same row, and where all are worth the same; and what a function of the user's raises.
    """
    probes = [(i, name, text) for i, sample in enumerate(given) for name, text in _probes(given, i).items()]
    texts = [text for _, _, text in probes]
    names = {name for sample in given for name in sample.columns}
    columns = {name: [given[i].columns.get(name) for i, _, _ in probes] for name in sorted(names)}
    columns["prompts"] = [given[i].prompt for i, _, _ in probes]
    scores = reward.score(
        texts, [given[i].gold for i, _, _ in probes], [len(_TOKEN.findall(text)) for text in texts], columns
    )
    totals = {(i, name): row["total"] for (i, name, _), row in zip(probes, scores, strict=True)}
    terms = " + ".join(f"{weight:g} {name}" for name, weight in reward.weights.items())
    if len(set(totals.values())) == 1:
        value = next(iter(totals.values()))
        raise ConfigError(
            f"the reward ({terms}) is {value:g} for every completion of the reward audit, right, wrong or empty ones alike, and nothing can be learnt "
            "from it: correct grpo.reward_type or grpo.reward_config"
        )
    above = [(total - totals[i, GOLD], i, name) for (i, name), total in totals.items() if total > totals[i, GOLD]]
    if above:
        _, i, name = max(above, key=lambda found: found[0])
        raise ConfigError(
            f"the reward ({terms}) ranks {name} above {GOLD}: {totals[i, name]:g} against {totals[i, GOLD]:g} for {given[i].prompt[:60]!r} "
            f"with the gold answer {given[i].gold}, and so "
            f"in {len({j for _, j, _ in above})} of {len(given)} rows: correct grpo.reward_type or grpo.reward_config"
        )
    kinds = list(dict.fromkeys(name for _, name, _ in probes))
    values = {kind: [total for (_, name), total in totals.items() if name == kind] for kind in kinds}
    return {kind: sum(of) / len(of) for kind, of in values.items()}


def sentence(means: dict[str, float]) -> str:
    """The audit's means in words."""
    return "on average " + "; ".join(f"{kind} is worth {mean:.3g}" for kind, mean in means.items())


def _probes(given: list[Sample], i: int) -> dict[str, str]:
    """Completions for a row by what they are; another row's answer is missing where all rows have the same."""
    sample = given[i]
    others = [other for other in given[i + 1 :] + given[:i] if not same_answer(other.gold, sample.gold)]
    probes = {GOLD: sample.demonstration, "an empty completion": "", "the prompt repeated": sample.prompt}
    if others:
        probes["another row's answer"] = others[0].demonstration
    return {**probes, "a completion of 2,000 newlines": "\n" * 2000}


def _text(messages: list[dict[str, str]]) -> str:
    return "\n".join(message["content"] for message in messages)
