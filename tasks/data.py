"""The Prefect task that prepares the data."""

from prefect import task
from prefect.states import State

from configs.schema import DataSection
from tasks.core import data
from tasks.stage import RETRIES, Run, Stage, run_stage

VERSION = 1


@task(name="data", task_run_name="data", **RETRIES)
def prepare_data(run: Run, section: DataSection, seed: int) -> State:
    """Demonstrations, training prompts and held-out prompts; redone when the section, the seed or the source's content changes."""
    source = section.model_copy(update={"path": None}).key() | {"content": data.source_digest(section)}
    return run_stage(run, Stage("data", VERSION, {"data": source, "seed": seed}, request={"section": section.model_dump(mode="json"), "seed": seed}))
