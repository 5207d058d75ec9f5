"""The only window to MLflow runs: a parent run per flow run, a child run per stage, curves that never hold up the training.

`connect` is strict: a server that does not answer stops the flow before any work is done. Everything after it is best effort: an outage is
waited out in the background, and what has not arrived when a stage ends is kept in a file and sent later, by this process or the next.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import BadInput, RatchetError
from configs.schema import TrackingSection
from tasks.core.tracking import curves
from tasks.core.tracking.curves import WAIT_SECONDS, Opened, StageRun
from tasks.core.tracking.server import check, client_for, experiment_id, refused, server_uri
from tasks.core.tracking.spool import Point, Record, clean, final, flatten

log = logging.getLogger("ratchet.tracking")

# Limits of the MLflow server: what lies beyond them is refused, and the whole batch with it.
MAX_PARAM, MAX_TAG, MAX_BATCH_PARAMS, MAX_BATCH_METRICS, MAX_DIGEST = 6000, 5000, 100, 1000, 36
# Tells a run from another of the same stage: the id of the record that made it.
TOKEN = "ratchet.record"
# The page's side for training; by itself it opens the one for traces of agents, which shows no curve and no registry.
PAGE = "?workflowType=machine_learning"


def connect(section: TrackingSection, verify: bool = True) -> "Tracking":
    """Opens the tracking server and the experiment.

    Raises ConfigError without an address, TrackingUnavailable when the server does not answer within a few seconds, BadInput when it refuses.
    `verify=False` sends nothing: it is for a stage whose flow has connected already, which an outage must not fail.
    """
    tracking = Tracking(server_uri(section), section.experiment)
    if verify:
        check(tracking.uri)
        tracking.experiment()
    return tracking


class Tracking:
    """One experiment on one server."""

    def __init__(self, uri: str, experiment_name: str):
        self.uri, self.name = uri, experiment_name
        self.client = client_for(uri)
        self._experiment: str | None = None

    def experiment(self) -> str:
        """The experiment's id. Raises TrackingUnavailable or BadInput."""
        if self._experiment is None:
            self._experiment = experiment_id(self.client, self.name, self.uri)
        return self._experiment

    def parent(
        self, flow_run_id: str, name: str, params: dict[str, Any] | None = None, tags: dict[str, str] | None = None
    ) -> str:
        """The id of the flow run's parent run, continued when this flow run has one (Retry), else created; "" during an outage."""
        identity = {"ratchet.flow_run_id": flow_run_id, "ratchet.kind": "parent"}

        def work() -> str:
            run = self._find(identity) or self._create(identity, name, tags or {}, uuid.uuid4().hex)
            self.client.update_run(run.info.run_id, status="RUNNING")
            self._describe(run, params or {})
            return run.info.run_id

        return best_effort(work, f"open the run of {name}", "")

    def stage(
        self,
        parent_run_id: str,
        stage: str,
        key: str,
        params: dict[str, Any],
        attempt: int = 1,
        spool: Path | None = None,
    ) -> StageRun:
        """A child run of the stage, continued when (parent, stage, key) has one; opened in the background. `spool` is the folder for what does not arrive."""
        named = {"parent": parent_run_id, "stage": stage, "key": key, "attempt": attempt, "params": params}
        return StageRun(self, Record(uri=self.uri, experiment=self.name, **named), spool).start()

    def finish(
        self,
        parent_run_id: str,
        status: str,
        metrics: dict[str, float],
        tags: dict[str, str] | None = None,
        table: str | None = None,
        spool: Path | None = None,
    ) -> bool:
        """Ends the parent run with its final metrics, its tags and `table` as artifact report.md; False when not all of it has arrived."""
        if not parent_run_id:
            return False
        run = StageRun(self, Record(uri=self.uri, experiment=self.name, run_id=parent_run_id), spool).start()
        missing = run.finish(status, metrics, tags, texts={} if table is None else {"report.md": table})
        return run.done.is_set() and not missing

    def deliver_spooled(self, spool: Path) -> int:
        """Delivers in the background what dead processes have left in the folder for this server and experiment; returns the number of runs."""
        return curves.deliver_kept(self, self.name, spool)

    def settle(self, seconds: float) -> int:
        """Waits at most `seconds` for the ended runs of this process to arrive; returns the number of those that have not."""
        return curves.settle(self.uri, self.name, seconds)

    def run_url(self, run_id: str) -> str:
        """Where the run is shown in the MLflow UI."""
        return f"{self.uri}/#/experiments/{best_effort(self.experiment, 'look up the experiment', '0')}/runs/{run_id}{PAGE}"

    def open(self, record: Record) -> Opened:
        """Finds the record's run or creates it, with its params and attempt; leaves alone what a later attempt has said. Raises what MLflow raises."""
        identity = {"ratchet.stage": record.stage, "ratchet.key": record.key}
        # Without a parent nothing but this record belongs to the run.
        identity |= {"mlflow.parentRunId": record.parent} if record.parent else {TOKEN: record.id}
        run = self.client.get_run(record.run_id) if record.run_id else self._find(identity)
        attempt = {"ratchet.attempt": str(record.attempt)} if record.stage else {}
        if run is None:
            run = self._create(identity, record.stage, attempt, record.id, record.began)
            self._describe(run, record.params)
            return Opened(run.info.run_id, continued=False, superseded=False)
        later = (
            run.data.tags.get("ratchet.attempt", "").isdecimal()
            and int(run.data.tags["ratchet.attempt"]) > record.attempt
        )
        superseded = (bool(record.stage) and later) or (
            record.ended is not None and (run.info.end_time or 0) > record.ended
        )
        if not superseded:
            if record.ended is None:
                self.client.update_run(run.info.run_id, status="RUNNING")
            self.send(run.info.run_id, [], attempt)
            self._describe(run, record.params)
        return Opened(run.info.run_id, continued=True, superseded=superseded)

    def _find(self, identity: dict[str, str]) -> Any:
        """The oldest run with these tags, or None. MLflow's client asks again when an answer is lost, so a run may have twins: they are deleted."""
        query = " and ".join(f"tags.`{k}` = '{v}'" for k, v in identity.items())
        found = self.client.search_runs(
            [self.experiment()], query, max_results=20, order_by=["attributes.start_time ASC"]
        )
        for twin in found[1:]:
            if twin.data.tags.get(TOKEN) == found[0].data.tags.get(TOKEN, ""):
                self.client.delete_run(twin.info.run_id)
        return found[0] if found else None

    def _create(
        self, identity: dict[str, str], name: str, tags: dict[str, str], token: str, began: int | None = None
    ) -> Any:
        """A new run, begun at `began` milliseconds since 1970 or now."""
        tags = {"mlflow.source.name": "ratchet", **tags, **identity, TOKEN: token}
        self.client.create_run(self.experiment(), start_time=began, tags=tags, run_name=name)
        return self._find(identity)

    def _describe(self, run: Any, params: dict[str, Any]) -> None:
        """Logs params once; values that MLflow cannot hold go whole into the artifact params.json, those that changed since into tags."""
        from mlflow.entities import Param

        flat = flatten(params)
        shown = {k: v if len(v) <= MAX_PARAM else "in the artifact params.json" for k, v in flat.items()}
        run_id, known = run.info.run_id, run.data.params
        new = [Param(k, v) for k, v in shown.items() if k not in known]
        for start in range(0, len(new), MAX_BATCH_PARAMS):
            self.client.log_batch(run_id, params=new[start : start + MAX_BATCH_PARAMS])
        self.send(run_id, [], {f"ratchet.changed.{k}": v for k, v in shown.items() if k in known and known[k] != v})
        if shown != flat:
            self.add_text(
                run_id, "params.json", json.dumps(params, indent=2, sort_keys=True, ensure_ascii=False, default=str)
            )

    def send(self, run_id: str, points: list[Point], tags: dict[str, Any]) -> None:
        """Logs points and tags, in as many calls as MLflow's limits ask for. Raises what MLflow raises."""
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(p.name, p.value, p.time, p.step) for p in points]
        named = [RunTag(clean(k), str(v)[:MAX_TAG]) for k, v in tags.items()]
        for start in range(0, len(named), MAX_BATCH_PARAMS):
            self.client.log_batch(run_id, tags=named[start : start + MAX_BATCH_PARAMS])
        for start in range(0, len(metrics), MAX_BATCH_METRICS):
            self.client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH_METRICS])

    def add_dataset(self, run_id: str, name: str, digest: str, source_uri: str) -> None:
        """Logs a data set as an input, its whole digest in the tag sha256. Raises what MLflow raises."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entry = Dataset(
            name=name,
            digest=digest.removeprefix("sha256:")[:MAX_DIGEST],
            source_type="ratchet",
            source=json.dumps({"uri": source_uri}),
        )
        self.client.log_inputs(
            run_id, [DatasetInput(entry, [InputTag("mlflow.data.context", "training"), InputTag("sha256", digest)])]
        )

    def add_text(self, run_id: str, name: str, text: str) -> None:
        """Logs the text as an artifact. Raises what MLflow raises."""
        self.client.log_text(run_id, text, name)

    def close(self, run_id: str, status: str, ended: int) -> None:
        """Ends the run, at `ended` milliseconds since 1970. Raises what MLflow raises."""
        self.client.set_terminated(run_id, final(status), ended)

    def logged_steps(self, run_id: str, name: str) -> set[int]:
        """Steps at which the run has a value of the metric. Raises what MLflow raises."""
        return {m.step for m in self.client.get_metric_history(run_id, name)}

    def refused(self, error: Exception) -> bool:
        """Whether MLflow said no, as it says itself or by `mlflow_errors`."""
        return isinstance(error, BadInput) or refused(error)


def best_effort(work: Callable[[], Any], what: str, otherwise: Any, seconds: float = WAIT_SECONDS) -> Any:
    """The result of `work`, or `otherwise` with a warning when it fails or takes longer than `seconds`."""
    result: list[Any] = []
    failure: list[str] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # tracking must not end a run
            failure.append(error.args[0] if isinstance(error, RatchetError) else repr(error))

    thread = threading.Thread(target=run, name="mlflow", daemon=True)
    thread.start()
    thread.join(seconds)
    if result:
        return result[0]
    log.warning("MLflow could not %s: %s", what, failure[0] if failure else f"no answer within {seconds:g} s")
    return otherwise
