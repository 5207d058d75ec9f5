"""Room for completions: prompts that leave the model too few tokens, which `data.checks.long_prompts` decides on."""

import json
import logging
from pathlib import Path
from typing import Any

from configs.errors import DataError
from configs.schema import Checks, GRPOSection, ModelSection
from tasks.core.model.prompts import render_prompt
from tasks.core.storage import jsonl

log = logging.getLogger("ratchet.room")


def takes(model: Any) -> int | None:
    """Tokens of prompt and completion that a model takes; None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def policy(data: Path) -> str:
    """What is done with prompts that are too long: the data's card hands it on, for no tokenizer is there when the data are prepared."""
    card = data / "card.json"
    return json.loads(card.read_text(encoding="utf-8"))["long_prompts"] if card.exists() else Checks().long_prompts


def fitting(
    rows: list[dict[str, Any]],
    tokenizer: Any,
    model: ModelSection,
    takes: int | None,
    new_tokens: int,
    policy: str,
    lower: str = "grpo.max_new_tokens",
) -> list[dict[str, Any]]:
    """The rows that are used, of those whose prompts are too long for the model: one takes `takes` tokens, the completion among them.

    `policy` is drop, warn or fail, and `lower` the field that `new_tokens` comes from. Raises DataError to fail.
    """
    if takes is None:
        return rows
    room, long = takes - new_tokens, {}
    for row in rows:
        text = render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs)
        # A token is a byte at least: most prompts need not be tokenized to see that they fit.
        if len(text.encode()) > room and (count := len(tokenizer(text)["input_ids"])) > room:
            long[row["id"]] = count
    if not long:
        return rows
    first, count = next(iter(long.items()))
    found = f"{len(long)} of {len(rows)} prompts have more than {room} tokens, the first {first} with {count}; the model takes {takes}, completions included"
    if policy == "fail" or (policy == "drop" and len(long) == len(rows)):
        raise DataError(
            f"{found}: lower {lower}, which is {new_tokens}, take the prompts out of the data, or set data.checks.long_prompts to drop or warn"
        )
    log.warning("data.checks.long_prompts: %s (%s)", found, "dropped" if policy == "drop" else "kept")
    return [row for row in rows if row["id"] not in long] if policy == "drop" else rows


def look_ahead(grpo: GRPOSection, seed: int, tokenizer: Any, section: ModelSection, model: Any, data: Path) -> None:
    """Refuses GRPO's prompts before the time of SFT is spent, where GRPO would refuse them. Raises DataError."""
    if policy(data) == "fail":
        rows = jsonl.sample(jsonl.read_rows(data / "grpo.jsonl"), grpo.max_samples, seed)
        fitting(rows, tokenizer, section, takes(model), grpo.max_new_tokens, "fail")
