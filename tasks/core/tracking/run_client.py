"""Reads and writes MLflow runs, one request after the other. Every method raises what MLflow raises."""

import json
from typing import Any, NamedTuple

from configs.errors import BadInput
from tasks.core.tracking.records import Point, Record, clean, final, flatten
from tasks.core.tracking.server import client_for, experiment_id, refused

# Limits of the MLflow server: it refuses the whole batch if one value exceeds its limit.
MAX_PARAM, MAX_TAG, MAX_DIGEST = 6000, 5000, 36
MAX_BATCH_PARAMS, MAX_BATCH_METRICS = 100, 1000
# The tag with the id of the record that created the run. Two runs with equal ids are one run that was created twice.
RECORD_TAG = "ratchet.record"
STAGE_TAG, KEY_TAG, ATTEMPT_TAG, PARENT_TAG = "ratchet.stage", "ratchet.key", "ratchet.attempt", "mlflow.parentRunId"


class Opened(NamedTuple):
    """A run on the server: whether it existed before, and whether a later attempt has it."""

    run_id: str
    continued: bool
    superseded: bool


class RunClient:
    """The runs of one experiment on one server."""

    def __init__(self, uri: str, experiment_name: str):
        self.uri, self.name = uri, experiment_name
        self.client = client_for(uri)
        self._experiment: str | None = None

    def experiment(self) -> str:
        """The experiment's id. The experiment is created if it does not exist."""
        if self._experiment is None:
            self._experiment = experiment_id(self.client, self.name, self.uri)
        return self._experiment

    def open(self, record: Record) -> Opened:
        """Finds or creates the record's run. Logs its params and attempt, unless a later attempt has the run."""
        identity = {STAGE_TAG: record.stage, KEY_TAG: record.key}
        # Without a parent, the run belongs to this record only.
        identity |= {PARENT_TAG: record.parent} if record.parent else {RECORD_TAG: record.id}
        run = self.client.get_run(record.run_id) if record.run_id else self.find(identity)
        attempt = {ATTEMPT_TAG: str(record.attempt)} if record.stage else {}
        if run is None:
            run = self.create(identity, record.stage, attempt, record.id, record.began)
            self.log_params(run, record.params)
            return Opened(run.info.run_id, continued=False, superseded=False)
        superseded = _superseded(run, record)
        if not superseded:
            if record.ended is None:
                self.client.update_run(run.info.run_id, status="RUNNING")
            self.send(run.info.run_id, [], attempt)
            self.log_params(run, record.params)
        return Opened(run.info.run_id, continued=True, superseded=superseded)

    def find(self, tags: dict[str, str]) -> Any:
        """The oldest run of the experiment with these tags, or None.

        MLflow's client sends a request again when its answer is lost, so a run may exist twice: the copies are deleted.
        """
        query, oldest_first = tag_filter(tags), ["attributes.start_time ASC"]
        found = self.client.search_runs([self.experiment()], query, max_results=20, order_by=oldest_first)
        for other in found[1:]:
            if other.data.tags.get(RECORD_TAG) == found[0].data.tags.get(RECORD_TAG, ""):
                self.client.delete_run(other.info.run_id)
        return found[0] if found else None

    def create(
        self, identity: dict[str, str], name: str, tags: dict[str, str], record_id: str, began: int | None = None
    ) -> Any:
        """Creates a run that began at `began` (milliseconds since 1970, by default now)."""
        tags = {"mlflow.source.name": "ratchet", **tags, **identity, RECORD_TAG: record_id}
        self.client.create_run(self.experiment(), start_time=began, tags=tags, run_name=name)
        return self.find(identity)

    def log_params(self, run: Any, params: dict[str, Any]) -> None:
        """Logs the params that the run does not have yet.

        MLflow never changes a param, so changed values become tags `ratchet.changed.<name>`. If a value is too long for
        MLflow, all params are stored in the artifact params.json.
        """
        from mlflow.entities import Param

        flat = flatten(params)
        shown = {k: v if len(v) <= MAX_PARAM else "in the artifact params.json" for k, v in flat.items()}
        run_id, known = run.info.run_id, run.data.params
        new = [Param(k, v) for k, v in shown.items() if k not in known]
        for start in range(0, len(new), MAX_BATCH_PARAMS):
            self.client.log_batch(run_id, params=new[start : start + MAX_BATCH_PARAMS])
        self.send(run_id, [], {f"ratchet.changed.{k}": v for k, v in shown.items() if k in known and known[k] != v})
        if shown != flat:
            whole = json.dumps(params, indent=2, sort_keys=True, ensure_ascii=False, default=str)
            self.add_text(run_id, "params.json", whole)

    def send(self, run_id: str, points: list[Point], tags: dict[str, Any]) -> None:
        """Logs points and tags, in as many requests as MLflow's limits require."""
        from mlflow.entities import Metric, RunTag

        metrics = [Metric(p.name, p.value, p.time, p.step) for p in points]
        named = [RunTag(clean(k), str(v)[:MAX_TAG]) for k, v in tags.items()]
        for start in range(0, len(named), MAX_BATCH_PARAMS):
            self.client.log_batch(run_id, tags=named[start : start + MAX_BATCH_PARAMS])
        for start in range(0, len(metrics), MAX_BATCH_METRICS):
            self.client.log_batch(run_id, metrics=metrics[start : start + MAX_BATCH_METRICS])

    def add_dataset(self, run_id: str, name: str, digest: str, source_uri: str) -> None:
        """Logs a dataset as an input of the run. MLflow cuts digests to 36 characters; the tag sha256 has it all."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        short = digest.removeprefix("sha256:")[:MAX_DIGEST]
        dataset = Dataset(name=name, digest=short, source_type="ratchet", source=json.dumps({"uri": source_uri}))
        tags = [InputTag("mlflow.data.context", "training"), InputTag("sha256", digest)]
        self.client.log_inputs(run_id, [DatasetInput(dataset, tags)])

    def add_text(self, run_id: str, name: str, text: str) -> None:
        """Logs a text file as an artifact of the run."""
        self.client.log_text(run_id, text, name)

    def close(self, run_id: str, status: str, ended: int) -> None:
        """Ends the run at `ended` (milliseconds since 1970)."""
        self.client.set_terminated(run_id, final(status), ended)

    def logged_steps(self, run_id: str, name: str) -> set[int]:
        """The steps for which the run has a value of the metric."""
        return {m.step for m in self.client.get_metric_history(run_id, name)}

    def refused(self, error: Exception) -> bool:
        """Whether the server understood the request and refused it, so that sending it again is useless."""
        return isinstance(error, BadInput) or refused(error)


def tag_filter(tags: dict[str, str]) -> str:
    """MLflow's search filter for runs that have all of these tags."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _superseded(run: Any, record: Record) -> bool:
    """Whether a later attempt has the run, or has ended it after the record's own end."""
    attempt = run.data.tags.get(ATTEMPT_TAG, "")
    if record.stage and attempt.isdecimal() and int(attempt) > record.attempt:
        return True
    return record.ended is not None and (run.info.end_time or 0) > record.ended
