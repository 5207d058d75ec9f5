"""Group relative policy optimization: TRL's GRPOTrainer, started from the SFT model, which is its reference throughout."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from configs import rules
from configs.errors import ConfigError, DataError
from configs.schema import Checks, ComputeSection, GRPOSection, ModelSection
from tasks.core import loop, models, trainer
from tasks.core.context import Context

log = logging.getLogger("ratchet.grpo")


def train(section: GRPOSection, model: ModelSection, compute: ComputeSection, seed: int, sft: Path, data: Path, out: Path, context: Context) -> dict[str, Any]:
    """Trains the SFT model by its rewards and writes the `grpo` artifact to `out`.

    `sft` and `data` are artifacts. Returns {"loss", "reward", "kl_k3", "steps", "seconds", "upload_wait_seconds"}, each curve as its mean over the last tenth
    of the steps; `kl_k3` is TRL's estimate on training rollouts, in nats per token, and is missing where `kl_coef` is 0.
    Raises ConfigError, DataError or ModelError for bad input.
    """
    from tasks.core.registry import write_mlmodel

    started = time.monotonic()
    source, work = sft / "model", out.with_name(f"{out.name}.training")
    grpo = build(section, model, compute, seed, source, data, work, context)
    history = loop.run(grpo, context, work)
    trainer.save(grpo, history, source, model, out)
    if grpo.is_world_process_zero():
        write_mlmodel(out / "model")
    trainer.clear(grpo, work)
    curves = {name: loop.last_tenth(history, name) for name in ("loss", "reward", "kl_k3")}
    return {
        **{name: value for name, value in curves.items() if value is not None},
        "steps": grpo.state.global_step,
        "seconds": time.monotonic() - started,
        "upload_wait_seconds": context.upload_wait_seconds,
    }


def build(section: GRPOSection, model: ModelSection, compute: ComputeSection, seed: int, source: Path, data: Path, work: Path, context: Context) -> Any:
    """The GRPOTrainer that `train` runs. `source` is the folder of the SFT model, with its adapter merged.

    The reference is that model: with a new adapter TRL takes the model with the adapter switched off, for full fine-tuning it loads the folder
    that the policy came from once more, in the same type.
    """
    from trl import GRPOConfig, GRPOTrainer

    from tasks.core import rewards

    reward = rewards.build(section.reward_type, section.reward_config)
    values = trainer.settings(section, rules.GRPO_NAMES, compute, seed, work, context.checkpoints is not None)
    ours = {"trust_remote_code": model.trust_remote_code, "reward_weights": list(reward.weights.values())}
    args = trainer.arguments("grpo", GRPOConfig, section, {**ours, **values})
    tokenizer = models.load_tokenizer(source, model)
    policy = models.load_policy(source, model, compute, for_training=True, lora=section.use_lora)
    trainer.check_types(section, policy)
    rows = trainer.sample(trainer.read_rows(data / "grpo.jsonl"), section.max_samples, seed)
    takes = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    rows = fitting(rows, tokenizer, model, takes, args.max_completion_length, _long_prompts(data))
    questions, adapter = dataset(rows, tokenizer, args.generation_batch_size // args.num_generations, model), trainer.adapter(section, policy)
    with trainer.trl_values("grpo", section):
        return trainer.with_warmup(GRPOTrainer, "grpo", section)(
            model=policy, reward_funcs=reward.functions, args=args, train_dataset=questions, processing_class=tokenizer, peft_config=adapter
        )


def fitting(rows: list[dict[str, Any]], tokenizer: Any, model: ModelSection, takes: int | None, new_tokens: int, policy: str) -> list[dict[str, Any]]:
    """The rows that are trained on, of those whose prompts are too long for the model: one takes `takes` tokens, the completion among them.

    `policy` is `data.checks.long_prompts`: drop, warn or fail. Raises DataError to fail.
    """
    if takes is None:
        return rows
    room, long = takes - new_tokens, {}
    for row in rows:
        text = models.render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs)
        # A token is a byte at least: most prompts need not be tokenized to see that they fit.
        if len(text.encode()) > room and (count := len(tokenizer(text)["input_ids"])) > room:
            long[row["id"]] = count
    if not long:
        return rows
    first, count = next(iter(long.items()))
    found = f"{len(long)} of {len(rows)} prompts have more than {room} tokens, the first {first} with {count}; the model takes {takes}, completions included"
    if policy == "fail":
        raise DataError(
            f"{found}: lower grpo.max_new_tokens, which is {new_tokens}, take the prompts out of the data, or set data.checks.long_prompts to drop or warn"
        )
    log.warning("data.checks.long_prompts: %s (%s)", found, "dropped" if policy == "drop" else "kept")
    return [row for row in rows if row["id"] not in long] if policy == "drop" else rows


def _long_prompts(data: Path) -> str:
    """The policy for prompts that are too long, which the data's card hands on: no tokenizer is there when the data are prepared."""
    card = data / "card.json"
    return json.loads(card.read_text(encoding="utf-8"))["long_prompts"] if card.exists() else Checks().long_prompts


def dataset(rows: list[dict[str, Any]], tokenizer: Any, prompts_at_once: int, model: ModelSection) -> Any:
    """A data set of `prompt` (rendered), and of the rows' other columns (`id`, `question`, `gold`, `data.columns`) for the rewards.

    Raises ConfigError where there are fewer prompts than one generation takes: TRL would train no step and say nothing.
    """
    from datasets import Dataset

    if len(rows) < prompts_at_once:
        raise ConfigError(
            f"grpo has {len(rows)} training prompts, and one generation takes {prompts_at_once} "
            "(batch_size x gradient_accumulation_steps x processes / num_generations): lower grpo.batch_size or give more prompts"
        )
    prompts = [models.render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return Dataset.from_dict({"prompt": prompts, **{name: [row.get(name) for row in rows] for name in names}})
