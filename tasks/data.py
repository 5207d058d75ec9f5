"""The Prefect task that prepares the data."""

import tempfile
from pathlib import Path

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.exceptions import PrefectException
from prefect.states import State

from configs.schema import DataSection, GRPOSection
from tasks.core import data
from tasks.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 3


@task(name="data", task_run_name="data", **RETRIES)
def prepare_data(run: Run, section: DataSection, grpo: GRPOSection, seed: int) -> State:
    """Demonstrations, training prompts and held-out prompts; redone when the section, the seed or the source's content changes.

    The reward is audited on them, and is no part of the key. The data set's card is shown in Prefect.
    """
    source = section.model_copy(update={"path": None}).key() | {"content": data.source_digest(section)}
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    request = {"section": section.model_dump(mode="json"), "seed": seed, "reward": reward}
    state = run_stage(run, Stage("data", VERSION, {"data": source, "seed": seed}, request=request))
    _show_card(run, state.data)
    return state


def _show_card(run: Run, artifact: Artifact) -> None:
    """The card as a markdown artifact; a Prefect server that is away costs the artifact and never the work."""
    with tempfile.TemporaryDirectory(prefix="ratchet-card-") as folder:
        card = fetch(run, artifact, Path(folder), only=lambda path: path == "card.md") / "card.md"
        text = card.read_text(encoding="utf-8")
    try:
        create_markdown_artifact(text, key="data-card", description="What the data set holds, and what its checks found")
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().debug("the card of the data is not shown: %s", error)
