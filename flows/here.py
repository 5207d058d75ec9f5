"""Runs the pipeline in this process, as a run of its deployment where one is served from this folder: so the page's Retry can go on with it."""

import os
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.states import Pending, State

from flows.post_train import post_train

DEPLOYMENT = "post-train/post-train"


def run_here(parameters: dict[str, Any]) -> State:
    """The final state of a run of `post_train` with these parameters."""
    deployment = _deployment()
    if deployment is None:
        return post_train(**parameters, return_state=True)
    with get_client(sync_client=True) as client:
        # Pending, not Scheduled: no worker takes it.
        flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Pending())
    return run_flow(post_train, flow_run=flow_run, parameters=parameters, return_type="state")


def _deployment() -> Any:
    """The deployment, if there is one and its worker resolves relative paths as this process does."""
    if not os.environ.get("PREFECT_API_URL"):
        return None
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            return None
    folders = [values.get("directory") for step in found.pull_steps or [] for values in step.values()]
    return found if os.getcwd() in folders else None
