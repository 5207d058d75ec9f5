"""The table base / SFT / GRPO / champion and the verdict, for people: Markdown for Prefect and MLflow, rows for the terminal."""

from typing import Any

from configs.rules.gates import SAMPLED
from tasks.core.judging.gates import Comparison, Verdict
from tasks.core.scoring.error_classes import CLASSES

ROLES = {"base": "base", "sft": "SFT", "grpo": "GRPO", "champion": "champion"}
ROWS = {
    "accuracy": ("greedy accuracy", "{:.1%}"),
    "mean_reward": ("mean reward", "{:.3f}"),
    "format_rate": ("format rate", "{:.1%}"),
    "mean_length": ("mean length, tokens", "{:.1f}"),
    "truncated_rate": ("truncated", "{:.1%}"),
    "kl": ("KL per token, nats (to base / to SFT)", "{:.4f}"),
    "kl_sequence": ("KL per completion, nats", "{:.3f}"),
    "num_prompts": ("held-out prompts", "{:.0f}"),
}
OUTCOMES = {"pass": "passed", "fail": "FAILED", "inconclusive": "inconclusive"}
Metrics = dict[str, dict[str, Any]]


def columns(metrics: Metrics) -> list[str]:
    """Titles of the models that were measured, in the order of the table's columns; the three of the run are always there."""
    return [title for role, title in ROLES.items() if role in metrics or role != "champion"]


def table(metrics: Metrics) -> list[list[str]]:
    """Rows of label and one text per model, with the 95 % interval where there is one; a metric that a model has not is a dash."""
    return [
        [label, *(_cell(metrics.get(role, {}), name, form) for role in _roles(metrics))]
        for name, label, form in _rows(metrics)
    ]


def gate_rows(verdict: Verdict) -> list[list[str]]:
    """Rows of gate, outcome, observed value and limit."""
    return [
        [g.name, OUTCOMES[g.outcome], "–" if g.observed is None else f"{g.observed:.4g}", g.limit]
        for g in verdict.gates
    ]


def error_rows(metrics: Metrics) -> list[list[str]]:
    """Rows of error class and one count per model, of the main set."""
    return [
        [what, *(str(metrics.get(role, {}).get("errors", {}).get(name, "–")) for role in _roles(metrics))]
        for name, what in CLASSES.items()
    ]


def category_rows(metrics: Metrics) -> list[list[str]]:
    """Rows of category, number of prompts, and one accuracy per model; none where the data has no categories."""
    by_role = [metrics.get(role, {}).get("categories", {}) for role in _roles(metrics)]
    counts = {name: one["num_prompts"] for found in by_role for name, one in found.items()}
    return [
        [name, str(count), *(_category(found.get(name)) for found in by_role)] for name, count in sorted(counts.items())
    ]


def markdown(metrics: Metrics, verdict: Verdict, comparisons: list[Comparison] | None = None) -> str:
    """The report of one run."""
    heading = "## Passed: every gate says yes" if verdict.passed else "## Rejected: not every gate says yes"
    titles = columns(metrics)
    parts = [
        heading,
        _markdown(["", *titles], table(metrics)),
        _markdown(["gate", "outcome", "observed", "limit"], gate_rows(verdict)),
    ]
    parts.append("\n".join(f"- {g.sentence}" for g in verdict.gates))
    for comparison in comparisons or []:
        parts += [f"### GRPO against {ROLES[comparison.rival]}, on the same prompts", _comparison(comparison)]
    if any("errors" in found for found in metrics.values()):
        parts += ["### Wrong completions", _markdown(["", *titles], error_rows(metrics))]
    if categories := category_rows(metrics):
        parts += ["### Greedy accuracy by category", _markdown(["category", "prompts", *titles], categories)]
    return "\n\n".join(parts) + "\n"


def _roles(metrics: Metrics) -> list[str]:
    return [role for role in ROLES if role in metrics or role != "champion"]


def _rows(metrics: Metrics) -> list[tuple[str, str, str]]:
    """(metric, label, format): the rows that are always there, then what this run has besides."""
    others = sorted(
        {name for found in metrics.values() for name, value in found.items() if isinstance(value, int | float)}
        - set(ROWS),
        key=_natural,
    )
    return [(name, *row) for name, row in ROWS.items()] + [(name, *_other(name)) for name in others]


def _other(name: str) -> tuple[str, str]:
    """Label and format of pass@k and maj@k, of a reward's component, and of a further set's metric."""
    place, _, metric = name.rpartition("/")
    if place == "rewards":
        return f"reward component {metric}", "{:.3f}"
    if "/rewards" in place:
        return f"{place.removesuffix('/rewards')}: reward component {metric}", "{:.3f}"
    sampled = SAMPLED.fullmatch(metric) is not None
    label, form = ROWS.get(
        metric, (metric.replace("_at_", "@") if sampled else metric, "{:.1%}" if sampled else "{:.4g}")
    )
    return (f"{place}: {label}" if place else label), form


def _natural(name: str) -> tuple[int, str, int]:
    """Order of the rows: samples by their k, then the reward's components, then further sets."""
    stem, _, k = name.partition("_at_") if SAMPLED.fullmatch(name) else (name, "", "")
    return 1 if name.startswith("rewards/") else 2 if "/" in name else 0, stem, int(k or 0)


def _cell(found: dict[str, Any], name: str, form: str) -> str:
    if name not in found:
        return "–"
    interval = found.get("intervals", {}).get(name)
    return form.format(found[name]) + (
        f" ({form.format(interval[0])} to {form.format(interval[1])})" if interval else ""
    )


def _category(found: dict[str, Any] | None) -> str:
    return (
        "–" if found is None else f"{found['accuracy']:.1%} ({found['interval'][0]:.1%} to {found['interval'][1]:.1%})"
    )


def _comparison(comparison: Comparison) -> str:
    rows = [
        [ROWS[name][0], f"{mean:+.4g}", f"{low:+.4g} to {high:+.4g}"]
        for name, (mean, low, high) in comparison.differences.items()
    ]
    test = f"{comparison.fixed} fixed, {comparison.broken} broken; McNemar's exact test of accuracy: p = {comparison.p_value:.3g}."
    return f"{_markdown(['', 'difference', '95 % interval (paired bootstrap)'], rows)}\n\n{test}"


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
