"""Turns a Hugging Face folder into an MLflow model, in place."""

import json
import shutil
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from configs.errors import ModelError

REQUIREMENTS = ("mlflow", "torch", "transformers", "accelerate")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Files that a tokenizer does not need: those of MLflow, and the weights.
NOT_TOKENIZER = (
    "MLmodel",
    "requirements.txt",
    "conda.yaml",
    "python_env.yaml",
    "generation_config.json",
    "*.safetensors",
    "*.bin",
    "*.index.json",
)


def write_mlmodel(folder: Path) -> None:
    """Adds MLflow's files to a flat Hugging Face folder, without loading or copying the weights.

    The folder then loads with from_pretrained, mlflow.transformers.load_model and mlflow.pyfunc.load_model (chat).
    Equal folders get equal files, because the files contain no time, id or path. Raises ModelError if config.json or
    the weights are missing.
    """
    import yaml

    if not (folder / "config.json").is_file() or not any(p for pattern in WEIGHTS for p in folder.glob(pattern)):
        raise ModelError(f"{folder} is not a Hugging Face model: it must contain config.json and safetensors weights")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # MLflow looks for the tokenizer only there. These are the only files that exist twice.
    tokenizer = folder / "components" / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and not any(file.match(pattern) for pattern in NOT_TOKENIZER):
            shutil.copyfile(file, tokenizer / file.name)
    requirements = [f"{name}=={installed(name).split('+')[0]}" for name in REQUIREMENTS]
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    files = {"python_env.yaml": _python_env(), "conda.yaml": _conda(requirements), "MLmodel": _mlmodel(config)}
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=True), encoding="utf-8")


def _python() -> str:
    import platform

    return platform.python_version()


def _python_env() -> dict[str, Any]:
    return {"python": _python(), "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}


def _conda(requirements: list[str]) -> dict[str, Any]:
    return {
        "name": "mlflow-env",
        "channels": ["conda-forge"],
        "dependencies": [f"python={_python()}", "pip", {"pip": requirements}],
    }


def _mlmodel(config: dict[str, Any]) -> dict[str, Any]:
    from mlflow.models import ModelSignature
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    transformers = {
        "task": "text-generation",
        "inference_task": "llm/v1/chat",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": config["architectures"][0],
        "model_binary": ".",
        "source_model_name": "",
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        "torch_dtype": f"torch.{config.get('dtype') or config.get('torch_dtype') or 'float32'}",
        "code": None,
    }
    pyfunc = {
        "loader_module": "mlflow.transformers",
        "python_version": _python(),
        "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
        "code": None,
    }
    return {
        "flavors": {"transformers": transformers, "python_function": pyfunc},
        "metadata": {"task": "llm/v1/chat"},
        "mlflow_version": installed("mlflow"),
        "signature": ModelSignature(inputs=CHAT_MODEL_INPUT_SCHEMA, outputs=CHAT_MODEL_OUTPUT_SCHEMA).to_dict(),
        "is_signature_from_type_hint": False,
        "type_hint_from_example": False,
    }
