"""The card of a data set: what is in it, what the checks found, and a digest of its files, for people (card.md) and programs (card.json)."""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from configs.schema import DataSection
from tasks.core.data.findings import Findings

FILES = ("sft.jsonl", "grpo.jsonl", "validation.jsonl", "test.jsonl")


class Lengths:
    """Number of prompts, mean and maximum of their lengths in words, maximum in bytes (no fewer than tokens), and rows by category, of one split."""

    def __init__(self) -> None:
        self.rows = self.words = self.longest = self.bytes = 0
        self.categories: Counter[str] = Counter()

    def add(self, row: dict[str, Any]) -> None:
        words = sum(len(message["content"].split()) for message in row["prompt"])
        self.rows, self.words, self.longest = self.rows + 1, self.words + words, max(self.longest, words)
        self.bytes = max(self.bytes, sum(len(message["content"].encode()) for message in row["prompt"]))
        if "category" in row:
            self.categories[row["category"]] += 1

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": self.rows, "mean_prompt_words": round(self.words / max(self.rows, 1), 1)}
        found |= {"longest_prompt_words": self.longest, "longest_prompt_bytes": self.bytes}
        return found | ({"categories": dict(sorted(self.categories.items()))} if self.categories else {})


def write(
    folder: Path,
    section: DataSection,
    counts: dict[str, int],
    splits: dict[str, Lengths],
    answered: dict[str, int],
    findings: Findings,
) -> None:
    """Writes card.json and card.md beside the files that they describe. Neither names a path or a time: the same data give the same card."""
    hub = section.hub
    source = {
        "arithmetic": lambda: {},
        "files": lambda: {},
        "hub": lambda: {"name": hub.name, "config": hub.config, "revision": hub.revision},
        "reasoning_gym": lambda: {"tasks": section.reasoning_gym.tasks},
    }[section.source]()
    card = {
        "source": {"kind": section.source, **source},
        "digest": digest(folder),
        "counts": counts,
        "splits": {name: lengths.plain() for name, lengths in splits.items()},
        "demonstrations": answered,
        "checks": findings.plain(),
        "long_prompts": section.checks.long_prompts,
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "card.md").write_text(markdown(card), encoding="utf-8")


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a data artifact's rows."""
    total = hashlib.sha256()
    for name in FILES:
        with (folder / name).open("rb") as stream:
            total.update(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def markdown(card: dict[str, Any]) -> str:
    """The card for people."""
    source = ", ".join(f"{name} {_cell(value)}" for name, value in card["source"].items() if value)
    splits = [
        [name, f"{s['rows']:,}", s["mean_prompt_words"], f"{s['longest_prompt_words']:,}"]
        for name, s in card["splits"].items()
    ]
    checks = [
        [name, c["policy"], *(f"{c[k]:,}" for k in ("found", "fixed", "dropped", "kept"))]
        for name, c in card["checks"].items()
    ]
    parts = [
        "# Data set",
        f"Source: {source}.",
        f"Digest (SHA-256 of the files): `{card['digest']}`.",
        _table(["split", "prompts", "words of a prompt, mean", "longest"], splits),
        "Demonstrations: "
        + ", ".join(f"{number:,} {kind.replace('_', ' ')}" for kind, number in card["demonstrations"].items())
        + ".",
        _table(["check", "policy", "found", "fixed", "dropped", "kept"], checks),
    ]
    categories = sorted({name for split in card["splits"].values() for name in split.get("categories", {})})
    if categories:
        rows = [
            [name, *(f"{s.get('categories', {}).get(name, 0):,}" for s in card["splits"].values())]
            for name in categories
        ]
        parts.append(_table(["category", *card["splits"]], rows))
    for name, check in card["checks"].items():
        if check["examples"]:
            lines = "\n".join(
                f"- {e['where']} ({e['outcome']}): `{_cell(e['why']).replace('`', chr(39))}`" for e in check["examples"]
            )
            parts.append(f"## {name}: examples\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _table(header: list[Any], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return " ".join(text.split()).replace("|", "\\|")
