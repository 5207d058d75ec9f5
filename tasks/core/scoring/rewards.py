"""Rewards: what a completion is worth. One set of functions serves GRPO and evaluation, so that they cannot disagree."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.rules import rewards as rules_rewards
from configs.schema import RewardComponent, RewardConfig
from tasks.core.scoring import custom_rewards
from tasks.core.scoring.answers import extract_answer, is_formatted, same_answer

RewardFunction = Callable[..., list[float | None]]
Verdict = Callable[[str, str], bool]

_MARKER = re.compile(r"[\s*#>-]*(?:step\s+[0-9]+\s*[*_]*[.:)-]|[0-9]+[.):](?=\s))", re.IGNORECASE)
_STEP_INSIDE = re.compile(r"\s(?=step\s+[0-9]+\s*:)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?;])\s+")
_SAYS_SOMETHING = re.compile(r"[^\W\d_]{2}")
_OPERATOR = re.compile(r"[-+*/×÷·^%−]|\\(?:times|cdot|div|frac)|[0-9]\s*x\s*[0-9]")


def count_steps(text: str) -> int:
    """Number of different reasoning steps: numbered lines and lines `Step N: ...` that say something, and sentences with a calculation (`48 / 2 = 24`).

    Repeated lines, blank ones, lines without a word and equations without an operation (`5 = 5`, `x = 5`) do not count.
    """
    seen = set()
    for line in filter(str.strip, _STEP_INSIDE.sub("\n", text).splitlines()):
        marker = _MARKER.match(line)
        if marker:
            said = line[marker.end() :]
            found = [said] if _SAYS_SOMETHING.search(said) or _is_equation(said) else []
        else:
            found = [s for s in _SENTENCE_END.split(line) if _is_equation(s)]
        seen |= {" ".join(s.split()).casefold().strip(" .;*") for s in found}
    return len(seen - {""})


def _is_equation(sentence: str) -> bool:
    sides = [s.strip(" .;*$") for s in sentence.split("=")]
    numeric = [any(c in "0123456789" for c in s) for s in sides]
    return _OPERATOR.search(sentence) is not None and any(
        numeric[i] and numeric[i + 1] and sides[i] != sides[i + 1] for i in range(len(sides) - 1)
    )


@dataclass(frozen=True)
class Reward:
    """A total reward: `functions` in the form that TRL wants and `weights` by component name, both in the same order."""

    weights: dict[str, float]
    functions: list[RewardFunction]
    last_number: bool = False
    answer_format: str = "final_answer"
    # Whether some component reads the gold answer; rows without one can then not be scored.
    needs_gold: bool = True

    def answer(self, completion: str) -> str | None:
        """The answer that a completion states, extracted as the components do."""
        return extract_answer(completion, self.last_number)

    def is_formatted(self, completion: str) -> bool:
        """Whether the completion states an answer in the form that is taught."""
        return is_formatted(completion, self.answer_format)

    def score(
        self,
        completions: list[str],
        gold: list[str],
        lengths: list[int],
        columns: Mapping[str, list[Any]] | None = None,
    ) -> list[dict]:
        """One dict per completion: `total` (weighted, as TRL adds it up) and each component, unweighted; None is a component without an opinion.

        `lengths` are in tokens. `columns` are further columns of the data set, among them `prompts` where a function of the user's reads them.
        Raises ConfigError for a function of the user's that returns something else than rewards.
        """
        columns = dict(columns or {})
        prompts = columns.pop("prompts", [""] * len(completions))
        # Only the number of ids is known here, unless the caller has them: a range stands for that many.
        ids = columns.pop("completion_ids", [range(n) for n in lengths])
        values = {f.__name__: f(prompts, completions, completion_ids=ids, gold=gold, **columns) for f in self.functions}
        rows = []
        for i in range(len(completions)):
            row = {name: column[i] for name, column in values.items()}
            total = sum(self.weights[name] * value for name, value in row.items() if value is not None)
            rows.append({"total": float(total), **row})
        return rows


def build(reward_type: str, config: RewardConfig) -> Reward:
    """The reward of `grpo.reward_type` and `grpo.reward_config`.

    `accuracy` and a function of the user's stand alone; `length_penalty`, `step` and `format` are added to accuracy with `config.weight`;
    `combined` adds up `config.components`. Raises ConfigError for two components of one name and for a function that cannot be used.
    """
    accuracy = RewardComponent(type="accuracy")
    if reward_type == "combined":
        components = config.components
    elif reward_type == "accuracy":
        components = [accuracy]
    elif ":" in reward_type:
        components = [RewardComponent(type=reward_type)]
    else:
        settings = {name: getattr(config, name) for name in rules_rewards.REWARD_USES[reward_type]}
        components = [accuracy, RewardComponent(type=reward_type, weight=config.weight, **settings)]
    if not components:
        raise ConfigError(
            "grpo.reward_config.components is empty and grpo.reward_type is combined: give at least one component"
        )
    functions = [_component(c, config) for c in components]
    names = [f.__name__ for f in functions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"grpo.reward_config.components has {names.count(name)} components named {name}, and each name may occur once: keep one of them"
            )
    weights = {n: c.weight for n, c in zip(names, components, strict=True)}
    needs_gold = any(f.needs_gold for f in functions)
    return Reward(weights, functions, config.last_number, config.answer_format, needs_gold)


def source_digest(reward_type: str, config: RewardConfig) -> str:
    """SHA-256 of the user's code behind the rewards, for the stage key; "" where there is none. Raises ConfigError for a module that is not there."""
    specs = [t for t in (reward_type, *(c.type for c in config.components)) if ":" in t]
    digests = [f"{spec} {custom_rewards.digest(spec)}\n" for spec in specs]
    return hashlib.sha256("".join(digests).encode()).hexdigest() if digests else ""


def _component(component: RewardComponent, config: RewardConfig) -> RewardFunction:
    """The reward function of one component."""
    if ":" in component.type:
        return custom_rewards.function(component.type)

    def is_right(completion: str, gold: str) -> bool:
        return same_answer(extract_answer(completion, config.last_number), gold)

    if component.type == "format":
        function = _format(config.answer_format)
    else:
        make = {"accuracy": _accuracy, "length_penalty": _length_penalty, "step": _step}[component.type]
        function = make(component, is_right)
    function.needs_gold = component.type == "accuracy" or (component.type == "step" and component.only_right)
    # TRL logs rewards/<__name__>/mean: the component's name is the metric's.
    function.__name__ = component.type
    return function


def _accuracy(component: RewardComponent, is_right: Verdict) -> RewardFunction:
    def accuracy(prompts, completions, completion_ids=None, gold=None, **columns):
        """1.0 for the right answer, else 0.0."""
        return [float(is_right(c, g)) for c, g in zip(completions, gold, strict=True)]

    return accuracy


def _length_penalty(component: RewardComponent, is_right: Verdict) -> RewardFunction:
    target = component.target_length

    def length_penalty(prompts, completions, completion_ids=None, gold=None, **columns):
        """-min(1, max(0, length - target) / target): 0 up to the target length, then falling evenly to -1 at twice that length."""
        counted = completions if component.length_unit == "characters" else completion_ids
        # 0.0 - x: a short completion costs 0.0, not -0.0.
        return [0.0 - min(1.0, max(0, len(one) - target) / target) for one in counted]

    return length_penalty


def _step(component: RewardComponent, is_right: Verdict) -> RewardFunction:
    def step(prompts, completions, completion_ids=None, gold=None, **columns):
        """A bonus per reasoning step, up to a number of steps, and (unless told otherwise) only with the right answer: steps to nowhere earn nothing."""
        if component.only_right:
            paid = [is_right(c, g) for c, g in zip(completions, gold, strict=True)]
        else:
            paid = [True] * len(completions)
        return [
            component.step_bonus * min(count_steps(c), component.max_steps) if p else 0.0
            for c, p in zip(completions, paid, strict=True)
        ]

    return step


def _format(answer_format: str) -> RewardFunction:
    def format_(prompts, completions, completion_ids=None, gold=None, **columns):
        """1.0 for an answer in the form that is taught (`answer_format`), else 0.0."""
        return [float(is_formatted(c, answer_format)) for c in completions]

    return format_
