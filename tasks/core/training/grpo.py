"""Group relative policy optimization: TRL's GRPOTrainer, started from the SFT model, which is its reference throughout."""

import logging
import time
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.rules import training as rules_training
from configs.schema import ComputeSection, GRPOSection, ModelSection
from tasks.core.model import loading, lora, prompt_lengths
from tasks.core.model.prompts import render_prompt
from tasks.core.storage import jsonl
from tasks.core.training import arguments, loop, saving
from tasks.core.training.context import Context

log = logging.getLogger("ratchet.grpo")


def train(
    section: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    sft: Path,
    data: Path,
    out: Path,
    context: Context,
) -> dict[str, Any]:
    """Trains the SFT model by its rewards and writes the `grpo` artifact to `out`.

    `sft` and `data` are artifacts. Returns {"loss", "reward", "kl_k3", "steps", "seconds", "upload_wait_seconds"}, each curve as its mean over the last tenth
    of the steps; `kl_k3` is TRL's estimate on training rollouts, in nats per token, and is missing where `kl_coef` is 0.
    Raises ConfigError, DataError or ModelError for bad input.
    """
    from tasks.core.tracking.model_files import write_mlmodel

    started = time.monotonic()
    source, work = sft / "model", out.with_name(f"{out.name}.training")
    grpo = build(section, model, compute, seed, source, data, work, context)
    history = loop.run(grpo, context, work)
    saving.save(grpo, history, source, model, out)
    if grpo.is_world_process_zero():
        write_mlmodel(out / "model")
    saving.clear(grpo, work)
    curves = {name: loop.last_tenth(history, name) for name in ("loss", "reward", "kl_k3")}
    return {
        **{name: value for name, value in curves.items() if value is not None},
        "steps": grpo.state.global_step,
        "seconds": time.monotonic() - started,
        "upload_wait_seconds": context.upload_wait_seconds,
    }


def build(
    section: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    source: Path,
    data: Path,
    work: Path,
    context: Context,
) -> Any:
    """The GRPOTrainer that `train` runs. `source` is the folder of the SFT model, with its adapter merged.

    The reference is that model: with a new adapter TRL takes the model with the adapter switched off, for full fine-tuning it loads the folder
    that the policy came from once more, in the same type.
    """
    from trl import GRPOConfig, GRPOTrainer

    from tasks.core.scoring import rewards

    reward = rewards.build(section.reward_type, section.reward_config)
    values = arguments.settings(
        section, rules_training.GRPO_NAMES, compute, seed, work, context.checkpoints is not None
    )
    ours = {"trust_remote_code": model.trust_remote_code, "reward_weights": list(reward.weights.values())}
    args = arguments.arguments("grpo", GRPOConfig, section, {**ours, **values})
    tokenizer = loading.load_tokenizer(source, model)
    policy = loading.load_policy(source, model, compute, for_training=True, lora=section.use_lora)
    lora.check_types(section, policy)
    rows = jsonl.sample(jsonl.read_rows(data / "grpo.jsonl"), section.max_samples, seed)
    rows = prompt_lengths.fitting(
        rows, tokenizer, model, prompt_lengths.takes(policy), args.max_completion_length, prompt_lengths.policy(data)
    )
    questions, adapter = (
        dataset(rows, tokenizer, args.generation_batch_size // args.num_generations, model),
        lora.adapter(section, policy),
    )
    with arguments.trl_values("grpo", section):
        return arguments.with_warmup(GRPOTrainer, "grpo", section)(
            model=policy,
            reward_funcs=reward.functions,
            args=args,
            train_dataset=questions,
            processing_class=tokenizer,
            peft_config=adapter,
        )


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
    prompts = [render_prompt(tokenizer, row["prompt"], model.chat_template_kwargs) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return Dataset.from_dict({"prompt": prompts, **{name: [row.get(name) for row in rows] for name in names}})
