"""The Prefect task of supervised fine-tuning."""

from prefect import task
from prefect.states import State

from configs.schema import ComputeSection, GRPOSection, ModelSection, SFTSection
from tasks.stage import RETRIES, Artifact, Run, Stage, run_stage

VERSION = 1


@task(name="sft", task_run_name="sft", **RETRIES)
def train_sft(
    run: Run, section: SFTSection, grpo: GRPOSection, model: ModelSection, compute: ComputeSection, seed: int, base: Artifact, data: Artifact
) -> State:
    """Fine-tunes the base model on the demonstrations and merges the adapter; prompts that GRPO would refuse are refused before, and are no part of the key."""
    key = {"sft": section.key(), "model": loading(model), "compute": compute.key(), "seed": seed}
    request = {"section": section.model_dump(mode="json"), "model": model.model_dump(mode="json"), "compute": compute.model_dump(), "seed": seed}
    request |= {"grpo": grpo.model_dump(mode="json")}
    inputs = {"base": base, "data": data}
    return run_stage(run, Stage("sft", VERSION, key, inputs, request, processes=compute.num_processes, keep_checkpoints=section.save_total_limit))


def loading(model: ModelSection) -> dict:
    """What of the model section matters beside the weights, whose digest is an input: how they are loaded and prompted."""
    fields = ("dtype", "attention", "chat_template", "chat_template_kwargs")
    return {name: value for name, value in model.key().items() if name in fields}
