"""The flows that promote a model version to Production and roll a promotion back."""

from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed, State

from tasks.promote import promote_version, rollback_version


@flow(name="promote")
def promote(model: str, version: int | None = None) -> State:
    """Promotes a version that passed its gates: it becomes the champion, in Production, and the old one is archived.

    Args:
        model: Name of the registered model.
        version: Number of the version. If empty, the challenger (the version in Staging) is promoted.
    """
    return _report(promote_version(model, version), "Promoted")


@flow(name="rollback")
def rollback(model: str) -> State:
    """Undoes the last promotion: the champion before it becomes the champion again, and the present one is archived.

    Args:
        model: Name of the registered model.
    """
    return _report(rollback_version(model), "RolledBack")


def _report(result: dict[str, Any], name: str) -> State:
    """The final state. Its message and links are also shown as a markdown artifact of the flow run."""
    before = "none" if result["previous"] is None else f"version {result['previous']}"
    rows = [
        ("model", result["model"]),
        ("from", before),
        ("to", f"version {result['version']}"),
        ("changed", "yes" if result["changed"] else "no"),
    ]
    table = "\n".join(f"| {field} | {value} |" for field, value in rows)
    links = "\n".join(f"- [{what.replace('_', ' ')}]({url})" for what, url in result["urls"].items())
    message = result["message"][0].upper() + result["message"][1:] + "."
    create_markdown_artifact(
        f"{message}\n\n| | |\n|---|---|\n{table}\n\n{links}\n", key="promotion", description=message
    )
    return Completed(name=name if result["changed"] else "Unchanged", message=message, data=result)
