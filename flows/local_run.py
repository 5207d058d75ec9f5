"""Runs the pipeline in this process, as a run of its deployment where one is served from this folder: so the page's Retry can go on with it."""

import os
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.flow_engine import run_flow
from prefect.states import Pending, State

from configs.errors import RatchetError
from flows import run_watchdog
from flows.post_train import post_train

DEPLOYMENT = "post-train/post-train"


def run_here(parameters: dict[str, Any]) -> State:
    """The final state of a run of `post_train` with these parameters. Raises RatchetError when the run is cancelled meanwhile."""
    if not os.environ.get("PREFECT_API_URL"):
        return post_train(**parameters, return_state=True)
    deployment = _deployment()
    with get_client(sync_client=True) as client:
        # Pending, not Scheduled: no worker takes it.
        if deployment:
            flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Pending())
        else:
            flow_run = client.create_flow_run(post_train, parameters=parameters, state=Pending())
    run_watchdog.start(flow_run.id)
    try:
        return run_flow(post_train, flow_run=flow_run, parameters=parameters, return_type="state")
    except (TerminationSignal, SystemExit) as error:
        if _was_cancelled(flow_run.id):
            raise RatchetError(f"the run was cancelled: {run_watchdog.GOES_ON}") from error
        raise


def _was_cancelled(flow_run_id: UUID) -> bool:
    """Whether this process was told to end because the run is to be cancelled; then it is Cancelled now, where Prefect called it crashed."""
    with get_client(sync_client=True) as client:
        if not any(state.is_cancelling() for state in client.read_flow_run_states(flow_run_id)):
            return False
        client.set_flow_run_state(flow_run_id, run_watchdog.cancelled(), force=True)
    return True


def _deployment() -> Any:
    """The deployment, if there is one and its worker resolves relative paths as this process does."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            return None
    folders = [values.get("directory") for step in found.pull_steps or [] for values in step.values()]
    return found if os.getcwd() in folders else None
