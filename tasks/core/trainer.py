"""What SFT and GRPO share: our fields as TRL's, rows, and how the trained model is saved."""

import json
import math
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import ComputeSection, ModelSection, Training
from tasks.core import models

SCALE_REWARDS = {"mean": "none", "group_std": "group", "batch_std": "batch"}


# ---------------------------------------------------------------- the configuration as TRL's


def settings(section: Training, names: dict[str, str], compute: ComputeSection, seed: int, work: Path, keep_checkpoints: bool) -> dict[str, Any]:
    """The keyword arguments for SFTConfig or GRPOConfig; `names` maps our fields to TRL's. The fields of `trl` come last.

    Raises ConfigError for a precision that the device does not have.
    """
    where = models.device(compute)
    values = {trl: getattr(section, ours) for ours, trl in names.items() if ours != "warmup_ratio"}
    values["max_steps"] = section.max_steps or -1
    if "advantage" in names:
        values["scale_rewards"] = SCALE_REWARDS[section.advantage]
    return {
        **values,
        **precision(section, where),
        "gradient_checkpointing": where == "cuda" if section.gradient_checkpointing == "auto" else section.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "save_strategy": "steps" if keep_checkpoints else "no",
        "save_total_limit": section.save_total_limit,
        "dataloader_num_workers": compute.dataloader_workers,
        "use_cpu": where == "cpu",
        "seed": seed,
        "data_seed": seed,
        "output_dir": str(work),
        "report_to": "none",
        "disable_tqdm": True,
        **section.trl,
    }


def arguments(kind: str, config_class: type, section: Training, values: dict[str, Any]) -> Any:
    """SFTConfig or GRPOConfig made of `values`. Raises ConfigError for a value under `<kind>.trl` that TRL does not take."""
    # TRL looks at no types: a text for a number would fail somewhere in the first step.
    defaults = {field.name: field.default for field in fields(config_class)}
    for name, value in section.trl.items():
        if isinstance(value, str) and type(defaults.get(name)) in (int, float):
            raise ConfigError(f"{kind}.trl.{name} is {value!r}, and TRL takes a number there: write one, without quotes, or take it out")
    with trl_values(kind, section):
        args = config_class(**values)
    # One process takes one GPU: with several in sight transformers would choose DataParallel, which TRL refuses.
    args._n_gpu = min(1, args.n_gpu)
    return args


@contextmanager
def trl_values(kind: str, section: Training) -> Iterator[None]:
    """Turns what TRL or transformers raises inside into a ConfigError that names the fields under `<kind>.trl`, where there are any."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ImportError, OSError) as error:
        if not section.trl:
            raise
        names = ", ".join(section.trl)
        raise ConfigError(f"{kind}.trl ({names}) is refused by TRL ({models.first_line(error)}): correct these values or take them out") from error


def precision(section: Training, where: str) -> dict[str, bool]:
    """`bf16` and `fp16` of TrainingArguments. Raises ConfigError for a type that the device does not have."""
    wanted = section.mixed_precision
    if wanted == "auto":
        wanted = "bf16" if models.has_bf16(where) else "no"
    elif wanted == "fp16" and where == "cpu":
        raise ConfigError("mixed_precision is fp16, which needs a GPU, and this run is on a CPU: set it to bf16, no or auto")
    elif wanted == "bf16" and where == "cuda" and not models.has_bf16(where):
        raise ConfigError("mixed_precision is bf16, which this GPU does not compute in: set it to fp16, no or auto")
    return {"bf16": wanted == "bf16", "fp16": wanted == "fp16"}


def check_types(section: Training, model: Any) -> None:
    """Raises ConfigError for full fine-tuning of float16 weights: their gradients vanish, and torch refuses to scale them."""
    if not section.use_lora and str(model.dtype) == "torch.float16":
        raise ConfigError("model.dtype is float16 with use_lora false, and float16 weights cannot be trained: set model.dtype to float32 or bfloat16")


def adapter(section: Training, model: Any) -> Any:
    """The LoraConfig of this section, or None for full fine-tuning. Raises ConfigError for layer names that the model does not have."""
    from peft import LoraConfig

    if not section.use_lora:
        return None
    targets = section.lora_target_modules
    if not targets:
        raise ConfigError(f"lora_target_modules is {targets!r}, so that no layer would be trained: name layers, write all-linear, or set use_lora to false")
    if targets != "all-linear":
        targets = [targets] if isinstance(targets, str) else targets
        layers = linear_layers(model)
        for name in targets:
            if not any(layer == name or layer.endswith(f".{name}") for layer in layers):
                known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
                raise ConfigError(f"lora_target_modules holds {name!r}, which is no linear layer of this model: choose from {known}, or all-linear")
    return LoraConfig(task_type="CAUSAL_LM", r=section.lora_rank, lora_alpha=section.lora_alpha, lora_dropout=section.lora_dropout, target_modules=targets)


def linear_layers(model: Any) -> list[str]:
    """Dotted names of the linear layers, less the output layer, which cannot have an adapter under TRL."""
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not output]


def with_warmup(trainer_class: type, kind: str, section: Training) -> type:
    """`trainer_class` with a warm-up over `warmup_ratio` of its real number of optimizer steps, which it alone knows, rounded up.

    Its optimizer and schedule are made when training begins: values under `<kind>.trl` that these refuse raise ConfigError.
    """

    class WithWarmup(trainer_class):
        def create_optimizer(self, *args, **kwargs):
            with trl_values(kind, section):
                return super().create_optimizer(*args, **kwargs)

        def create_scheduler(self, num_training_steps, *args, **kwargs):
            # Rounded first: 0.1 * 30 is a little more than 3.
            self.args.warmup_steps = math.ceil(round(section.warmup_ratio * num_training_steps, 6))
            with trl_values(kind, section):
                return super().create_scheduler(num_training_steps, *args, **kwargs)

    return WithWarmup


# ---------------------------------------------------------------- rows


def each_row(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file, one at a time."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            if line != "\n":
                yield json.loads(line)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return list(each_row(path))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes JSON Lines: UTF-8, sorted keys, one object a line; the same rows give the same bytes."""
    text = "".join(json.dumps(row, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


def sample(rows: list[Any], most: int | None, seed: int) -> list[Any]:
    """The first `most` rows after a seeded shuffle; all of them, in their order, where `most` is None."""
    if most is None:
        return rows
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    return [rows[i] for i in order[:most]]


# ---------------------------------------------------------------- what is saved


def save(trainer: Any, history: list[dict[str, Any]], source: str | Path, section: ModelSection, out: Path) -> None:
    """Writes `history.jsonl`, `model/` (the adapter merged, loadable by plain from_pretrained) and `adapter/`. Every rank calls it."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        out.mkdir(parents=True, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "merge_and_unload"):
            _save_adapter(model, out / "adapter")
            model = model.merge_and_unload(safe_merge=True)
        # Training with gradient checkpointing may leave the cache off, which would make whoever generates from the folder wait.
        model.config.use_cache = True
        model.save_pretrained(out / "model")
        # A fresh one: the trainer's remembers the padding of its last call and would write it down.
        models.load_tokenizer(source, section).save_pretrained(out / "model")
        write_rows(out / "history.jsonl", history)
    trainer.accelerator.wait_for_everyone()


def _save_adapter(model: Any, folder: Path) -> None:
    # A path of this machine has no place in an artifact: equal runs elsewhere must give equal bytes.
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_config.json"
    values = json.loads(file.read_text())
    # PEFT keeps the layer names in a set, whose order changes with the hash seed.
    values["target_modules"] = sorted(values["target_modules"])
    values["base_model_name_or_path"] = None
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def clear(trainer: Any, work: Path) -> None:
    """Removes the working folder, once every rank is done with it."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        shutil.rmtree(work, ignore_errors=True)
