"""The sample table: what base, SFT and GRPO wrote for the same prompts, for a person to read."""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.core.storage.jsonl import each_row

MODELS = ("base", "sft", "grpo")
KEPT = ("completion", "answer", "correct", "reward", "length", "truncated", "error")
# What the page shows, each with at most SHOWN prompts; a prompt may be under several headings.
SECTIONS = {
    "fixed": "Fixed: SFT is wrong and GRPO right",
    "broken": "Broken: SFT is right and GRPO wrong",
    "disagreement": "Reward and answer disagree",
    "truncated": "Truncated: GRPO's completion was cut off",
    "longest": "Longest of GRPO's completions",
    "same": "Right or wrong as before",
}
SHOWN = 5
MOST_CHARACTERS = 1500


def write(folders: dict[str, Path], out: Path) -> dict[str, int]:
    """Writes `samples.jsonl` (every prompt) and `samples.md` (some of each kind) from the completions of the models; returns how many are of each kind.

    One prompt at a time is in memory, and those that are shown.
    """
    counts = dict.fromkeys(("fixed", "broken", "same", "truncated", "disagreement"), 0)
    shown: dict[str, list[Any]] = {name: [] for name in SECTIONS}
    with (out / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for number, row in enumerate(_joined(folders)):
            file.write(json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n")
            for kind in (row["change"], *row["marks"]):
                counts[kind] += 1
                if len(shown[kind]) < SHOWN:
                    shown[kind].append(row)
            # Of equally long ones the first: a later one has a smaller -number.
            keep = heapq.heappush if len(shown["longest"]) < SHOWN else heapq.heappushpop
            keep(shown["longest"], (row["grpo"]["length"], -number, row))
    shown["longest"] = [row for _, _, row in sorted(shown["longest"], reverse=True)]
    (out / "samples.md").write_text(_page(counts, shown), encoding="utf-8")
    return counts


def _joined(folders: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """One row per prompt: id, prompt, gold, what each model wrote, `change` (fixed, broken, same) and `marks` (truncated, disagreement)."""
    files = [each_row(folders[model] / "completions.jsonl") for model in MODELS]
    for rows in zip(*files, strict=True):
        if len({row["id"] for row in rows}) > 1:
            raise ValueError(f"the models were measured on different prompts: {', '.join(row['id'] for row in rows)}")
        base, sft, grpo = rows
        change = "same" if sft["correct"] == grpo["correct"] else "fixed" if grpo["correct"] else "broken"
        marks = [
            name for name, is_so in (("truncated", grpo["truncated"]), ("disagreement", disagree(sft, grpo))) if is_so
        ]
        kept = {model: {key: row[key] for key in KEPT} for model, row in zip(MODELS, rows, strict=True)}
        yield {
            "id": base["id"],
            "prompt": base["prompt"],
            "gold": base["gold"],
            **kept,
            "change": change,
            "marks": marks,
        }


def disagree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether of two completions for one prompt the wrong one has at least the reward of the right one."""
    if one["correct"] == other["correct"]:
        return False
    right, wrong = (one, other) if one["correct"] else (other, one)
    return wrong["reward"] >= right["reward"]


def _page(counts: dict[str, int], shown: dict[str, list[dict[str, Any]]]) -> str:
    counted = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    parts = [
        "# Samples\n",
        f"From SFT to GRPO, of {counts['fixed'] + counts['broken'] + counts['same']} prompts: {counted}.\n",
    ]
    for name, title in SECTIONS.items():
        if shown[name]:
            parts += [f"## {title}\n", *(_entry(row) for row in shown[name])]
    return "\n".join(parts)


def _entry(row: dict[str, Any]) -> str:
    lines = [f"### {row['id']}: {row['change']}\n", _quoted(row["prompt"]), f"\ngold: `{row['gold']}`\n"]
    for model in MODELS:
        one = row[model]
        state = "right" if one["correct"] else one["error"].replace("_", " ")
        lines.append(
            f"**{model}** ({state}, answer {one['answer']!r}, reward {one['reward']:.3g}, {one['length']} tokens)\n\n{_quoted(one['completion'])}\n"
        )
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """As a block of code: what a model writes is shown and never rendered. Without text (special tokens, blanks) it would be no block, and says so."""
    if not text.strip():
        return "(no text)"
    short = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " [...]"
    return "\n".join("    " + line for line in short.splitlines())
