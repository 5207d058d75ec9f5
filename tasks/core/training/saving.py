"""How a trained model is saved: history, merged model and adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

from configs.schema import ModelSection
from tasks.core.model import loading
from tasks.core.storage.jsonl import write_rows


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
        loading.load_tokenizer(source, section).save_pretrained(out / "model")
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
