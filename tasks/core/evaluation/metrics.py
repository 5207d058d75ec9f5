"""From scored completions to metrics: means with 95 % intervals, by category too, and counts of what went wrong."""

from dataclasses import dataclass, field
from typing import Any

from tasks.core.evaluation import statistics
from tasks.core.scoring.error_classes import CLASSES

# Metrics with their column of the scored rows; the first three are proportions.
COLUMNS = {
    "accuracy": "correct",
    "format_rate": "formatted",
    "truncated_rate": "truncated",
    "mean_reward": "reward",
    "mean_length": "length",
}
PROPORTIONS = ("accuracy", "format_rate", "truncated_rate")


@dataclass
class Columns:
    """Of every prompt a few numbers, metric by metric; None where a reward component has no opinion."""

    values: dict[str, list[float | None]] = field(default_factory=dict)
    categories: list[str | None] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0))

    def add(self, scored: list[dict[str, Any]]) -> None:
        """Takes up scored rows (tasks.core.evaluation.measure.score)."""
        for row in scored:
            found = {name: row[column] for name, column in COLUMNS.items()} | {
                f"rewards/{name}": value for name, value in row["components"].items()
            }
            for name, value in found.items():
                self.values.setdefault(name, []).append(None if value is None else float(value))
            self.categories.append(row.get("category"))
            if row["error"]:
                self.errors[row["error"]] += 1

    def add_samples(self, row: dict[str, Any], ks: list[int]) -> None:
        """Takes up the votes of one prompt (tasks.core.evaluation.measure.count_votes)."""
        votes, right = [a["votes"] for a in row["answers"]], [a["correct"] for a in row["answers"]]
        for k in ks:
            self.values.setdefault(f"pass_at_{k}", []).append(statistics.pass_at_k(row["samples"], row["correct"], k))
            self.values.setdefault(f"maj_at_{k}", []).append(statistics.majority_at_k(votes, right, row["silent"], k))


def summary(columns: Columns) -> dict[str, Any]:
    """Means over prompts: accuracy, format_rate, truncated_rate, mean_reward, mean_length (tokens, the end-of-text token included),
    `rewards/<component>` (unweighted; over the prompts that it has an opinion on), `pass_at_<k>`, `maj_at_<k>`; and num_prompts.

    `intervals` has the 95 % interval of each (Wilson for proportions, the bootstrap over prompts for others, none for a single prompt), `errors` the
    number of wrong completions per class, and `categories`, where rows have one, the accuracy of each with its interval.
    """
    found: dict[str, Any] = {"num_prompts": len(columns.categories), "errors": dict(columns.errors)}
    intervals = {}
    for name, column in columns.values.items():
        values = [value for value in column if value is not None]
        if values:
            found[name] = sum(values) / len(values)
        if interval := _interval(name, values):
            intervals[name] = interval
    if any(category is not None for category in columns.categories):
        found["categories"] = _by_category(columns)
    return {**found, "intervals": intervals}


def _interval(name: str, values: list[float]) -> list[float] | None:
    if name in PROPORTIONS:
        return list(statistics.wilson_interval(round(sum(values)), len(values)))
    return list(statistics.bootstrap_interval(values)) if len(values) > 1 else None


def _by_category(columns: Columns) -> dict[str, dict[str, Any]]:
    right: dict[str, list[float]] = {}
    for category, value in zip(columns.categories, columns.values["accuracy"], strict=True):
        right.setdefault(category or "none", []).append(value or 0.0)
    return {
        c: {"accuracy": sum(v) / len(v), "interval": _interval("accuracy", v), "num_prompts": len(v)}
        for c, v in sorted(right.items())
    }


def join(into: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Puts the metrics of a further set under its name, `<name>/<metric>`, their intervals among the others, and the rest in `sets`."""
    intervals = found.pop("intervals", {})
    into["intervals"] |= {f"{name}/{metric}": interval for metric, interval in intervals.items()}
    into |= {f"{name}/{metric}": value for metric, value in found.items() if isinstance(value, int | float)}
    into.setdefault("sets", {})[name] = {
        key: value for key, value in found.items() if not isinstance(value, int | float)
    }
