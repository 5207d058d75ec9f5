"""The Prefect task that prepares the data."""

import tempfile
from pathlib import Path

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.states import State

from configs.schema import DataSection, GRPOSection
from tasks.core.data import prepare
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 3


@task(name="data", task_run_name="data", **RETRIES)
def prepare_data(run: Run, section: DataSection, grpo: GRPOSection, seed: int) -> State:
    """Prepares demonstrations, training prompts and held-out prompts, and shows the data card in Prefect.

    The stage is redone when the section, the seed or the content of the source changes. The child process also audits
    the reward of `grpo` on the prompts; the reward is not part of the stage key.
    """
    source = section.model_copy(update={"path": None}).key() | {"content": prepare.source_digest(section)}
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    request = {"section": section.model_dump(mode="json"), "seed": seed, "reward": reward}
    state = run_stage(run, Stage("data", VERSION, {"data": source, "seed": seed}, request=request))
    _show_card(run, state.data)
    return state


def _show_card(run: Run, artifact: Artifact) -> None:
    """Creates the artifact `data-card` of the flow run. The task does not fail if the Prefect server is away."""
    with tempfile.TemporaryDirectory(prefix="ratchet-card-") as folder:
        fetch(run, artifact, Path(folder), only=lambda path: path == "card.md")
        text = (Path(folder) / "card.md").read_text(encoding="utf-8")
    description = "What the dataset holds, and what its checks found"
    try:
        create_markdown_artifact(text, key="data-card", description=description)
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().debug("the data card is not shown: %s", error)
