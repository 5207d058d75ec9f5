"""Rules of the gates: metrics that exist, one condition each, and limits that some value can pass."""

import math
import re
from typing import Any

from configs.rules.rewards import reward_names

# Metrics that have a value for every prompt, so that two models can be compared on them, with their column in completions.jsonl.
PER_PROMPT = {
    "accuracy": "correct",
    "mean_reward": "reward",
    "format_rate": "formatted",
    "mean_length": "length",
    "truncated_rate": "truncated",
}
METRICS = (*PER_PROMPT, "kl", "kl_sequence")
SAMPLED = re.compile(r"(?:pass|maj)_at_([1-9][0-9]*)")
# Least and greatest value that a metric can have.
RANGES = {
    "accuracy": (0, 1),
    "format_rate": (0, 1),
    "truncated_rate": (0, 1),
    "mean_length": (0, math.inf),
    "kl": (0, math.inf),
    "kl_sequence": (0, math.inf),
}


def gate(metric: str, least: float | None, most: float | None, rival: str | None, for_rival: dict[str, float]) -> None:
    """Raises ValueError for a gate without a condition, with both kinds, with crossed limits, or with what is for a rival (margin, confidence) and none."""
    prefix, _, plain = metric.rpartition("/")
    # What a further set measures is known with all of the configuration: gates_on_what_is_measured.
    if not prefix and metric not in METRICS and not SAMPLED.fullmatch(metric):
        known = ", ".join((*METRICS, "pass_at_<k>", "maj_at_<k>", "rewards/<component>"))
        raise ValueError(f"the gate on {metric!r} names no metric: the metrics are {known}, and those of a further set")
    if rival is not None and plain not in PER_PROMPT:
        raise ValueError(
            f"the gate on {metric} has a rival, which needs a value for every prompt, and {plain} has none: {', '.join(PER_PROMPT)} have one"
        )
    if rival is not None and (least is not None or most is not None):
        raise ValueError(f"the gate on {metric} has a rival and a limit: make two gates of it")
    if rival is None and least is None and most is None:
        raise ValueError(f"the gate on {metric} has no min, max or rival: give one, or take the gate out")
    if least is not None and most is not None and least > most:
        raise ValueError(f"the gate on {metric} has min {least:g} above max {most:g}: no value can pass")
    for name, value in for_rival.items() if rival is None else ():
        what = {"margin": "difference", "confidence": "interval"}[name]
        raise ValueError(
            f"the gate on {metric} has {name} {value:g} and no rival, whose {what} it is for: take it out, or name a rival"
        )


def gates_on_what_is_measured(gates: dict[str, Any], evaluation: Any, grpo: Any) -> None:
    """Raises ValueError for a gate on a set that is not in evaluation.sets, or on a metric or a reward's component that there will not be."""
    for gate in filter(None, gates.values()):
        name, _, metric = gate.metric.rpartition("/")
        if is_component := name.rpartition("/")[2] == "rewards":
            name = name.removesuffix("rewards").rstrip("/")
        if name and name not in evaluation.sets:
            raise ValueError(
                f"the gate on {gate.metric} names the set {name}, which evaluation.sets does not have: add it, or correct the name"
            )
        is_task = name != "" and evaluation.sets[name].task is not None
        if is_component:
            if metric not in reward_names(grpo):
                raise ValueError(
                    f"the gate on {gate.metric} names no component of the reward: these are {', '.join(reward_names(grpo))}"
                )
            if is_task:
                raise ValueError(
                    f"the gate on {gate.metric} is on a component of the reward, and a harness's task has none: name a metric of the task"
                )
            continue
        if is_task:
            if gate.rival is not None:
                raise ValueError(
                    f"the gate on {gate.metric} has a rival, which needs a value for every prompt: a harness's task has none, give a min or max"
                )
            continue
        if name and metric not in PER_PROMPT and not SAMPLED.fullmatch(metric):
            raise ValueError(
                f"the gate on {gate.metric} names no metric of a set: these are {', '.join(PER_PROMPT)}, pass_at_<k> and maj_at_<k>"
            )
        if (sampled := SAMPLED.fullmatch(metric)) and (not evaluation.samples or int(sampled[1]) not in evaluation.k):
            raise ValueError(
                f"the gate on {gate.metric} needs evaluation.samples of at least {sampled[1]}, and {sampled[1]} in evaluation.k: set both"
            )
        _can_pass(gate, metric)


def _can_pass(gate: Any, metric: str) -> None:
    """Raises ValueError for limits beyond every value of the metric: the gate would refuse each model after it is trained."""
    least, most = (0, 1) if SAMPLED.fullmatch(metric) else RANGES.get(metric, (-math.inf, math.inf))
    if gate.min is not None and gate.min > most:
        raise ValueError(
            f"the gate on {gate.metric} has min {gate.min:g}, and its values are at most {most}: no value can pass, lower min"
        )
    if gate.max is not None and gate.max < least:
        raise ValueError(
            f"the gate on {gate.metric} has max {gate.max:g}, and its values are at least {least}: no value can pass, raise max"
        )
    if gate.rival is not None and gate.margin >= most - least:
        raise ValueError(
            f"the gate on {gate.metric} has margin {gate.margin:g}, and two values differ by at most {most - least}: no value can pass, lower margin"
        )
