"""The Prefect task that makes or identifies the base model."""

from prefect import task
from prefect.states import State

from configs.schema import ModelSection
from tasks.core import models
from tasks.stage import RETRIES, Artifact, Run, Stage, run_stage

VERSION = 1


@task(name="base", task_run_name="base", **RETRIES)
def prepare_base(run: Run, section: ModelSection, seed: int, data: Artifact) -> State:
    """A `scratch` model is built on the data's text; a Hub model or local folder is only identified, and stays where it is."""
    scratch = section.name == "scratch"
    key = {"scratch": section.scratch.key(), "seed": seed} if scratch else {"content": models.content_digest(section)}
    request = {"section": section.model_dump(mode="json"), "seed": seed}
    return run_stage(run, Stage("base", VERSION, key, inputs={"data": data} if scratch else {}, request=request))
