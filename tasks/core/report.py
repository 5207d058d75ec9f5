"""The table base / SFT / GRPO and the verdict, for people: Markdown for Prefect and MLflow, rows for the terminal."""

from typing import Any

from tasks.core.gates import Verdict

ROLES = {"base": "base", "sft": "SFT", "grpo": "GRPO"}
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


def table(metrics: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of label and one text per model; a metric that a model has not is a dash."""
    return [[label, *(form.format(metrics[role][name]) if name in metrics[role] else "–" for role in ROLES)] for name, (label, form) in ROWS.items()]


def gate_rows(verdict: Verdict) -> list[list[str]]:
    """Rows of gate, outcome, observed value and limit."""
    return [[g.name, OUTCOMES[g.outcome], "–" if g.observed is None else f"{g.observed:.4g}", g.limit] for g in verdict.gates]


def markdown(metrics: dict[str, dict[str, Any]], verdict: Verdict) -> str:
    """The report of one run."""
    heading = "## Passed: every gate says yes" if verdict.passed else "## Rejected: not every gate says yes"
    gates = _rows(["gate", "outcome", "observed", "limit"], gate_rows(verdict))
    sentences = "\n".join(f"- {g.sentence}" for g in verdict.gates)
    return f"{heading}\n\n{_rows(['', *ROLES.values()], table(metrics))}\n\n{gates}\n\n{sentences}\n"


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
