"""The verdict: pure functions from measurements to pass, fail or inconclusive."""

from typing import Any, Literal

from pydantic import BaseModel

from configs.rules.gates import PER_PROMPT
from configs.schema import Gate
from tasks.core.evaluation import statistics
from tasks.core.evaluation.metrics import PROPORTIONS
from tasks.core.evaluation.statistics import bootstrap_interval, matched_interval


class Evaluation(BaseModel):
    """Measurements of one model on the held-out prompts, and on further sets: `sets` by name."""

    metrics: dict[str, float]
    ids: list[str] = []
    per_prompt: dict[str, list[float]] = {}
    sets: dict[str, "Evaluation"] = {}

    def on(self, other: "Evaluation") -> "Evaluation":
        """This evaluation on the prompts that the other has, too: a champion of another tokenizer may have had no room for some."""
        there = set(other.ids)
        if self.ids == other.ids or not there.intersection(self.ids):
            return self
        kept = [i for i, one in enumerate(self.ids) if one in there]
        columns = {name: [column[i] for i in kept] for name, column in self.per_prompt.items()}
        return self.model_copy(update={"ids": [self.ids[i] for i in kept], "per_prompt": columns})


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


class Comparison(BaseModel):
    """A model against a rival on the same prompts: differences of means with their 95 % intervals, and the accuracy's discordant prompts."""

    rival: str
    differences: dict[str, tuple[float, float, float]]
    fixed: int
    broken: int
    p_value: float


def evaluation(
    metrics: dict[str, Any], completions: list[dict[str, Any]], sets: dict[str, list[dict[str, Any]]] | None = None
) -> Evaluation:
    """An Evaluation from the metrics and the rows of completions.jsonl, those of further sets by name."""
    columns = {name: [float(row[column]) for row in completions] for name, column in PER_PROMPT.items()}
    others = {name: evaluation({}, rows) for name, rows in (sets or {}).items()}
    return Evaluation(
        metrics={k: v for k, v in metrics.items() if isinstance(v, int | float)},
        ids=[row["id"] for row in completions],
        per_prompt=columns,
        sets=others,
    )


def judge(candidate: Evaluation, rivals: dict[str, Evaluation], gates: dict[str, Gate]) -> Verdict:
    """Applies every gate to the candidate. A tie with a rival and a value that is missing or not a number never pass.

    A gate whose rival is the champion passes where `rivals` has none: the first model has nothing to beat.
    """
    results = []
    for name, gate in gates.items():
        if gate.rival == "champion" and "champion" not in rivals:
            sentence = f"{gate.metric} has no rival, for no version is the champion yet."
            results.append(
                GateResult(
                    name=name, metric=gate.metric, outcome="pass", observed=None, limit=_limit(gate), sentence=sentence
                )
            )
        else:
            results.append(
                _against(name, gate, candidate, rivals[gate.rival]) if gate.rival else _within(name, gate, candidate)
            )
    return Verdict(passed=all(r.outcome == "pass" for r in results), gates=results)


def compare(candidate: Evaluation, rival: Evaluation, name: str) -> Comparison:
    """Candidate less rival, on the same prompts: the paired bootstrap for every metric, and McNemar's exact test for accuracy."""
    if name == "champion":
        candidate, rival = candidate.on(rival), rival.on(candidate)
    if candidate.ids != rival.ids:
        raise ValueError(
            f"the two models were measured on different prompts, so that they cannot be compared with {name}"
        )
    found, pairs = {}, {}
    for metric, values in candidate.per_prompt.items():
        pairs[metric] = [a - b for a, b in zip(values, rival.per_prompt[metric], strict=True)]
        if len(pairs[metric]) > 1:
            found[metric] = (sum(pairs[metric]) / len(pairs[metric]), *bootstrap_interval(pairs[metric]))
    fixed, broken = pairs["accuracy"].count(1.0), pairs["accuracy"].count(-1.0)
    return Comparison(
        rival=name, differences=found, fixed=fixed, broken=broken, p_value=statistics.mcnemar(fixed, broken)
    )


def _limit(gate: Gate) -> str:
    return f"above {gate.rival} by more than {gate.margin:g}"


def _within(name: str, gate: Gate, candidate: Evaluation) -> GateResult:
    value = candidate.metrics.get(gate.metric)
    limit = " and ".join(
        f"{word} {bound:g}" for word, bound in (("at least", gate.min), ("at most", gate.max)) if bound is not None
    )
    base = {"name": name, "metric": gate.metric, "limit": limit}
    if value is None or value != value:
        return GateResult(
            **base,
            outcome="inconclusive",
            observed=None,
            sentence=f"{gate.metric} was not measured, so it cannot be {limit}.",
        )
    if gate.min is not None and value < gate.min:
        return GateResult(
            **base,
            outcome="fail",
            observed=value,
            sentence=f"{gate.metric} is {value:.4g} and must be at least {gate.min:g}.",
        )
    if gate.max is not None and value > gate.max:
        return GateResult(
            **base,
            outcome="fail",
            observed=value,
            sentence=f"{gate.metric} is {value:.4g} and must be at most {gate.max:g}.",
        )
    return GateResult(**base, outcome="pass", observed=value, sentence=f"{gate.metric} is {value:.4g}, {limit}.")


def _against(name: str, gate: Gate, candidate: Evaluation, rival: Evaluation) -> GateResult:
    place, _, metric = gate.metric.rpartition("/")
    if place:
        candidate, rival = candidate.sets[place], rival.sets[place]
    if gate.rival == "champion":
        candidate, rival = candidate.on(rival), rival.on(candidate)
    if candidate.ids != rival.ids:
        raise ValueError(f"gate {name}: the candidate and {gate.rival} were measured on different prompts")
    differences = [a - b for a, b in zip(candidate.per_prompt[metric], rival.per_prompt[metric], strict=True)]
    observed = sum(differences) / len(differences)
    base = {"name": name, "metric": gate.metric, "observed": observed, "limit": _limit(gate)}
    if len(differences) < 2:
        return GateResult(
            **base,
            outcome="inconclusive",
            sentence=f"{gate.metric} was measured on one prompt, which says nothing about noise; measure more.",
        )
    interval = matched_interval if metric in PROPORTIONS else bootstrap_interval
    low, high = base["interval"] = interval(differences, gate.confidence)
    seen = f"{gate.metric} differs from {gate.rival} by {observed:+.4g} ({gate.confidence:.0%} interval {low:+.4g} to {high:+.4g}, {len(differences)} prompts)"
    if low > gate.margin:
        return GateResult(**base, outcome="pass", sentence=f"{seen}: more than {gate.margin:g}.")
    if high <= gate.margin:
        return GateResult(**base, outcome="fail", sentence=f"{seen}: not more than {gate.margin:g}.")
    return GateResult(
        **base,
        outcome="inconclusive",
        sentence=f"{seen}: the interval holds {gate.margin:g}, so this may be noise; measure more prompts.",
    )
