"""Rules of the `sft` and `grpo` sections: the names of TRL's fields, and the arithmetic of batches and checkpoints."""

import ast
import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

# The one place where the text's names meet TRL's. `None`: computed from the field rather than passed on.
TRL_NAMES = {
    "learning_rate": "learning_rate",
    "num_epochs": "num_train_epochs",
    "max_steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "warmup_ratio": "warmup_steps",
    "max_grad_norm": "max_grad_norm",
    "save_steps": "save_steps",
    "logging_steps": "logging_steps",
}
SFT_NAMES = TRL_NAMES | {"max_length": "max_length"}
GRPO_NAMES = TRL_NAMES | {
    "num_generations": "num_generations",
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "kl_coef": "beta",
    "clip_range": "epsilon",
    "advantage": "scale_rewards",
}
# TRL fields that other fields of the configuration decide: a value under `trl` would contradict them.
DERIVED = {
    "gradient_checkpointing": "gradient_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "trust_remote_code": "model.trust_remote_code",
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "reward_weights": "reward_config",
    "save_total_limit": "save_total_limit",
    "dataloader_num_workers": "compute.dataloader_workers",
    "seed": "seed",
    "data_seed": "seed",
    "use_cpu": "compute.device",
    "model_init_kwargs": "model",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "chat_template_path": "model.chat_template",
}
# TRL fields that the batch arithmetic uses.
COUNTS = ("steps_per_generation", "num_iterations")
# TRL fields that Ratchet needs for itself.
RESERVED = {
    "assistant_only_loss", "auto_find_batch_size", "completion_only_loss", "dataset_text_field", "deepspeed", "disable_tqdm", "do_eval", "do_train",
    "eval_steps", "eval_strategy", "fsdp", "generation_batch_size", "hub_model_id", "hub_token", "load_best_model_at_end", "logging_strategy",
    "output_dir", "packing", "push_to_hub", "remove_unused_columns", "report_to", "resume_from_checkpoint", "run_name", "save_safetensors",
    "save_strategy", "sync_ref_model", "use_vllm",
}  # fmt: skip


@cache
def trl_fields(kind: str) -> frozenset[str]:
    """Field names of TRL's SFTConfig or GRPOConfig, read from the sources: importing them takes torch and six seconds."""
    trl = Path(importlib.util.find_spec("trl").origin).parent / "trainer"
    transformers = Path(importlib.util.find_spec("transformers").origin).parent
    files = [trl / f"{kind}_config.py", trl / "base_config.py", transformers / "training_args.py"]
    names: set[str] = set()
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                names |= {
                    f.target.id for f in node.body if isinstance(f, ast.AnnAssign) and not f.target.id.startswith("_")
                }
    return frozenset(names)


def trl_names(kind: str, given: dict[str, Any]) -> None:
    """Raises ValueError for a name under `<kind>.trl` that TRL does not have or that a field of the configuration owns, and for a value that is no JSON."""
    for name, value in given.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"{kind}.trl.{name} is {value!r} and must be a text, a finite number, true, false, or a list or mapping of these"
            ) from None
        if name in COUNTS and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            raise ValueError(f"{kind}.trl.{name} is {value!r} and must be a whole number of at least 1")
    owned = {trl: ours for ours, trl in (SFT_NAMES if kind == "sft" else GRPO_NAMES).items()} | DERIVED
    for name in given:
        if name in owned:
            raise ValueError(f"{kind}.trl.{name} is owned by another field: set {owned[name]} instead")
        if name in RESERVED:
            raise ValueError(f"{kind}.trl.{name} is set by Ratchet itself: take it out")
        if name not in trl_fields(kind):
            raise ValueError(
                f"{kind}.trl.{name} is no field of TRL's {kind.upper()}Config: check the spelling or take it out"
            )


def batch_arithmetic(grpo: Any, num_processes: int) -> None:
    """Raises ValueError unless a generation batch holds whole groups; proposes the nearest batch sizes that do."""
    accumulation = grpo.trl.get("steps_per_generation", grpo.gradient_accumulation_steps)
    total = grpo.batch_size * accumulation * num_processes
    if total % grpo.num_generations:
        unit = grpo.num_generations // math.gcd(grpo.num_generations, accumulation * num_processes)
        below, above = grpo.batch_size // unit * unit, -(-grpo.batch_size // unit) * unit
        works = " or ".join(str(n) for n in (below, above) if n)
        raise ValueError(
            f"grpo.batch_size is {grpo.batch_size}: with {accumulation} accumulation steps and {num_processes} processes that is {total} completions a step, "
            f"which must be a multiple of grpo.num_generations = {grpo.num_generations}: set batch_size to {works}"
        )


def save_alignment(grpo: Any) -> None:
    """Raises ValueError unless checkpoints fall on generation boundaries, where alone GRPO resumes exactly."""
    per_generation = grpo.trl.get("steps_per_generation", grpo.gradient_accumulation_steps) * grpo.trl.get(
        "num_iterations", 1
    )
    unit = per_generation // math.gcd(per_generation, grpo.gradient_accumulation_steps)
    if grpo.save_steps % unit:
        above = -(-grpo.save_steps // unit) * unit
        raise ValueError(
            f"grpo.save_steps is {grpo.save_steps} and must be a multiple of {unit}, the steps of one generation: set it to {above}"
        )
