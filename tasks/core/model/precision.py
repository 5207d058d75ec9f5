"""The device, the type of the weights, and the precision of training."""

from typing import Any

from configs.errors import ConfigError
from configs.schema import ComputeSection, ModelSection, Training


def device(compute: ComputeSection) -> str:
    """`cuda` or `cpu`. Raises ConfigError where a GPU is asked for and there is none."""
    import torch

    if compute.device == "cpu" or torch.cuda.is_available():
        return "cpu" if compute.device == "cpu" else "cuda"
    if compute.device == "cuda":
        raise ConfigError("compute.device is cuda, and torch sees no GPU on this machine: set it to cpu or auto")
    return "cpu"


def has_bf16(where: str) -> bool:
    """Whether bfloat16 is worth using on this device by itself: a GPU that computes in it natively."""
    import torch

    return where == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def weight_type(section: ModelSection, where: str, for_training: bool, lora: bool) -> Any:
    """The `dtype` to load weights with; never left to transformers 5, whose default is whatever the checkpoint holds.

    `model.dtype: auto` is float32 on a CPU and for full fine-tuning, bfloat16 for LoRA on a GPU that has it; a model that is
    only measured on a GPU keeps the type it was saved in, so that what is judged is what is stored.
    """
    import torch

    if section.dtype != "auto":
        return getattr(torch, section.dtype)
    if where == "cuda" and not for_training:
        return "auto"
    return torch.bfloat16 if lora and has_bf16(where) else torch.float32


def precision(section: Training, where: str) -> dict[str, bool]:
    """`bf16` and `fp16` of TrainingArguments. Raises ConfigError for a type that the device does not have."""
    wanted = section.mixed_precision
    if wanted == "auto":
        wanted = "bf16" if has_bf16(where) else "no"
    elif wanted == "fp16" and where == "cpu":
        raise ConfigError(
            "mixed_precision is fp16, which needs a GPU, and this run is on a CPU: set it to bf16, no or auto"
        )
    elif wanted == "bf16" and where == "cuda" and not has_bf16(where):
        raise ConfigError("mixed_precision is bf16, which this GPU does not compute in: set it to fp16, no or auto")
    return {"bf16": wanted == "bf16", "fp16": wanted == "fp16"}
