"""The start and the end of a pipeline run: its configuration, its connections, and its MLflow parent run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.runtime import flow_run
from prefect.states import State

from configs.errors import ConfigError, IntegrityError
from configs.loading import load
from configs.schema import RunConfig
from tasks.core.storage.store import open_store
from tasks.core.tracking import runs, stage_links
from tasks.runtime.errors import hide_tracebacks
from tasks.runtime.stage import RETRIES, Artifact, Run
from tasks.runtime.work_folder import remove_abandoned
from tasks.runtime.worker_watch import end_with_worker

# How often one run redoes a damaged artifact. More damage than stages means that the store cannot be used.
MOST_DAMAGED = 9
# How long a run waits at its end for curves that an MLflow outage has delayed. The next run sends what is left.
SETTLE_SECONDS = 5.0

hide_tracebacks()


def configure(preset: str | None, config: RunConfig | dict | None, overrides: dict[str, Any] | None) -> RunConfig:
    """The configuration of the run: a preset (`tiny` by default) or a whole configuration, with overrides applied.

    Raises ConfigError.
    """
    if preset and config is not None:
        raise ConfigError(f"preset is {preset} and config is given too: set preset to none, or remove config")
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    return load((preset or "tiny") if values is None else values, overrides)


@task(name="begin", task_run_name="begin", **RETRIES)
def begin(cfg: RunConfig) -> Run:
    """Connects to the store and to MLflow, which must both answer, and opens the parent run.

    A Retry of the same flow run continues the same parent run.
    """
    end_with_worker()
    store = open_store(cfg.storage.root, cfg.storage.timeout_seconds)
    store.check()
    mlflow = runs.connect(cfg.tracking)
    tags = {"ratchet.store": store.root, "ratchet.prefect": flow_run.ui_url or str(flow_run.id)}
    parent = mlflow.parent(str(flow_run.id), flow_run.name, cfg.model_dump(mode="json"), tags)
    home = Path(os.environ.get("RATCHET_HOME", ".ratchet")).absolute()
    work, outbox = home / "work", home / "outbox"
    remove_abandoned(work)
    mlflow.deliver_outbox(outbox)
    return Run(str(flow_run.id), store, mlflow, parent, work, cfg.storage.timeout_seconds, outbox)


class Stages:
    """The artifacts of the run so far, by stage name."""

    def __init__(self) -> None:
        self.done: dict[str, Artifact] = {}

    def add(self, state: State) -> Artifact:
        """Adds and returns the artifact that a stage's state carries; raises what the stage raised."""
        artifact = state.result()
        self.done[artifact.stage] = artifact
        return artifact


def end_parent_run(
    run: Run,
    stages: Stages,
    status: str,
    metrics: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    report: str | None = None,
) -> None:
    """Ends the MLflow parent run. It links each stage to the MLflow run that made the artifact, now or earlier."""
    if run.parent:
        links = stage_links.stage_tags(run.tracking, run.parent, list(stages.done.values()))
        run.tracking.finish(run.parent, status, metrics or {}, {**links, **(tags or {})}, report, run.outbox)


@contextmanager
def tracked(run: Run) -> Iterator[Stages]:
    """Yields an empty Stages. When the block raises, ends the MLflow parent run as FAILED or KILLED.

    When the block succeeds, it has ended the parent run itself (tasks/report.py).
    """
    stages = Stages()
    try:
        yield stages
    except Exception:
        end_parent_run(run, stages, "FAILED")
        raise
    except BaseException:
        run.tracking.finish(run.parent, "KILLED", {}, outbox=run.outbox)
        raise
    finally:
        run.tracking.deliver_outbox(run.outbox)
        run.tracking.settle(SETTLE_SECONDS)


def redo_damaged(pipeline: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the pipeline. When it finds a stored artifact damaged, calls it again: all other stages are cached.

    Raises IntegrityError when it finds damage more often than a pipeline has stages.
    """
    for left in reversed(range(MOST_DAMAGED)):
        try:
            return pipeline(*arguments)
        except IntegrityError as error:
            if not left:
                raise
            get_run_logger().warning("%s: its stage is redone, all others are kept", error)
