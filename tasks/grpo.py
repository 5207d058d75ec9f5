"""The Prefect task of group relative policy optimization."""

from prefect import task
from prefect.states import State

from configs.schema import ComputeSection, GRPOSection, ModelSection
from tasks.core.scoring import rewards
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, run_stage
from tasks.sft import loading_key

VERSION = 3


@task(name="grpo", task_run_name="grpo", **RETRIES)
def train_grpo(
    run: Run,
    section: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    sft: Artifact,
    data: Artifact,
) -> State:
    """Trains the policy from the SFT model, which is also its reference."""
    key = {
        "grpo": section.key(),
        "reward_code": rewards.source_digest(section.reward_type, section.reward_config),
        "model": loading_key(model),
        "compute": compute.key(),
        "seed": seed,
    }
    request = {
        "section": section.model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "compute": compute.model_dump(),
        "seed": seed,
    }
    inputs = {"sft": sft, "data": data}
    processes, keep = compute.num_processes, section.save_total_limit
    return run_stage(run, Stage("grpo", VERSION, key, inputs, request, processes=processes, keep_checkpoints=keep))
