"""A model of a few thousand weights with its data, for tests that train; and rewards that tell random completions apart."""

import json
from pathlib import Path

from configs.schema import ComputeSection, ModelSection
from tasks.core.model.location import build_base
from tasks.core.storage.checkpoints import Checkpoints
from tasks.core.storage.store import open_store
from tasks.core.training.context import Context

MODEL = ModelSection(
    name="scratch",
    scratch={
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "vocab_size": 300,
    },
)
# The preset `tiny`, made smaller still: a pipeline of seconds, for tests that add how it is trained.
RUN = {
    "model.scratch": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
    },
    "data.arithmetic.demonstrations": 200,
    "data.test_size": 16,
    "data.validation_size": 8,
}
# The stages of a pipeline run, in their order.
STAGES = ["data", "base", "evaluate_base", "sft", "evaluate_sft", "grpo", "evaluate_grpo", "judge", "register"]
CPU = ComputeSection(device="cpu")
SUMS = [(a, b) for a in range(1, 5) for b in range(1, 7)]


def checksum(completions, **columns):
    """0 to 1 by the characters of the completion: almost no two random completions of a group are worth the same."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def brevity(completions, **columns):
    """1 for an empty completion, less with every character."""
    return [1 / (1 + len(text)) for text in completions]


def worked_example(completions, **columns):
    """The text's four rewards, for groups of four."""
    return [1.0, 1.0, 0.0, 0.8] * (len(completions) // 4)


def write_data(folder: Path) -> Path:
    """A `data` artifact of 24 sums; all files hold the same ones, for nothing is judged here."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [{"id": f"sum-{a}-{b}", "prompt": [{"role": "user", "content": f"{a} + {b} = ?"}]} for a, b in SUMS]
    questions = [
        {**row, "question": f"{a} + {b} = ?", "gold": str(a + b)} for row, (a, b) in zip(asked, SUMS, strict=True)
    ]
    answers = [
        {**row, "completion": f"{a} + {b} = {a + b}. Final Answer: {a + b}"}
        for row, (a, b) in zip(asked, SUMS, strict=True)
    ]
    for name, rows in {"sft": answers, "grpo": questions, "validation": questions, "test": questions}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    return folder


def build(folder: Path, seed: int = 1, model: ModelSection = MODEL) -> tuple[Path, Path]:
    """(data artifact, base artifact). The base serves as an SFT artifact as well: its model is in `model/`."""
    data, base = write_data(folder / "data"), folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    build_base(model, data, seed, base)
    return data, base


def checkpoints(folder: Path) -> Checkpoints:
    """Checkpoints of one stage in a plain directory."""
    return Checkpoints(open_store(folder.as_uri()), folder.with_name(f"{folder.name}.disk"), "stage", "key", keep=10)


def context(emit=lambda **event: None, checkpoints=None) -> Context:
    """What a stage may use, with nothing behind it unless given."""
    return Context(emit=emit, checkpoints=checkpoints)
