"""Runs the pipeline in this process, for `ratchet run`.

The run belongs to the deployment `post-train` if a worker serves it from this folder, so Retry in the UI works on it.
"""

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


def run_in_this_process(parameters: dict[str, Any]) -> State:
    """The final state of a run of `post_train` with these parameters. Raises RatchetError if the run is cancelled."""
    if not os.environ.get("PREFECT_API_URL"):
        return post_train(**parameters, return_state=True)
    deployment = _served_deployment()
    with get_client(sync_client=True) as client:
        # No worker takes a run that is Pending instead of Scheduled.
        if deployment:
            flow_run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters, state=Pending())
        else:
            flow_run = client.create_flow_run(post_train, parameters=parameters, state=Pending())
    run_watchdog.start(flow_run.id)
    try:
        return run_flow(post_train, flow_run=flow_run, parameters=parameters, return_type="state")
    except (TerminationSignal, SystemExit) as error:
        if _was_cancelled(flow_run.id):
            raise RatchetError(f"the run was cancelled: {run_watchdog.HOW_TO_CONTINUE}") from error
        raise


def _was_cancelled(flow_run_id: UUID) -> bool:
    """Whether this process was ended to cancel the run. If so, sets the state Cancelled: Prefect has set Crashed."""
    with get_client(sync_client=True) as client:
        if not any(state.is_cancelling() for state in client.read_flow_run_states(flow_run_id)):
            return False
        client.set_flow_run_state(flow_run_id, run_watchdog.cancelled(), force=True)
    return True


def _served_deployment() -> Any:
    """The deployment, if it exists and its worker resolves relative paths from the same folder as this process."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(DEPLOYMENT)
        except ObjectNotFound:
            return None
    folders = [values.get("directory") for step in found.pull_steps or [] for values in step.values()]
    return found if os.getcwd() in folders else None
