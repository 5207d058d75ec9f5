"""The base model: where it is, and whether it is one."""

import hashlib
import json
from pathlib import Path
from typing import Any

from configs.errors import ModelError
from configs.schema import ModelSection

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLED = ("*.bin", "*.bin.index.json")
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# What can change the model that a folder means; its read-me and its optimizer states cannot.
FILES = ("*.json", "*.jinja", "*.model", "*.txt", *WEIGHTS)


def is_hub_id(name: str) -> bool:
    """Whether `model.name` means the Hub: no folder here, and not written like a path."""
    return name != "scratch" and not Path(name).exists() and name.count("/") <= 1 and name[0] not in "./~"


def check_folder(section: ModelSection, folder: Path) -> None:
    """Raises ModelError unless `folder` holds a configuration, weights that are allowed, and a tokenizer."""
    if not folder.is_dir():
        raise ModelError(
            f"model.name is {section.name}, and there is no such folder: give a model folder, a Hub id or `scratch`"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.name is {section.name}, which holds no config.json: give the folder of a Hugging Face model"
        )
    if not _files(folder, WEIGHTS):
        if not _files(folder, PICKLED):
            raise ModelError(
                f"model.name is {section.name}, which holds no *.safetensors: give a folder with the model's weights"
            )
        if not section.allow_pickle:
            raise ModelError(
                f"model.name is {section.name}, whose weights are pickled: convert them to safetensors, or set model.allow_pickle to true"
            )
    if not any((folder / name).is_file() for name in TOKENIZER):
        raise ModelError(
            f"model.name is {section.name}, which holds no tokenizer ({', '.join(TOKENIZER)}): save the tokenizer into the folder"
        )


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
        from tasks.core.model import scratch

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
