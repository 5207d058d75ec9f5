"""The Prefect task that prepares the data."""

from prefect import task
from prefect.states import State

from configs.schema import DataSection, GRPOSection
from tasks.core import data
from tasks.stage import RETRIES, Run, Stage, run_stage

VERSION = 2


@task(name="data", task_run_name="data", **RETRIES)
def prepare_data(run: Run, section: DataSection, grpo: GRPOSection, seed: int) -> State:
    """Demonstrations, training prompts and held-out prompts; redone when the section, the seed or the source's content changes.

    The reward is audited on them, and is no part of the key.
    """
    source = section.model_copy(update={"path": None}).key() | {"content": data.source_digest(section)}
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    request = {"section": section.model_dump(mode="json"), "seed": seed, "reward": reward}
    return run_stage(run, Stage("data", VERSION, {"data": source, "seed": seed}, request=request))
