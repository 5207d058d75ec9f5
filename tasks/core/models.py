"""The base model: where it is, whether it is one, how it is loaded, and the one function that renders prompts."""

import hashlib
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from configs.errors import ConfigError, ModelError
from configs.schema import ComputeSection, ModelSection

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("*.bin", "*.bin.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# What can change the model that a folder means; its read-me and its optimizer states cannot.
FILES = ("*.json", "*.jinja", "*.model", "*.txt", *WEIGHTS)


# ---------------------------------------------------------------- where it is


def is_hub_id(name: str) -> bool:
    """Whether `model.name` means the Hub: no folder here, and not written like a path."""
    return name != "scratch" and not Path(name).exists() and name.count("/") <= 1 and name[0] not in "./~"


def check_folder(section: ModelSection, folder: Path) -> None:
    """Raises ModelError unless `folder` holds a configuration, weights that are allowed, and a tokenizer."""
    if not folder.is_dir():
        raise ModelError(f"model.name is {section.name}, and there is no such folder: give a model folder, a Hub id or `scratch`")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.name is {section.name}, which holds no config.json: give the folder of a Hugging Face model")
    if not _files(folder, WEIGHTS):
        if not _files(folder, PICKLED):
            raise ModelError(f"model.name is {section.name}, which holds no *.safetensors: give a folder with the model's weights")
        if not section.allow_pickle:
            raise ModelError(f"model.name is {section.name}, whose weights are pickled: convert them to safetensors, or set model.allow_pickle to true")
    if not any((folder / name).is_file() for name in TOKENIZER):
        raise ModelError(f"model.name is {section.name}, which holds no tokenizer ({', '.join(TOKENIZER)}): save the tokenizer into the folder")


def content_digest(section: ModelSection) -> str:
    """What a base stage's key says about a model from outside: "" (scratch), `name@revision` (Hub), SHA-256 of the files that matter (folder).

    Imports no torch. Raises ModelError for a folder that is no model.
    """
    if section.name == "scratch":
        return ""
    if is_hub_id(section.name):
        return f"{section.name}@{section.revision or 'main'}"
    folder = Path(section.name).expanduser()
    check_folder(section, folder)
    patterns = FILES + (PICKLED if section.allow_pickle else ()) + (("*.py",) if section.trust_remote_code else ())
    total = hashlib.sha256()
    for file in _files(folder, patterns):
        with file.open("rb") as content:
            total.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def build_base(section: ModelSection, data: Path | None, seed: int, out: Path) -> dict[str, Any]:
    """Makes the `base` artifact in `out`: a whole tiny model for `scratch`, otherwise `source.json`, which says where the model is.

    `data` is the data artifact, whose demonstrations train the tokenizer of a scratch model; no other model needs it. Returns the stage's metrics.
    Raises ModelError for a model that is not one or that the Hub does not give.
    """
    if section.name == "scratch":
        from tasks.core import scratch

        return scratch.build(section.scratch, data / "sft.jsonl", seed, out / "model")
    if is_hub_id(section.name):
        folder = _from_hub(section, section.revision)
        # The Hub keeps each commit in a folder of its name: `main` today is written down as the commit that it was.
        source = {"name": section.name, "revision": folder.name}
    else:
        source = {"sha256": content_digest(section)}
    (out / "source.json").write_text(json.dumps(source, sort_keys=True) + "\n")
    return {}


def locate(section: ModelSection, base: Path) -> str:
    """The folder to load the base model from, given its artifact; a Hub model is fetched at the commit that the artifact names, unless it is here."""
    if section.name == "scratch":
        return str(base / "model")
    if is_hub_id(section.name):
        return str(_from_hub(section, json.loads((base / "source.json").read_text())["revision"]))
    folder = Path(section.name).expanduser()
    check_folder(section, folder)
    return str(folder)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _from_hub(section: ModelSection, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*FILES, *(PICKLED if section.allow_pickle else ()), *(("*.py",) if section.trust_remote_code else ())]
    try:
        # The library's errors for no network, no such model and no such revision have OSError or ValueError above them.
        folder = Path(snapshot_download(section.name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.name is {section.name}, which is no folder here, and the Hub does not give it at revision {revision or 'main'} "
            f"({type(error).__name__}): check the id and the network, or give a local folder"
        ) from error
    check_folder(section, folder)
    return folder


# ---------------------------------------------------------------- how it is loaded


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


def load_policy(path: str | Path, section: ModelSection, compute: ComputeSection, for_training: bool, lora: bool = False) -> Any:
    """The causal language model in the folder `path`. To train: on the CPU, TRL moves it; to measure: on its device, in evaluation mode.

    Raises ModelError for a folder that transformers cannot load, or whose weights are damaged or not all there; ConfigError for a GPU that is not there.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    where = device(compute)
    options: dict[str, Any] = {"dtype": weight_type(section, where, for_training, lora), "trust_remote_code": section.trust_remote_code}
    if not section.allow_pickle:
        options["use_safetensors"] = True
    if section.attention != "auto":
        options["attn_implementation"] = section.attention
    try:
        # Other shapes are let through here and refused below: transformers would name them in its log alone.
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except (SafetensorError, UnpicklingError, EOFError) as error:
        raise ModelError(f"the weights in {path} cannot be read ({first_line(error)}): a file is damaged or cut short, copy or download it again") from error
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
        raise ModelError(f"the weights in {path} lack {_first(missing)} of the model that its config.json describes: give the whole model, or correct the file")
    if other := sorted(f"{name} {tuple(saved)} for {tuple(wanted)}" for name, saved, wanted in info["mismatched_keys"]):
        raise ModelError(f"the weights in {path} have other shapes than its config.json says in {_first(other)}: give the files of one model")


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
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=section.trust_remote_code, padding_side="left")
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(f"the tokenizer in {path} does not load ({first_line(error)}): check model.name and model.trust_remote_code") from error
    if section.chat_template is not None:
        tokenizer.chat_template = section.chat_template
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer of model.name = {section.name} has no chat template: give a Jinja template in model.chat_template")
    if tokenizer.eos_token is None:
        raise ModelError(f"the tokenizer of model.name = {section.name} has no end-of-text token: choose a model that has one, for completions must end")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def render_prompt(tokenizer: Any, messages: list[dict[str, str]], chat_template_kwargs: dict[str, Any]) -> str:
    """The text of a prompt, up to where the answer begins: the same for SFT, GRPO and evaluation.

    The result is tokenized as it is. A begin-of-text token that the template writes and the tokenizer adds once more is taken out here.
    Raises ModelError where the template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **chat_template_kwargs)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ModelError(f"the chat template refuses messages of {roles} ({first_line(error)}): change model.chat_template or data.system_prompt") from error
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id:
        return text[len(bos) :]
    return text


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and those of the model's generation configuration, as TRL has it."""
    declared = model.generation_config.eos_token_id
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    return declared if tokenizer.eos_token_id in declared else [tokenizer.eos_token_id, *declared]


def first_line(error: BaseException) -> str:
    """What a library says went wrong, in a form that fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Some libraries only announce the reason in the first line.
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text.rstrip(".")[:200]
