"""What `ratchet check` prints: the data's counts, the batch arithmetic, the reward audit, an estimate of memory. Trains nothing and stores nothing."""

import json
import math
import tempfile
from pathlib import Path

from configs.errors import DataError
from configs.schema import RunConfig, Training
from tasks.core.data import prepare
from tasks.core.evaluation import sets
from tasks.core.model import memory
from tasks.core.scoring import reward_audit, rewards

# Tokens that a chat template puts around a prompt, at most.
TEMPLATE = 256


def check(config: RunConfig) -> list[str]:
    """Lines for people. Raises ConfigError, DataError or ModelError for what would stop a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "data"
        counts = prepare.prepare(config.data, config.seed, out)
        card = json.loads((out / "card.json").read_text(encoding="utf-8"))
        reward = rewards.build(config.grpo.reward_type, config.grpo.reward_config)
        ranking = reward_audit.audit(reward, reward_audit.samples(out))
        further = sets.check(config.evaluation.sets, config.data, out, config.seed)
    if config.evaluation.split == "validation" and not counts["num_validation"]:
        raise DataError("evaluation.split is validation and data.validation_size is 0: raise it, or evaluate on test")
    estimate = memory.estimate(config)
    sizes = "; ".join(
        f"{name}: {estimate[name]['trainable']:,} trainable, about {estimate[name]['peak_bytes'] / 2**30:.1f} GiB"
        for name in ("sft", "grpo")
    )
    held_out = counts["num_test" if config.evaluation.split == "test" else "num_validation"]
    measured = min(held_out, config.evaluation.max_samples or held_out)
    return [
        f"data: {counts['num_demonstrations']:,} demonstrations, {counts['num_train_prompts']:,} training prompts, "
        f"{counts['num_validation']:,} for validation, {counts['num_test']:,} for test; {measured:,} are measured",
        f"checks: {found(card['checks'])}; {longest(card['splits'], estimate['takes'], config.grpo.max_new_tokens)}",
        f"sft: {steps(config.sft, counts['num_demonstrations'], config.compute.num_processes, rows_per_sample=1)}",
        f"grpo: {steps(config.grpo, counts['num_train_prompts'], config.compute.num_processes, rows_per_sample=config.grpo.num_generations)}",
        *([f"further sets: {further}"] if further else []),
        f"reward: {reward_audit.sentence(ranking)}",
        f"memory per process on {estimate['device']}, roughly: {estimate['parameters']:,} parameters; {sizes}",
    ]


def found(checks: dict[str, dict]) -> str:
    """What the checks of the data found and did, in words."""
    parts = []
    for name, check in checks.items():
        done = [f"{check[outcome]:,} {outcome}" for outcome in ("fixed", "dropped", "kept") if check[outcome]]
        parts += [f"{name.replace('_', ' ')} {', '.join(done)}"] if done else []
    return "; ".join(parts) or "nothing found"


def longest(splits: dict[str, dict], takes: int | None, new_tokens: int) -> str:
    """Whether the longest prompt fits into the model's context, as far as that can be said without its tokenizer: a token is a byte at least."""
    most = max(split["longest_prompt_bytes"] for split in splits.values())
    says = f"the longest prompt has {max(split['longest_prompt_words'] for split in splits.values()):,} words in {most:,} bytes"
    if takes is None:
        return says
    fits = (
        "and fits"
        if most + new_tokens + TEMPLATE <= takes
        else "and may not fit (tokens are counted before SFT: data.checks.long_prompts)"
    )
    return f"{says} {fits} into the {takes:,} tokens of the model beside {new_tokens:,} new ones"


def steps(section: Training, available: int, processes: int, rows_per_sample: int) -> str:
    """Batch arithmetic in words: a step takes batch_size x accumulation x processes rows; GRPO's rows are num_generations completions per prompt."""
    rows = section.batch_size * section.gradient_accumulation_steps * processes
    samples = min(available, section.max_samples or available)
    per_epoch = max(1, math.ceil(samples * rows_per_sample / rows))
    total = section.max_steps or math.ceil(section.num_epochs * per_epoch)
    product = (
        f"{section.batch_size} x {section.gradient_accumulation_steps} accumulation x {processes} processes = {rows}"
    )
    if rows_per_sample > 1:
        product += f" completions = {rows / rows_per_sample:g} prompts x {rows_per_sample}"
    return (
        f"a step takes {product}; {samples:,} of {available:,} samples; {per_epoch:,} steps an epoch, {total:,} in all"
    )
