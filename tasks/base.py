"""The Prefect task that builds or identifies the base model."""

from prefect import task
from prefect.states import State

from configs.schema import ModelSection
from tasks.core.model import location
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, run_stage

VERSION = 1


@task(name="base", task_run_name="base", **RETRIES)
def prepare_base(run: Run, section: ModelSection, seed: int, data: Artifact) -> State:
    """Builds a `scratch` model from the text of the data. Identifies a Hub model or a folder without copying it."""
    request = {"section": section.model_dump(mode="json"), "seed": seed}
    if section.name == "scratch":
        key = {"scratch": section.scratch.key(), "seed": seed}
        return run_stage(run, Stage("base", VERSION, key, inputs={"data": data}, request=request))
    return run_stage(run, Stage("base", VERSION, {"content": location.content_digest(section)}, request=request))
