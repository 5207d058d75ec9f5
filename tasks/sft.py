"""The Prefect task of supervised fine-tuning."""

from typing import Any

from prefect import task
from prefect.states import State

from configs.schema import ComputeSection, GRPOSection, ModelSection, SFTSection
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, run_stage

VERSION = 1


@task(name="sft", task_run_name="sft", **RETRIES)
def train_sft(
    run: Run,
    section: SFTSection,
    grpo: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    base: Artifact,
    data: Artifact,
) -> State:
    """Fine-tunes the base model on the demonstrations and merges the adapter into it.

    The child process first checks that GRPO can use the prompts; `grpo` is not part of the stage key.
    """
    key = {"sft": section.key(), "model": loading_key(model), "compute": compute.key(), "seed": seed}
    request = {
        "section": section.model_dump(mode="json"),
        "grpo": grpo.model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "compute": compute.model_dump(),
        "seed": seed,
    }
    inputs = {"base": base, "data": data}
    processes, keep = compute.num_processes, section.save_total_limit
    return run_stage(run, Stage("sft", VERSION, key, inputs, request, processes=processes, keep_checkpoints=keep))


def loading_key(model: ModelSection) -> dict[str, Any]:
    """The fields of the model section that change a result, given the weights: how they are loaded and prompted."""
    fields = ("dtype", "attention", "chat_template", "chat_template_kwargs")
    return {name: value for name, value in model.key().items() if name in fields}
