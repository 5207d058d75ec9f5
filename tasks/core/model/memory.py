"""What a run will take: parameters, and an estimate of the memory at its peak, from the model's configuration alone."""

from pathlib import Path
from typing import Any

from configs.errors import ModelError, first_line
from configs.schema import ModelSection, RunConfig, Training
from tasks.core.model import location, lora, precision, scratch

PROMPT_TOKENS = 256  # what a prompt is taken to have; the data is not read here
PROCESS_BYTES = 1_000_000_000  # interpreter, torch and the libraries, before any weight
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


def estimate(config: RunConfig) -> dict[str, Any]:
    """{"parameters": int, "sft": {"trainable": int, "peak_bytes": int}, "grpo": {...}}, per process; and "takes", the tokens of its context.

    peak = process + weights + reference + training state + max(activations, rollout cache), with P parameters of w bytes, T trainable ones,
    L layers of hidden size H and MLP size I, K key and value heads of size D, b rows of s tokens:
      weights         P w
      reference       P w for full fine-tuning with kl_coef > 0 (with LoRA it is the policy with its adapter off)
      training state  T (4 + 8): gradients and Adam's two moments in float32
      activations     b s L (10 H + 4 I) a, with a bytes each (2 in mixed precision, else w); with gradient checkpointing b s (L H + 10 H + 4 I) a.
                      10 H: norms, query, key, value, attention's output and the residual stream, as autograd keeps them; 4 I: gate, up, their
                      product and the activation function. Attention is taken to be fused, and the logits are made in blocks (TRL's fused head).
      rollout cache   B s L 2 K D w, with B completions of one generation (GRPO)
    s is sft.max_length, or 256 for the prompt + grpo.max_new_tokens. A rough estimate. Raises ModelError for no model, ConfigError for bad sizes.
    """
    architecture = _architecture(config.model)
    model = _on_meta(architecture, config.model)
    parameters = model.num_parameters()
    where = precision.device(config.compute)
    result: dict[str, Any] = {
        "parameters": parameters,
        "device": where,
        "takes": getattr(architecture.get_text_config(), "max_position_embeddings", None),
    }
    for name, section in {"sft": config.sft, "grpo": config.grpo}.items():
        trainable = _adapter_parameters(model, section) if section.use_lora else parameters
        width = _weight_bytes(config.model, where, section.use_lora)
        total = PROCESS_BYTES + parameters * width + trainable * 12
        if name == "grpo" and not section.use_lora and section.kl_coef > 0:
            total += parameters * width
        total += max(_activations(architecture, section, where, width), _cache(architecture, section, width))
        result[name] = {"trainable": trainable, "peak_bytes": int(total)}
    return result


def _architecture(section: ModelSection) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if section.name == "scratch":
        return scratch.model_config(section.scratch, section.scratch.vocab_size)
    if not location.is_hub_id(section.name):
        location.check_folder(section, Path(section.name).expanduser())
    try:
        return AutoConfig.from_pretrained(Path(section.name).expanduser() if Path(section.name).exists() else section.name, revision=section.revision,
                                          trust_remote_code=section.trust_remote_code)  # fmt: skip
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        why = first_line(error)
        raise ModelError(
            f"model.name is {section.name}, whose configuration cannot be read ({why}): check the id and the network"
        ) from error


def _on_meta(architecture: Any, section: ModelSection) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, trust_remote_code=section.trust_remote_code)


def _adapter_parameters(model: Any, section: Training) -> int:
    """rank x (inputs + outputs) of every layer that gets an adapter."""
    targets = section.lora_target_modules
    names = [targets] if isinstance(targets, str) else targets
    chosen = [
        n
        for n in lora.linear_layers(model)
        if targets == "all-linear" or any(n == t or n.endswith(f".{t}") for t in names)
    ]
    return sum(section.lora_rank * sum(model.get_submodule(name).weight.shape) for name in chosen)


def _weight_bytes(section: ModelSection, where: str, lora: bool) -> int:
    return WIDTH[str(precision.weight_type(section, where, for_training=True, lora=lora)).removeprefix("torch.")]


def _tokens(section: Training) -> int:
    return section.max_length if hasattr(section, "max_length") else PROMPT_TOKENS + section.max_new_tokens


def _activations(architecture: Any, section: Training, where: str, width: int) -> int:
    text = architecture.get_text_config()
    layer = 10 * text.hidden_size + 4 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    checkpointing = where == "cuda" if section.gradient_checkpointing == "auto" else section.gradient_checkpointing
    layers = text.num_hidden_layers
    values = layers * text.hidden_size + layer if checkpointing else layers * layer
    size = 2 if any(precision.precision(section, where).values()) else width
    return section.batch_size * _tokens(section) * values * size


def _cache(architecture: Any, section: Training, width: int) -> int:
    if not hasattr(section, "num_generations"):
        return 0
    text = architecture.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    completions = section.batch_size * section.trl.get("steps_per_generation", section.gradient_accumulation_steps)
    return completions * _tokens(section) * text.num_hidden_layers * 2 * heads * head * width
