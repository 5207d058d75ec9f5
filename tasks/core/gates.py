"""The verdict: pure functions from measurements to pass, fail or inconclusive."""

import math
from statistics import NormalDist
from typing import Any, Literal

from pydantic import BaseModel

from configs.rules import PER_PROMPT
from configs.schema import Gate

RESAMPLES = 10_000
PROPORTIONS = ("accuracy", "format_rate", "truncated_rate")


class Evaluation(BaseModel):
    """Measurements of one model on the held-out prompts."""

    metrics: dict[str, float]
    ids: list[str] = []
    per_prompt: dict[str, list[float]] = {}


class GateResult(BaseModel):
    """What one gate says."""

    name: str
    metric: str
    outcome: Literal["pass", "fail", "inconclusive"]
    observed: float | None
    interval: tuple[float, float] | None = None
    limit: str
    sentence: str


class Verdict(BaseModel):
    """What all gates say together; only a pass of every gate promotes."""

    passed: bool
    gates: list[GateResult]


def evaluation(metrics: dict[str, Any], completions: list[dict[str, Any]]) -> Evaluation:
    """An Evaluation from the metrics and the rows of completions.jsonl."""
    columns = {name: [float(row[column]) for row in completions] for name, column in PER_PROMPT.items()}
    return Evaluation(metrics={k: v for k, v in metrics.items() if isinstance(v, int | float)}, ids=[row["id"] for row in completions], per_prompt=columns)


def judge(candidate: Evaluation, rivals: dict[str, Evaluation], gates: dict[str, Gate]) -> Verdict:
    """Applies every gate to the candidate. A tie with a rival and a value that is missing or not a number never pass."""
    results = [_against(name, gate, candidate, rivals[gate.rival]) if gate.rival else _within(name, gate, candidate) for name, gate in gates.items()]
    return Verdict(passed=all(r.outcome == "pass" for r in results), gates=results)


def _within(name: str, gate: Gate, candidate: Evaluation) -> GateResult:
    value = candidate.metrics.get(gate.metric)
    limit = " and ".join(f"{word} {bound:g}" for word, bound in (("at least", gate.min), ("at most", gate.max)) if bound is not None)
    base = {"name": name, "metric": gate.metric, "limit": limit}
    if value is None or value != value:
        return GateResult(**base, outcome="inconclusive", observed=None, sentence=f"{gate.metric} was not measured, so it cannot be {limit}.")
    if gate.min is not None and value < gate.min:
        return GateResult(**base, outcome="fail", observed=value, sentence=f"{gate.metric} is {value:.4g} and must be at least {gate.min:g}.")
    if gate.max is not None and value > gate.max:
        return GateResult(**base, outcome="fail", observed=value, sentence=f"{gate.metric} is {value:.4g} and must be at most {gate.max:g}.")
    return GateResult(**base, outcome="pass", observed=value, sentence=f"{gate.metric} is {value:.4g}, {limit}.")


def _against(name: str, gate: Gate, candidate: Evaluation, rival: Evaluation) -> GateResult:
    if candidate.ids != rival.ids:
        raise ValueError(f"gate {name}: the candidate and {gate.rival} were measured on different prompts")
    differences = [a - b for a, b in zip(candidate.per_prompt[gate.metric], rival.per_prompt[gate.metric], strict=True)]
    observed = sum(differences) / len(differences)
    base = {"name": name, "metric": gate.metric, "observed": observed, "limit": f"above {gate.rival} by more than {gate.margin:g}"}
    if len(differences) < 2:
        return GateResult(**base, outcome="inconclusive", sentence=f"{gate.metric} was measured on one prompt, which says nothing about noise; measure more.")
    interval = matched_interval if gate.metric in PROPORTIONS else bootstrap_interval
    low, high = base["interval"] = interval(differences, gate.confidence)
    seen = f"{gate.metric} differs from {gate.rival} by {observed:+.4g} ({gate.confidence:.0%} interval {low:+.4g} to {high:+.4g}, {len(differences)} prompts)"
    if low > gate.margin:
        return GateResult(**base, outcome="pass", sentence=f"{seen}: more than {gate.margin:g}.")
    if high <= gate.margin:
        return GateResult(**base, outcome="fail", sentence=f"{seen}: not more than {gate.margin:g}.")
    return GateResult(**base, outcome="inconclusive", sentence=f"{seen}: the interval holds {gate.margin:g}, so this may be noise; measure more prompts.")


def matched_interval(differences: list[float], confidence: float) -> tuple[float, float]:
    """Interval of the difference of two proportions on the same prompts; `differences` are 1, 0 and -1.

    Wald's interval after half a count is added to each of the four cells (Agresti and Min, Statistics in Medicine 24, 2005): unlike the
    bootstrap it does not shrink to a point when all prompts agree, so that a handful of prompts never decides.
    """
    better, worse = differences.count(1) + 0.5, differences.count(-1) + 0.5
    count = len(differences) + 2
    mean = (better - worse) / count
    error = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(better + worse - (better - worse) ** 2 / count) / count
    return max(-1.0, mean - error), min(1.0, mean + error)


def bootstrap_interval(differences: list[float], confidence: float) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of at least two paired differences (Efron and Tibshirani 1993, section 13.3), seeded."""
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap((differences,), np.mean, n_resamples=RESAMPLES, batch=500, confidence_level=confidence, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
