"""What frames a run of the pipeline: opening the store and MLflow before the first stage, and the summary after the last."""

import os
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.states import State

from configs.errors import ConfigError, IntegrityError
from configs.loading import load
from configs.schema import RunConfig
from tasks.alive import die_with_worker
from tasks.core import registry, report, tracking
from tasks.core.gates import Comparison, Verdict
from tasks.core.store import open_store
from tasks.evaluate import against
from tasks.progress import numbers
from tasks.stage import RETRIES, Artifact, Run, fetch, quiet_tracebacks, sweep

# Stages whose artifacts may turn out damaged in one run; more is a store that cannot be used.
MOST_DAMAGED = 9
# What a run waits at its end for curves that an outage of MLflow held up; what is not delivered then, the next run delivers.
SETTLE_SECONDS = 5.0

quiet_tracebacks()


def configure(preset: str | None, config: RunConfig | dict | None, overrides: dict[str, Any] | None) -> RunConfig:
    """The run's configuration: a preset (tiny unless another is named) or a whole configuration, with overrides. Raises ConfigError."""
    if preset and config is not None:
        raise ConfigError(f"preset is {preset} and config is given too: set preset to none, or take config out")
    values = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
    return load((preset or "tiny") if values is None else values, overrides)


@task(name="begin", task_run_name="begin", **RETRIES)
def begin(cfg: RunConfig) -> Run:
    """Opens the store and MLflow, which must answer, and the parent run; a Retry of the same flow run goes on in the same one."""
    die_with_worker()
    store = open_store(cfg.storage.root, cfg.storage.timeout_seconds)
    store.check()
    mlflow = tracking.connect(cfg.tracking)
    tags = {"ratchet.store": store.root, "ratchet.prefect": flow_run.ui_url or str(flow_run.id)}
    parent = mlflow.parent(str(flow_run.id), flow_run.name, cfg.model_dump(mode="json"), tags)
    home = Path(os.environ.get("RATCHET_HOME", ".ratchet")).absolute()
    work, spool = home / "work", home / "spool"
    sweep(work)
    mlflow.deliver_spooled(spool)
    return Run(str(flow_run.id), store, mlflow, parent, work, cfg.storage.timeout_seconds, spool)


class Stages:
    """The artifacts of the run so far, and at its end the summary."""

    def __init__(self) -> None:
        self.done: dict[str, Artifact] = {}
        self.summary: dict[str, Any] = {}

    def add(self, state: State) -> Artifact:
        """The artifact that a stage's state carries; raises what the stage raised."""
        artifact = state.result()
        self.done[artifact.stage] = artifact
        return artifact


@contextmanager
def session(run: Run, cfg: RunConfig):
    """Yields Stages; when all are done, reports in Prefect and MLflow and fills the summary; otherwise closes the parent run as FAILED or KILLED."""
    stages = Stages()
    try:
        yield stages
        _report(run, cfg, stages)
    except Exception:
        run.tracking.finish(run.parent, "FAILED", {}, spool=run.spool)
        raise
    except BaseException:
        run.tracking.finish(run.parent, "KILLED", {}, spool=run.spool)
        raise
    finally:
        run.tracking.deliver_spooled(run.spool)
        run.tracking.settle(SETTLE_SECONDS)


def mended(pipeline: Callable[..., Any], *arguments: Any) -> Any:
    """What the pipeline gives. Where it finds a stored artifact damaged it is begun again: that stage is redone, and all others are cached.

    Raises IntegrityError when damage is found more often than a pipeline has stages.
    """
    for left in reversed(range(MOST_DAMAGED)):
        try:
            return pipeline(*arguments)
        except IntegrityError as error:
            if not left:
                raise
            get_run_logger().warning("%s: its stage is redone, all others are kept", error)


def _report(run: Run, cfg: RunConfig, stages: Stages) -> None:
    measured = {role: stages.done[f"evaluate_{role}"] for role in report.ROLES if f"evaluate_{role}" in stages.done}
    metrics = {role: artifact.metrics for role, artifact in measured.items()}
    verdict = Verdict.model_validate(stages.done["judge"].metrics["verdict"])
    registered = stages.done["register"].metrics
    version = registry.describe(registered["name"], registered["version"], run.tracking)
    comparisons = [Comparison.model_validate(c) for c in stages.done["judge"].metrics["comparisons"]]
    if "champion" in measured and "champion" not in [c.rival for c in comparisons]:
        comparisons.append(against(run, measured["grpo"], measured["champion"], "champion"))
    text = report.markdown(metrics, verdict, comparisons)
    with tempfile.TemporaryDirectory(prefix="ratchet-samples-") as folder:
        samples = (fetch(run, stages.done["judge"], Path(folder), lambda path: path == "samples.md") / "samples.md").read_text(encoding="utf-8")
    create_markdown_artifact(samples, key="samples", description="what base, SFT and GRPO wrote for the same prompts")
    urls = {
        "prefect": flow_run.ui_url,
        "mlflow_run": run.tracking.run_url(run.parent),
        "model_version": registry.version_url(version, run.tracking),
        "store": run.store.root,
    }
    links = "\n".join(f"- {name.replace('_', ' ')}: {url}" for name, url in urls.items())
    where = f"Version {version.version} of {version.name}, stage {version.stage}, aliases {', '.join(version.aliases) or 'none'}."
    create_markdown_artifact(f"{text}\n{where}\n\n{links}\n", key="report", description="base, SFT and GRPO on the same prompts, and the verdict")
    flat = {f"{role}.{name}": value for role, values in metrics.items() for name, value in numbers(values).items()}
    tags = {f"ratchet.{a.stage}.{k}": str(v) for a in stages.done.values() for k, v in (("uri", a.uri), ("cached", a.cached))}
    run.tracking.finish(run.parent, "FINISHED", flat, {**tags, "gate.status": "passed" if verdict.passed else "rejected"}, text, spool=run.spool)
    stages.summary = {
        "flow_run_id": str(flow_run.id),
        "state": "Completed" if verdict.passed else "Rejected",
        "stages": {a.stage: a.model_dump(include={"key", "uri", "cached", "seconds"}) for a in stages.done.values()},
        "metrics": metrics,
        "verdict": verdict.model_dump(mode="json"),
        "model": {"name": version.name, "version": version.version, "stage": version.stage, "aliases": version.aliases},
        "urls": urls,
    }
