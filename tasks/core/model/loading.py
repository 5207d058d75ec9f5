"""A model and its tokenizer, loaded from a folder and checked."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from configs.errors import ModelError, first_line
from configs.schema import ComputeSection, ModelSection
from tasks.core.model.precision import device, weight_type


def load_policy(
    path: str | Path, section: ModelSection, compute: ComputeSection, for_training: bool, lora: bool = False
) -> Any:
    """The causal language model in the folder `path`. To train: on the CPU, TRL moves it; to measure: on its device, in evaluation mode.

    Raises ModelError for a folder that transformers cannot load, or whose weights are damaged or not all there; ConfigError for a GPU that is not there.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    where = device(compute)
    options: dict[str, Any] = {
        "dtype": weight_type(section, where, for_training, lora),
        "trust_remote_code": section.trust_remote_code,
    }
    if not section.allow_pickle:
        options["use_safetensors"] = True
    if section.attention != "auto":
        options["attn_implementation"] = section.attention
    try:
        # Other shapes are let through here and refused below: transformers would name them in its log alone.
        model, info = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise ModelError(
            f"the weights in {path} cannot be read ({first_line(error)}): a file is damaged or cut short, copy or download it again"
        ) from error
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(
            f"the model in {path} does not load ({first_line(error)}): check model.name, model.attention = {section.attention} "
            f"and model.trust_remote_code = {str(section.trust_remote_code).lower()}"
        ) from error
    _check_weights(path, info)
    return model if for_training else model.to(where).eval()


def _check_weights(path: str | Path, info: dict[str, Any]) -> None:
    """Raises ModelError where transformers has put random numbers for weights; tied ones are not among those that it says are missing."""
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the weights in {path} lack {_first(missing)} of the model that its config.json describes: give the whole model, or correct the file"
        )
    if other := sorted(f"{name} {tuple(saved)} for {tuple(wanted)}" for name, saved, wanted in info["mismatched_keys"]):
        raise ModelError(
            f"the weights in {path} have other shapes than its config.json says in {_first(other)}: give the files of one model"
        )


def _first(names: list[str]) -> str:
    """How many tensors, and the first three of them."""
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'} ({', '.join(names[:3])}{more})"


def load_tokenizer(path: str | Path, section: ModelSection) -> Any:
    """The tokenizer in the folder `path`, with a pad token, a chat template, and padding on the left, as generation needs it.

    Raises ModelError where it does not load, has no end-of-text token, or has no chat template and the configuration gives none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=section.trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"the tokenizer in {path} does not load ({first_line(error)}): check model.name and model.trust_remote_code"
        ) from error
    if section.chat_template is not None:
        tokenizer.chat_template = section.chat_template
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of model.name = {section.name} has no chat template: give a Jinja template in model.chat_template"
        )
    if tokenizer.eos_token is None:
        raise ModelError(
            f"the tokenizer of model.name = {section.name} has no end-of-text token: choose a model that has one, for completions must end"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and those of the model's generation configuration, as TRL has it."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return declared if tokenizer.eos_token_id in declared else [tokenizer.eos_token_id, *declared]
