"""The MLflow runs of a pipeline run: one parent run per flow run, and one child run per stage.

`connect` is strict: a server that does not answer stops the flow before any work is done. Everything after it is best
effort: an outage delays what is logged, and the training goes on.
"""

import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import RatchetError
from configs.schema import TrackingSection
from tasks.core.tracking import delivery
from tasks.core.tracking.background_run import WAIT_SECONDS, BackgroundRun
from tasks.core.tracking.records import Record
from tasks.core.tracking.run_client import RunClient
from tasks.core.tracking.server import check, server_uri

log = logging.getLogger("ratchet.tracking")

# Opens the UI's pages for training. By default, MLflow opens those for agents, without curves and without the registry.
PAGE = "?workflowType=machine_learning"


def connect(section: TrackingSection, verify: bool = True) -> "Tracking":
    """Connects to the tracking server and opens the experiment.

    Raises ConfigError without an address, TrackingUnavailable if the server does not answer within a few seconds, and
    BadInput if it refuses. `verify=False` sends nothing: it is for callers that an outage must not stop.
    """
    tracking = Tracking(server_uri(section), section.experiment)
    if verify:
        check(tracking.uri)
        tracking.experiment()
    return tracking


class Tracking(RunClient):
    """One experiment on one server."""

    def parent(
        self, flow_run_id: str, name: str, params: dict[str, Any] | None = None, tags: dict[str, str] | None = None
    ) -> str:
        """Opens the parent run of a flow run and returns its id, or "" during an outage.

        A Retry of the flow run continues its parent run.
        """
        identity = {"ratchet.flow_run_id": flow_run_id, "ratchet.kind": "parent"}

        def work() -> str:
            run = self.find(identity) or self.create(identity, name, tags or {}, uuid.uuid4().hex)
            self.client.update_run(run.info.run_id, status="RUNNING")
            self.log_params(run, params or {})
            return run.info.run_id

        return best_effort(work, f"open the run of {name}", "")

    def stage(
        self,
        parent_run_id: str,
        stage: str,
        key: str,
        params: dict[str, Any],
        attempt: int = 1,
        outbox: Path | None = None,
    ) -> BackgroundRun:
        """Opens a child run for a stage, in the background, or continues the parent's run of this stage and key.

        `outbox` is the folder that keeps what does not arrive.
        """
        fields = {"parent": parent_run_id, "stage": stage, "key": key, "attempt": attempt, "params": params}
        return delivery.start(self, Record(uri=self.uri, experiment=self.name, **fields), outbox)

    def finish(
        self,
        parent_run_id: str,
        status: str,
        metrics: dict[str, float],
        tags: dict[str, str] | None = None,
        report: str | None = None,
        outbox: Path | None = None,
    ) -> bool:
        """Ends the parent run with its final metrics and tags, and `report` as the artifact report.md.

        Returns whether everything has arrived.
        """
        if not parent_run_id:
            return False
        run = delivery.start(self, Record(uri=self.uri, experiment=self.name, run_id=parent_run_id), outbox)
        missing = run.finish(status, metrics, tags, texts={} if report is None else {"report.md": report})
        return run.done.is_set() and not missing

    def deliver_outbox(self, outbox: Path) -> int:
        """Delivers, in the background, the records of dead processes for this server and experiment.

        Returns the number of records.
        """
        return delivery.deliver_outbox(self, self.name, outbox)

    def settle(self, seconds: float) -> int:
        """Waits at most `seconds` until this process's ended runs are delivered. Returns the number of the others."""
        return delivery.settle(self.uri, self.name, seconds)

    def run_url(self, run_id: str, experiment: str | None = None) -> str:
        """The address of the run's page in the MLflow UI. `experiment` is an id, by default that of this experiment."""
        if experiment is None:
            experiment = best_effort(self.experiment, "look up the experiment", "0")
        return f"{self.uri}/#/experiments/{experiment}/runs/{run_id}{PAGE}"


def best_effort(work: Callable[[], Any], what: str, otherwise: Any, seconds: float = WAIT_SECONDS) -> Any:
    """The result of `work`. If it fails or takes longer than `seconds`, logs a warning and returns `otherwise`."""
    result: list[Any] = []
    failure: list[str] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # a tracking error must not end a run
            failure.append(error.args[0] if isinstance(error, RatchetError) else repr(error))

    thread = threading.Thread(target=run, name="mlflow", daemon=True)
    thread.start()
    thread.join(seconds)
    if result:
        return result[0]
    log.warning("MLflow could not %s: %s", what, failure[0] if failure else f"no answer within {seconds:g} s")
    return otherwise
