"""The report of a finished run: artifacts in Prefect, the MLflow parent run, and the summary that the flow returns."""

import tempfile
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from tasks.core.judging import report
from tasks.core.judging.gates import Comparison, Verdict
from tasks.core.tracking import registry
from tasks.judge import compare_stored
from tasks.runtime.pipeline_run import Stages, end_parent_run
from tasks.runtime.progress import numbers
from tasks.runtime.stage import Artifact, Run, fetch


def publish_report(run: Run, stages: Stages) -> dict[str, Any]:
    """Publishes report and samples in Prefect and MLflow, ends the MLflow parent run, and returns the summary."""
    measured = {role: stages.done[f"evaluate_{role}"] for role in report.ROLES if f"evaluate_{role}" in stages.done}
    metrics = {role: artifact.metrics for role, artifact in measured.items()}
    verdict = Verdict.model_validate(stages.done["judge"].metrics["verdict"])
    registered = stages.done["register"].metrics
    version = registry.describe(registered["name"], registered["version"], run.tracking)
    text = report.markdown(metrics, verdict, _comparisons(run, stages.done["judge"], measured))
    urls = {
        "prefect": flow_run.ui_url,
        "mlflow_run": run.tracking.run_url(run.parent),
        "model_version": registry.version_url(version, run.tracking),
        "store": run.store.root,
    }
    _show(run, stages.done["judge"], text, version, urls)
    _finish_mlflow(run, stages, metrics, verdict, text)
    return {
        "flow_run_id": str(flow_run.id),
        "state": "Completed" if verdict.passed else "Rejected",
        "stages": {a.stage: a.model_dump(include={"key", "uri", "cached", "seconds"}) for a in stages.done.values()},
        "metrics": metrics,
        "verdict": verdict.model_dump(mode="json"),
        "model": version.model_dump(include={"name", "version", "stage", "aliases"}),
        "urls": urls,
    }


def _comparisons(run: Run, judged: Artifact, measured: dict[str, Artifact]) -> list[Comparison]:
    comparisons = [Comparison.model_validate(c) for c in judged.metrics["comparisons"]]
    if "champion" in measured and "champion" not in [c.rival for c in comparisons]:
        comparisons.append(compare_stored(run, measured["grpo"], measured["champion"], "champion"))
    return comparisons


def _show(run: Run, judged: Artifact, text: str, version: registry.Version, urls: dict[str, Any]) -> None:
    """Creates the markdown artifacts `samples` and `report` of the flow run."""
    with tempfile.TemporaryDirectory(prefix="ratchet-samples-") as folder:
        fetch(run, judged, Path(folder), only=lambda path: path == "samples.md")
        samples = (Path(folder) / "samples.md").read_text(encoding="utf-8")
    create_markdown_artifact(samples, key="samples", description="What the models wrote for the same prompts")
    links = "\n".join(f"- {name.replace('_', ' ')}: {url}" for name, url in urls.items())
    aliases = ", ".join(version.aliases) or "none"
    registered = f"Version {version.version} of {version.name}, stage {version.stage}, aliases {aliases}."
    create_markdown_artifact(
        f"{text}\n{registered}\n\n{links}\n",
        key="report",
        description="Base, SFT and GRPO on the same prompts, and the verdict",
    )


def _finish_mlflow(run: Run, stages: Stages, metrics: dict[str, Any], verdict: Verdict, text: str) -> None:
    final = {f"{role}.{name}": value for role, values in metrics.items() for name, value in numbers(values).items()}
    tags = {"gate.status": "passed" if verdict.passed else "rejected"}
    end_parent_run(run, stages, "FINISHED", final, tags, text)
