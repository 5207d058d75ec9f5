"""Links from a pipeline's MLflow runs to the stage runs that made its artifacts, now or earlier.

A stage that is cached has no MLflow run in this pipeline run. The run that made its artifact has the tags
`ratchet.stage`, `ratchet.key` and, once it has ended, `ratchet.uri`.
"""

import re
from typing import Any, NamedTuple, Protocol

from tasks.core.tracking.run_client import KEY_TAG, PARENT_TAG, STAGE_TAG, tag_filter
from tasks.core.tracking.runs import PAGE, Tracking, best_effort

URI_TAG = "ratchet.uri"
# MLflow shows this tag as the run's description, in markdown.
DESCRIPTION_TAG = "mlflow.note.content"
LOOKUP_SECONDS = 5.0
MAX_EXPERIMENTS = 1000
HEAD = "| stage | done by run | cached | seconds |\n|---|---|---|---|\n"


class StageResult(Protocol):
    """What a stage returns: tasks.runtime.stage.Artifact."""

    stage: str
    key: str
    uri: str
    cached: bool
    seconds: float
    mlflow_run: str | None


class Link(NamedTuple):
    """A stage's run: its id, the id of its experiment, and the name of the pipeline run that it belongs to."""

    run_id: str
    experiment: str
    pipeline: str


def find_run_id(tracking: Tracking, result: StageResult) -> str | None:
    """The id of the MLflow run that made the artifact, or None if MLflow does not know it or does not answer."""
    if result.mlflow_run:
        return result.mlflow_run
    link = _links(tracking, "", [result]).get(result.stage)
    return link.run_id if link else None


def stage_tags(tracking: Tracking, parent_run_id: str, results: list[StageResult]) -> dict[str, str]:
    """Tags for the parent run of a pipeline run.

    Per stage, they are the address of the artifact, whether it was cached, and the id of the run that made it. The
    description is a table of the stages with links to these runs. If MLflow does not answer, links are missing.
    """
    links = _links(tracking, parent_run_id, results)
    tags, rows = {}, []
    for result in results:
        link, name = links.get(result.stage), f"ratchet.{result.stage}"
        tags |= {f"{name}.uri": result.uri, f"{name}.cached": str(result.cached)}
        tags |= {f"{name}.run": link.run_id} if link else {}
        run = _markdown(link) if link else "unknown"
        rows.append(f"| {result.stage} | {run} | {'yes' if result.cached else 'no'} | {result.seconds:.1f} |\n")
    return {**tags, DESCRIPTION_TAG: HEAD + "".join(rows)} if rows else tags


def _links(tracking: Tracking, parent_run_id: str, results: list[StageResult]) -> dict[str, Link]:
    """Stage -> link, for the stages whose run is known or found."""
    known = {r.stage: Link(r.mlflow_run, tracking.experiment(), "this run") for r in results if r.mlflow_run}
    unknown = [r for r in results if not r.mlflow_run]
    if not unknown:
        return known

    def search() -> dict[str, Link]:
        return _search(tracking, parent_run_id, unknown)

    what = f"find the runs of {', '.join(r.stage for r in unknown)}"
    return {**known, **best_effort(search, what, {}, LOOKUP_SECONDS)}


def _search(tracking: Tracking, parent_run_id: str, results: list[StageResult]) -> dict[str, Link]:
    client = tracking.client
    # An earlier pipeline run may have logged to another experiment.
    experiments = [e.experiment_id for e in client.search_experiments(max_results=MAX_EXPERIMENTS)]
    found = {r.stage: run for r in results if (run := _run_that_made(client, experiments, r)) is not None}
    parents = {stage: run.data.tags.get(PARENT_TAG) for stage, run in found.items()}
    names = _names(client, experiments, set(filter(None, parents.values()))) | {parent_run_id: "this run"}
    return {
        stage: Link(run.info.run_id, run.info.experiment_id, names.get(parents[stage], run.info.run_id[:8]))
        for stage, run in found.items()
    }


def _run_that_made(client: Any, experiments: list[str], result: StageResult) -> Any:
    """The run whose tags name the artifact.

    A process that is killed after the upload leaves a run without this tag. Without a run that names the artifact, the
    newest of those is taken.
    """
    query = tag_filter({STAGE_TAG: result.stage, KEY_TAG: result.key})
    runs = client.search_runs(experiments, query, max_results=100, order_by=["attributes.start_time DESC"])
    named = [run for run in runs if run.data.tags.get(URI_TAG) == result.uri]
    unnamed = [run for run in runs if URI_TAG not in run.data.tags and run.info.status != "FAILED"]
    return next(iter(named + unnamed), None)


def _names(client: Any, experiments: list[str], run_ids: set[str]) -> dict[str, str]:
    """Run id -> name, for the runs that still exist."""
    if not run_ids:
        return {}
    ids = ", ".join(f"'{run_id}'" for run_id in sorted(run_ids))
    return {
        run.info.run_id: run.info.run_name for run in client.search_runs(experiments, f"attributes.run_id IN ({ids})")
    }


def _markdown(link: Link) -> str:
    name = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", link.pipeline)
    # The link is relative, so that it works under every name of the server.
    return f"[{name}](#/experiments/{link.experiment}/runs/{link.run_id}{PAGE})"
