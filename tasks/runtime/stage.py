"""The one way to run a stage: look for its artifact, else do the work once, publish it, and report it.

A stage task describes its work as a `Stage` and calls `run_stage`. Everything else is here: the cache, the lock, the
child process, the upload, the MLflow run, and the retries.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, State
from pydantic import BaseModel

from configs.errors import IntegrityError, RatchetError
from tasks.core.execution.launch import run_child
from tasks.core.storage import artifacts, owners
from tasks.core.storage.artifacts import stage_key
from tasks.core.storage.checkpoints import Checkpoints
from tasks.core.storage.directory import DirectoryStore
from tasks.core.storage.store import Store
from tasks.core.tracking.background_run import BackgroundRun
from tasks.core.tracking.runs import Tracking
from tasks.runtime.progress import Progress, numbers
from tasks.runtime.stage_lock import stage_lock
from tasks.runtime.work_folder import work_folder

# Arguments of every task. An error is retried when its class says so (configs/errors.py); bad input never is.
RETRIES = {
    "retries": 3,
    "retry_delay_seconds": [5, 20, 60],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": lambda task, run, state: _worth_retrying(state),
    # The manifest in the store is the only cache.
    "cache_policy": NO_CACHE,
    "persist_result": False,
}


class Artifact(BaseModel):
    """What one stage passes to the next: the address and digest of its result, and its metrics; never the result."""

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
        """Where the artifact is stored, relative to the store's root."""
        return f"{self.stage}/{self.key}"


@dataclass
class Run:
    """What all stages of one pipeline run share."""

    id: str
    store: Store
    tracking: Tracking
    parent: str
    work: Path
    timeout_seconds: float
    outbox: Path
    used: list[str] = field(default_factory=list)

    @property
    def disk(self) -> Path:
        """The folder on this machine for checkpoints, and for results that are not uploaded yet."""
        return self.work / "kept"

    def record_use(self, prefix: str) -> None:
        """Writes to the store that this run uses an artifact: garbage collection keeps what a live run uses."""
        if prefix not in self.used:
            self.used.append(prefix)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"flow_run": self.id, "created": created, "prefixes": self.used}
            self.store.put_bytes(f"runs/{self.id}.json", json.dumps(record).encode())


@dataclass
class Stage:
    """One stage: what its key is made of, and how its work is done."""

    name: str
    version: int
    section: dict[str, Any]
    inputs: dict[str, Artifact] = field(default_factory=dict)
    # The work: either arguments for a child process, or a function that is called here with the output folder and
    # returns the metrics.
    request: dict[str, Any] | None = None
    make: Callable[[Path], dict[str, Any]] | None = None
    processes: int = 1
    keep_checkpoints: int | None = None
    # A stage that also makes something outside the store checks here that it still exists.
    still_there: Callable[[artifacts.Manifest], bool] = lambda manifest: True

    @property
    def digests(self) -> dict[str, str]:
        """Input name -> digest."""
        return {name: artifact.digest for name, artifact in self.inputs.items()}

    @property
    def key(self) -> str:
        """The stage key: SHA-256 of name, version, section and input digests."""
        return stage_key(self.name, self.version, self.section, self.digests)

    @property
    def prefix(self) -> str:
        """Where the artifact is stored, relative to the store's root."""
        return f"{self.name}/{self.key}"


def run_stage(run: Run, stage: Stage) -> State:
    """Returns a Completed state with the stage's Artifact as data, named `Cached` if the artifact existed before.

    Raises what the work raises.
    """
    started = time.monotonic()
    run.record_use(stage.prefix)
    if (manifest := _find(run, stage)) is not None:
        return _cached(run, stage, manifest, started)
    with stage_lock(run.store, stage.prefix, run.id) as lease:
        # Another run may have finished the stage while this one waited for the lock.
        if (manifest := _find(run, stage)) is not None:
            return _cached(run, stage, manifest, started)
        owner = owners.take(run.store, stage.prefix, run.id, lease, stage.digests)
        try:
            return _run(run, stage, owner.attempt, started)
        except OSError:
            # A lease can be lost. Then another run may have finished the stage and cleared the folder on this disk.
            if (manifest := _find(run, stage)) is None:
                raise
            return _cached(run, stage, manifest, started)


def fetch(run: Run, artifact: Artifact, folder: Path, only: Callable[[str], bool] = lambda path: True) -> Path:
    """Downloads the files of an artifact for which `only` is true, and verifies them against the manifest.

    Raises IntegrityError when the artifact is damaged or gone; a damaged one is taken out of use.
    """
    manifest = artifacts.find(run.store, artifact.prefix)
    if manifest is None or manifest.digest != artifact.digest:
        raise IntegrityError(f"{artifact.uri} was whole when this run found it, and is damaged or gone now")
    try:
        return artifacts.fetch(run.store, artifact.prefix, manifest, folder, only)
    except IntegrityError:
        artifacts.condemn(run.store, artifact.prefix, manifest)
        raise


def _find(run: Run, stage: Stage) -> artifacts.Manifest | None:
    manifest = artifacts.find(run.store, stage.prefix)
    return manifest if manifest is not None and stage.still_there(manifest) else None


def _cached(run: Run, stage: Stage, manifest: artifacts.Manifest, started: float) -> State:
    found = _artifact(run, stage, manifest, cached=True, seconds=time.monotonic() - started)
    return Completed(name="Cached", message=f"{stage.name} was done before: {found.uri}", data=found)


def _run(run: Run, stage: Stage, attempt: int, started: float) -> State:
    """Does the stage's work and records it in an MLflow run of its own."""
    log = get_run_logger()
    log.info("%s: attempt %s", stage.name, attempt)
    mlflow_run = run.tracking.stage(
        run.parent, stage.name, stage.key, stage.section, attempt=attempt, outbox=run.outbox
    )
    if "data" in stage.inputs:
        mlflow_run.dataset("data", stage.inputs["data"].digest, stage.inputs["data"].uri)
    try:
        manifest = _work(run, stage, mlflow_run)
    except RatchetError:
        mlflow_run.finish("FAILED")
        raise
    except BaseException:
        mlflow_run.finish("KILLED")
        raise
    done = _artifact(run, stage, manifest, cached=False, seconds=time.monotonic() - started)
    # The prefix keeps final values apart from the curves `reward` and `loss`.
    final = {f"final/{name}": value for name, value in numbers(done.metrics).items()}
    tags = {"ratchet.uri": done.uri, "ratchet.digest": done.digest}
    if undelivered := mlflow_run.finish("FINISHED", metrics=final, tags=tags):
        log.warning(
            "%s points of %s have not reached MLflow yet; history.jsonl in %s has them all",
            undelivered,
            stage.name,
            done.uri,
        )
    done.mlflow_run = mlflow_run.run_id  # None while MLflow has not answered
    return Completed(name="Completed", message=f"{stage.name} is done: {done.uri}", data=done)


def _work(run: Run, stage: Stage, mlflow_run: BackgroundRun) -> artifacts.Manifest:
    """Makes the result on this disk and uploads it. If an earlier attempt finished but did not upload, only uploads."""
    checkpoints = Checkpoints(run.store, run.disk, stage.name, stage.key, stage.keep_checkpoints or 1)
    manifest = _finished_before(checkpoints.disk, stage.prefix)
    if manifest is None:
        manifest = _make(run, stage, checkpoints.disk, mlflow_run)
    artifacts.send(checkpoints.disk, run.store, stage.prefix, manifest)
    checkpoints.clear()
    owners.leave(run.store, stage.prefix)
    return manifest


def _finished_before(disk: DirectoryStore, prefix: str) -> artifacts.Manifest | None:
    """The stage's whole result on this disk, if an earlier attempt made one and did not upload it."""
    manifest = artifacts.find(disk, prefix)
    if manifest is None:
        return None
    try:
        artifacts.verify(disk, prefix, manifest)
    except (IntegrityError, OSError) as error:
        get_run_logger().warning("%s: the work is done again", error)
        return None
    get_run_logger().info("%s was finished by an earlier attempt and is uploaded now", prefix)
    return manifest


def _make(run: Run, stage: Stage, disk: DirectoryStore, mlflow_run: BackgroundRun) -> artifacts.Manifest:
    """Does the work in a work folder and commits the result to this disk."""
    started = time.monotonic()
    with work_folder(run.work, stage.name) as work:
        out = work / "out"
        if stage.make:
            out.mkdir()
            metrics = stage.make(out)
        else:
            metrics = _make_in_child(run, stage, work, mlflow_run)
        described = {"inputs": stage.digests, "section": stage.section, "metrics": metrics}
        seconds = time.monotonic() - started
        return artifacts.commit(disk, stage.prefix, out, stage=stage.name, key=stage.key, seconds=seconds, **described)


def _make_in_child(run: Run, stage: Stage, work: Path, mlflow_run: BackgroundRun) -> dict[str, Any]:
    inputs = {name: fetch(run, artifact, work / "inputs" / name) for name, artifact in stage.inputs.items()}
    request = {**stage.request, "stage": stage.name, "inputs": {name: str(path) for name, path in inputs.items()}}
    if stage.keep_checkpoints:
        request["checkpoints"] = {
            "root": run.store.root,
            "timeout_seconds": run.timeout_seconds,
            "disk": str(run.disk),
            "key": stage.key,
            "keep": stage.keep_checkpoints,
        }
    progress = Progress(stage.name, mlflow_run)
    metrics = run_child(request, work, progress, stage.processes)
    progress.done()
    return metrics


def _artifact(run: Run, stage: Stage, manifest: artifacts.Manifest, *, cached: bool, seconds: float) -> Artifact:
    return Artifact(
        stage=stage.name,
        key=stage.key,
        uri=run.store.uri(f"{stage.prefix}/{manifest.folder}"),
        digest=manifest.digest,
        cached=cached,
        seconds=round(seconds, 3),
        metrics=manifest.metrics,
    )


def _worth_retrying(state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, RatchetError) and error.retry
