"""One way for every stage: look for its artifact, else do the work in a child process, publish it, and say so in Prefect and MLflow."""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
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
from tasks.core import artifacts, owners
from tasks.core.artifacts import stage_key
from tasks.core.checkpoints import Checkpoints
from tasks.core.curves import StageRun
from tasks.core.launch import run_child
from tasks.core.store import DirectoryStore, Store
from tasks.core.store import disk as disk_of
from tasks.core.tracking import Tracking
from tasks.progress import Progress, numbers
from tasks.turn import turn

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
# What this machine keeps of a run that does not come back.
KEPT_SECONDS = 7 * 24 * 3600
# The file of a working folder that its process has locked.
LOCK = "lock"


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

    id: str
    store: Store
    tracking: Tracking
    parent: str
    work: Path
    timeout_seconds: float
    spool: Path
    touched: list[str] = field(default_factory=list)

    @property
    def disk(self) -> Path:
        """The folder of this machine that holds checkpoints, and results until the store has them."""
        return self.work / "kept"

    def note(self, prefix: str) -> None:
        """Notes in the store that this run uses an artifact: what a live run uses is no garbage."""
        if prefix not in self.touched:
            self.touched.append(prefix)
            record = {"flow_run": self.id, "created": datetime.now(UTC).isoformat(timespec="seconds"), "prefixes": self.touched}
            self.store.put_bytes(f"runs/{self.id}.json", json.dumps(record).encode())


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
    def digests(self) -> dict[str, str]:
        """Input name -> digest."""
        return {name: artifact.digest for name, artifact in self.inputs.items()}

    @property
    def key(self) -> str:
        return stage_key(self.name, self.version, self.section, self.digests)

    @property
    def prefix(self) -> str:
        """Where its artifact lies under the store's root."""
        return f"{self.name}/{self.key}"


def run_stage(run: Run, stage: Stage) -> State:
    """Returns Completed, named `Cached` when nothing was done, with the stage's Artifact; raises what the work raised."""
    began = time.monotonic()
    run.note(stage.prefix)
    if (manifest := _whole(run, stage)) is not None:
        return _cached(run, stage, manifest, began)
    # One at a time: whoever waited here finds what the other has made.
    with turn(run.store, stage.prefix, run.id) as lease:
        if (manifest := _whole(run, stage)) is not None:
            return _cached(run, stage, manifest, began)
        owner = owners.take(run.store, stage.prefix, run.id, lease, stage.digests)
        try:
            return _done(run, stage, owner.attempt, began)
        except OSError:
            # Another who worked on it all the same (a lease can be lost) may have finished first, and cleared what was kept on this disk.
            if (manifest := _whole(run, stage)) is None:
                raise
            return _cached(run, stage, manifest, began)


def fetch(run: Run, artifact: Artifact, folder: Path, only: Callable[[str], bool] = lambda path: True) -> Path:
    """Downloads an artifact's files, checked against their manifest. Raises IntegrityError for one that is damaged or gone, and takes it out of use."""
    manifest = artifacts.find(run.store, artifact.prefix)
    if manifest is None or manifest.digest != artifact.digest:
        raise IntegrityError(f"{artifact.uri} was whole when this run found it, and is damaged or gone now")
    try:
        return artifacts.fetch(run.store, artifact.prefix, manifest, folder, only)
    except IntegrityError:
        artifacts.condemn(run.store, artifact.prefix, manifest)
        raise


def sweep(work: Path) -> None:
    """Removes the working folders of processes that are gone, and what was kept for runs that did not come back in a week."""
    for folder in work.glob("*-*"):
        with contextlib.suppress(OSError):
            # A process holds the lock of its folder as long as it lives, wherever it lives: a process id means nothing in another container.
            with (folder / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (work / "kept").glob("*/*"):
        newest = max((p.stat().st_mtime for p in folder.rglob("*") if p.exists()), default=0.0)
        if time.time() - newest > KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _whole(run: Run, stage: Stage) -> artifacts.Manifest | None:
    manifest = artifacts.find(run.store, stage.prefix)
    return manifest if manifest is not None and stage.still_there(manifest) else None


def _cached(run: Run, stage: Stage, manifest: artifacts.Manifest, began: float) -> State:
    found = _artifact(run, stage, manifest, cached=True, seconds=time.monotonic() - began)
    return Completed(name="Cached", message=f"{stage.name} was done before: {found.uri}", data=found)


def _done(run: Run, stage: Stage, attempt: int, began: float) -> State:
    """Does the stage's work, with a run of its own in MLflow."""
    get_run_logger().info("%s: attempt %s", stage.name, attempt)
    child_run = run.tracking.stage(run.parent, stage.name, stage.key, stage.section, attempt=attempt, spool=run.spool)
    if "data" in stage.inputs:
        child_run.dataset("data", stage.inputs["data"].digest, stage.inputs["data"].uri)
    try:
        manifest = _work(run, stage, child_run)
    except RatchetError:
        child_run.finish("FAILED")
        raise
    except BaseException:
        child_run.finish("KILLED")
        raise
    done = _artifact(run, stage, manifest, cached=False, seconds=time.monotonic() - began)
    # Under names of their own: `reward` and `loss` are curves already.
    final = {f"final/{name}": value for name, value in numbers(done.metrics).items()}
    undelivered = child_run.finish("FINISHED", metrics=final, tags={"ratchet.uri": done.uri, "ratchet.digest": done.digest})
    if undelivered:
        get_run_logger().warning("%s points of %s have not reached MLflow yet; history.jsonl in %s has them all", undelivered, stage.name, done.uri)
    done.mlflow_run = child_run.run_id  # None while MLflow has not answered
    return Completed(name="Completed", message=f"{stage.name} is done: {done.uri}", data=done)


def _work(run: Run, stage: Stage, child_run: StageRun) -> artifacts.Manifest:
    """Makes the stage's result, keeps it on this disk, and sends it to the store; where an attempt was cut off while it sent, the rest is sent."""
    kept = Checkpoints(run.store, run.disk, stage.name, stage.key, stage.keep_checkpoints or 1)
    manifest = _kept(kept.disk, stage.prefix)
    if manifest is None:
        manifest = _make(run, stage, kept.disk, child_run)
    artifacts.send(kept.disk, run.store, stage.prefix, manifest)
    kept.clear()
    owners.leave(run.store, stage.prefix)
    return manifest


def _kept(disk: DirectoryStore, prefix: str) -> artifacts.Manifest | None:
    """The stage's whole result, where one was made on this machine and not sent."""
    manifest = artifacts.find(disk, prefix)
    if manifest is None:
        return None
    try:
        artifacts.verify(disk, prefix, manifest)
    except (IntegrityError, OSError) as error:
        get_run_logger().warning("%s: the work is done again", error)
        return None
    get_run_logger().info("%s was finished before and is sent to the store", prefix)
    return manifest


def _make(run: Run, stage: Stage, disk: DirectoryStore, child_run: StageRun) -> artifacts.Manifest:
    """Does the work in a folder of its own and commits the result on this disk."""
    began = time.monotonic()
    with disk_of(run.work / stage.name):
        run.work.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{stage.name}-", dir=run.work))
    lock = (work / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        out = work / "out"
        if stage.make:
            out.mkdir()
            metrics = stage.make(out)
        else:
            inputs = {name: fetch(run, a, work / "inputs" / name) for name, a in stage.inputs.items()}
            request = {**stage.request, "stage": stage.name, "inputs": {n: str(p) for n, p in inputs.items()}}
            if stage.keep_checkpoints:
                request["checkpoints"] = {"root": run.store.root, "timeout_seconds": run.timeout_seconds, "disk": str(run.disk)}
                request["checkpoints"] |= {"key": stage.key, "keep": stage.keep_checkpoints}
            progress = Progress(stage.name, child_run)
            metrics = run_child(request, work, progress, stage.processes)
            progress.done()
        described = {"inputs": stage.digests, "section": stage.section, "metrics": metrics}
        return artifacts.commit(disk, stage.prefix, out, stage=stage.name, key=stage.key, seconds=time.monotonic() - began, **described)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        lock.close()


def _artifact(run: Run, stage: Stage, manifest: artifacts.Manifest, *, cached: bool, seconds: float) -> Artifact:
    uri = run.store.uri(f"{stage.prefix}/{manifest.folder}")
    common = {"stage": stage.name, "key": stage.key, "digest": manifest.digest, "metrics": manifest.metrics}
    return Artifact(**common, uri=uri, cached=cached, seconds=round(seconds, 3))


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
