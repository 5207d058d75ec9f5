"""One way for every stage: look for its artifact, else do the work in a child process, publish it, and say so in Prefect and MLflow."""

import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State
from pydantic import BaseModel

from configs.errors import RatchetError
from tasks.core import artifacts
from tasks.core.artifacts import Checkpoints, stage_key
from tasks.core.launch import run_child
from tasks.core.store import Store
from tasks.core.tracking import StageRun, Tracking

# Bad input is never retried; what is worth it says so in its class (configs/errors.py).
RETRIES = {
    "retries": 3,
    "retry_delay_seconds": [5, 20, 60],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": lambda task, run, state: _worth_retrying(state),
    # The manifest in the store is the only cache.
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
CURVES = ("reward", "kl_k3", "loss")


class Artifact(BaseModel):
    """What a stage hands to the next: where its result is, never the result itself."""

    stage: str
    key: str
    uri: str
    digest: str
    cached: bool
    seconds: float
    metrics: dict[str, Any] = {}
    mlflow_run: str | None = None

    @property
    def prefix(self) -> str:
        """Where the artifact lies under the store's root."""
        return f"{self.stage}/{self.key}"


@dataclass
class Run:
    """What all stages of one pipeline run share."""

    store: Store
    tracking: Tracking
    parent: str
    work: Path


@dataclass
class Stage:
    """One stage: what its key is made of, and how its work is done."""

    name: str
    version: int
    section: dict[str, Any]
    inputs: dict[str, Artifact] = field(default_factory=dict)
    # Arguments of the child process that does the work, or a function that does it here, writing into a folder and returning metrics.
    request: dict[str, Any] | None = None
    make: Callable[[Path], dict[str, Any]] | None = None
    processes: int = 1
    keep_checkpoints: int | None = None
    # A stage whose result is also outside the store checks that it is still there.
    still_there: Callable[[artifacts.Manifest], bool] = lambda manifest: True

    @property
    def key(self) -> str:
        return stage_key(self.name, self.version, self.section, {name: a.digest for name, a in self.inputs.items()})


def run_stage(run: Run, stage: Stage) -> State:
    """Returns Completed, named `Cached` when nothing was done, with the stage's Artifact; raises what the work raised."""
    prefix = f"{stage.name}/{stage.key}"
    began = time.monotonic()
    manifest = artifacts.find(run.store, prefix)
    if manifest is not None and stage.still_there(manifest):
        found = _artifact(run, stage, manifest, cached=True, seconds=time.monotonic() - began)
        return Completed(name="Cached", message=f"{stage.name} was done before: {found.uri}", data=found)
    child_run = run.tracking.stage(run.parent, stage.name, stage.key, stage.section)
    if "data" in stage.inputs:
        child_run.dataset("data", stage.inputs["data"].digest, stage.inputs["data"].uri)
    try:
        manifest = _work(run, stage, prefix, child_run)
    except RatchetError:
        child_run.finish("FAILED")
        raise
    except BaseException:
        child_run.finish("KILLED")
        raise
    done = _artifact(run, stage, manifest, cached=False, seconds=time.monotonic() - began)
    done.mlflow_run = child_run.run_id
    # Under names of their own: `reward` and `loss` are curves already.
    final = {f"final/{name}": value for name, value in numbers(done.metrics).items()}
    undelivered = child_run.finish("FINISHED", metrics=final, tags={"ratchet.uri": done.uri, "ratchet.digest": done.digest})
    if undelivered:
        get_run_logger().warning("%s points of %s did not reach MLflow; history.jsonl in %s has them all", undelivered, stage.name, done.uri)
    return Completed(name="Completed", message=f"{stage.name} is done: {done.uri}", data=done)


def sweep(work: Path) -> None:
    """Removes the working folders of processes that are gone: what a killed run has left."""
    for folder in work.glob("*-*"):
        owner = folder.name.partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def fetch(run: Run, artifact: Artifact, folder: Path, only: Callable[[str], bool] = lambda path: True) -> Path:
    """Downloads an artifact's files, checked against their manifest."""
    manifest = artifacts.find(run.store, artifact.prefix)
    if manifest is None:
        raise RatchetError(f"{artifact.uri} was there when this run began and is gone: press Retry to redo stage {artifact.stage}")
    return artifacts.fetch(run.store, artifact.prefix, manifest, folder, only)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _work(run: Run, stage: Stage, prefix: str, child_run: StageRun) -> artifacts.Manifest:
    began = time.monotonic()
    run.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{stage.name}-", dir=run.work))
    try:
        out = work / "out"
        if stage.make:
            out.mkdir()
            metrics = stage.make(out)
        else:
            inputs = {name: fetch(run, a, work / "inputs" / name) for name, a in stage.inputs.items()}
            request = {**stage.request, "stage": stage.name, "inputs": {n: str(p) for n, p in inputs.items()}}
            if stage.keep_checkpoints:
                request["checkpoints"] = {"root": run.store.root, "key": stage.key, "keep": stage.keep_checkpoints}
            progress = _Progress(stage.name, child_run)
            metrics = run_child(request, work, progress, stage.processes)
            progress.done()
        described = {"inputs": {n: a.digest for n, a in stage.inputs.items()}, "section": stage.section, "metrics": metrics}
        manifest = artifacts.publish(run.store, prefix, out, stage=stage.name, key=stage.key, seconds=time.monotonic() - began, **described)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if stage.keep_checkpoints:
        Checkpoints(run.store, stage.name, stage.key, stage.keep_checkpoints).clear()
    return manifest


def _artifact(run: Run, stage: Stage, manifest: artifacts.Manifest, *, cached: bool, seconds: float) -> Artifact:
    uri = run.store.uri(f"{stage.name}/{stage.key}/{manifest.folder}")
    common = {"stage": stage.name, "key": stage.key, "digest": manifest.digest, "metrics": manifest.metrics}
    return Artifact(**common, uri=uri, cached=cached, seconds=round(seconds, 3))


class _Progress:
    """Turns a child's events into a progress artifact, log lines and curves."""

    def __init__(self, stage: str, child_run: StageRun):
        self.stage, self.child_run, self.log = stage, child_run, get_run_logger()
        self.artifact = create_progress_artifact(progress=0.0, key=stage.replace("_", "-"), description=f"Progress of {stage}")
        self.shown = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "message":
            self.log.info("%s: %s", self.stage, event["message"])
        elif kind == "progress":
            self._show(event["done"], event["total"])
        else:
            step, last = int(event["step"]), int(event["max_steps"])
            self.log.info("%s: %s", self.stage, line(event))
            self.child_run.log(step, numbers({k: v for k, v in event.items() if k not in ("step", "max_steps", "num_epochs")}))
            self._show(step, last)

    def done(self) -> None:
        """The bar is full: some stages have nothing to count."""
        update_progress_artifact(self.artifact, progress=100.0)

    def _show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.shown >= 1:  # one API call a second at most
            update_progress_artifact(self.artifact, progress=100.0 * done / max(total, 1))
            self.shown = now


def line(event: dict[str, Any]) -> str:
    """`epoch 1/2 | step 100/500 | reward 0.45 | kl 0.023 | loss 1.234` of a log event, with what it has of these."""
    parts = [f"epoch {max(1, math.ceil(event['epoch']))}/{math.ceil(event['num_epochs'])}"] if "num_epochs" in event else []
    parts.append(f"step {event['step']}/{event['max_steps']}")
    parts += [f"{name.removesuffix('_k3')} {event[name]:.4g}" for name in CURVES if isinstance(event.get(name), int | float)]
    return " | ".join(parts)


def _worth_retrying(state: State) -> bool:
    """True for errors whose class says that another try can help."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, RatchetError) and error.retry


def quiet_tracebacks() -> None:
    """Errors of the tree are one sentence for the user: Prefect's log shows them without a traceback."""

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], RatchetError):
            record.exc_info = None
        return True

    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(without_traceback)
