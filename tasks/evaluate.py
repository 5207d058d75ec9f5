"""The Prefect task that measures a model on the held-out prompts."""

from prefect import task
from prefect.states import State

from configs.data import ROW_FIELDS
from configs.schema import ComputeSection, DataSection, EvaluationSection, GRPOSection, ModelSection
from tasks.core.evaluation import sets
from tasks.core.scoring import rewards
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, run_stage
from tasks.sft import loading_key

VERSION = 4


@task(name="evaluate", task_run_name="evaluate {role}", **RETRIES)
def evaluate(
    run: Run,
    role: str,
    section: EvaluationSection,
    grpo: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    source: DataSection,
    data: Artifact,
    policy: Artifact,
    reference: Artifact | None = None,
) -> State:
    """Accuracy, reward, lengths, errors and pass@k of a policy on every set, and its KL to the reference, if given.

    The reward is GRPO's.
    """
    section = section.model_copy(update={"max_new_tokens": section.max_new_tokens or grpo.max_new_tokens})
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    key = {
        "evaluation": section.key(),
        **reward,
        "reward_code": rewards.source_digest(grpo.reward_type, grpo.reward_config),
        "model": loading_key(model),
        "device": compute.device,
        "seed": seed,
    }
    request = {
        "section": section.model_dump(mode="json"),
        **reward,
        "model": model.model_dump(mode="json"),
        "compute": compute.model_dump(),
        "seed": seed,
        "policy": policy.stage,
        "reference": reference.stage if reference else None,
    }
    if files := sets.digests(section.sets):
        columns = source.model_dump(mode="json", include=ROW_FIELDS)
        key |= {"files": files, "asked": columns}
        request |= {"source": columns}
    inputs = {"data": data, policy.stage: policy} | ({reference.stage: reference} if reference else {})
    return run_stage(run, Stage(f"evaluate_{role}", VERSION, key, inputs, request))
