"""Supervised fine-tuning: TRL's SFTTrainer on the demonstrations, with the loss on the completion alone."""

import time
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, DataError
from configs.rules import training as rules_training
from configs.schema import ComputeSection, GRPOSection, ModelSection, SFTSection
from tasks.core.model import loading, location, lora, prompt_lengths
from tasks.core.model.prompts import render_prompt
from tasks.core.storage import jsonl
from tasks.core.training import arguments, loop, saving
from tasks.core.training.context import Context


def train(
    section: SFTSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    base: Path,
    data: Path,
    out: Path,
    context: Context,
    grpo: GRPOSection,
) -> dict[str, Any]:
    """Fine-tunes the base model and writes the `sft` artifact to `out`.

    `base` and `data` are artifacts; `grpo` is what will follow, whose prompts are looked at first. Returns {"loss", "steps", "seconds",
    "upload_wait_seconds"}. Raises ConfigError, DataError or ModelError for bad input.
    """
    started = time.monotonic()
    source, work = location.locate(model, base), out.with_name(f"{out.name}.training")
    sft = build(section, model, compute, seed, source, data, work, context)
    prompt_lengths.look_ahead(grpo, seed, sft.processing_class, model, sft.model, data)
    history = loop.run(sft, context, work)
    saving.save(sft, history, source, model, out)
    saving.clear(sft, work)
    return {
        "loss": loop.last_tenth(history, "loss"),
        "steps": sft.state.global_step,
        "seconds": time.monotonic() - started,
        "upload_wait_seconds": context.upload_wait_seconds,
    }


def build(
    section: SFTSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    source: str,
    data: Path,
    work: Path,
    context: Context,
) -> Any:
    """The SFTTrainer that `train` runs."""
    from trl import SFTConfig, SFTTrainer

    values = arguments.settings(section, rules_training.SFT_NAMES, compute, seed, work, context.checkpoints is not None)
    args = arguments.arguments("sft", SFTConfig, section, {"trust_remote_code": model.trust_remote_code, **values})
    tokenizer = loading.load_tokenizer(source, model)
    policy = loading.load_policy(source, model, compute, for_training=True, lora=section.use_lora)
    lora.check_types(section, policy)
    rows = jsonl.sample(jsonl.read_rows(data / "sft.jsonl"), section.max_samples, seed)
    examples, adapter = dataset(rows, tokenizer, section.max_length, model), lora.adapter(section, policy)
    with arguments.trl_values("sft", section):
        return arguments.with_warmup(SFTTrainer, "sft", section)(
            model=policy, args=args, train_dataset=examples, processing_class=tokenizer, peft_config=adapter
        )


def dataset(rows: list[dict[str, Any]], tokenizer: Any, max_length: int, model: ModelSection) -> Any:
    """A data set of `input_ids` and `labels`; -100 marks the prompt, which costs nothing.

    Prompt and completion are tokenized apart and joined: no token spans the border, so that the prompt is the very tokens that GRPO
    and evaluation generate from. The completion ends with the end-of-text token. TRL cuts the rows to `max_length`.
    """
    from datasets import Dataset

    if not rows:
        raise DataError(
            "sft.jsonl holds no demonstrations, and SFT needs at least one: give some, or lower the held-out sizes"
        )
    prompts = tokenizer([render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs) for row in rows])[
        "input_ids"
    ]
    completions = tokenizer([row["completion"] for row in rows], add_special_tokens=False)["input_ids"]
    shortest = min(map(len, prompts))
    if shortest >= max_length:
        raise ConfigError(
            f"sft.max_length is {max_length}, and the shortest prompt has {shortest} tokens, so that nothing is learnt: set it above {shortest}"
        )
    end = [tokenizer.eos_token_id]
    pairs = [(prompt, completion + end) for prompt, completion in zip(prompts, completions, strict=True)]
    return Dataset.from_dict(
        {"input_ids": [p + c for p, c in pairs], "labels": [[-100] * len(p) + c for p, c in pairs]}
    )
