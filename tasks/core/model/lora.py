"""LoRA adapters: the configuration, and the layers that may have one."""

from typing import Any

from configs.errors import ConfigError
from configs.schema import Training


def check_types(section: Training, model: Any) -> None:
    """Raises ConfigError for full fine-tuning of float16 weights: their gradients vanish, and torch refuses to scale them."""
    if not section.use_lora and str(model.dtype) == "torch.float16":
        raise ConfigError(
            "model.dtype is float16 with use_lora false, and float16 weights cannot be trained: set model.dtype to float32 or bfloat16"
        )


def adapter(section: Training, model: Any) -> Any:
    """The LoraConfig of this section, or None for full fine-tuning. Raises ConfigError for layer names that the model does not have."""
    from peft import LoraConfig

    if not section.use_lora:
        return None
    targets = section.lora_target_modules
    if not targets:
        raise ConfigError(
            f"lora_target_modules is {targets!r}, so that no layer would be trained: name layers, write all-linear, or set use_lora to false"
        )
    if targets != "all-linear":
        targets = [targets] if isinstance(targets, str) else targets
        layers = linear_layers(model)
        for name in targets:
            if not any(layer == name or layer.endswith(f".{name}") for layer in layers):
                known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
                raise ConfigError(
                    f"lora_target_modules holds {name!r}, which is no linear layer of this model: choose from {known}, or all-linear"
                )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=targets,
    )


def linear_layers(model: Any) -> list[str]:
    """Dotted names of the linear layers, less the output layer, which cannot have an adapter under TRL."""
    import torch
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not output
    ]
