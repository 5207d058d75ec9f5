"""Promotion and rollback of a registered model. Each is read back afterwards and has an audit run."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from configs.errors import BadInput, RatchetError
from tasks.core.tracking.registry import (
    CHALLENGER,
    CHAMPION,
    PREVIOUS,
    STATUS_TAG,
    aliases,
    check_bytes,
    describe,
    stages,
    update_stages,
)
from tasks.core.tracking.runs import Tracking
from tasks.core.tracking.server import experiment_id, mlflow_errors

AUDIT_EXPERIMENT = "ratchet-promotions"


def promote(model: str, version: int | None, tracking: Tracking) -> dict[str, Any]:
    """Makes a version the champion, in Production. Without a version, promotes the challenger.

    The champion before it becomes `previous`, Archived. Promoting again completes a promotion that was interrupted.
    The caller must hold the model's lock (tasks/promote.py), because MLflow has no compare-and-swap.

    Returns model, version, previous, changed, message and run_id. Raises BadInput if the version may not be promoted,
    IntegrityError if the stored model differs from the registered one, TrackingUnavailable, and RatchetError if the
    registry does not show the promotion afterwards.
    """
    now = aliases(model, tracking)
    number = version if version is not None else now.get(CHALLENGER)
    if number is None:
        raise BadInput(
            f"{model} has no version with alias {CHALLENGER}: give a version, or train one that passes its gates"
        )
    candidate, old = describe(model, number, tracking), now.get(CHAMPION)
    if number == old:
        return _complete(model, number, now, tracking)
    if not candidate.passed:
        status = candidate.tags.get(STATUS_TAG, "missing")
        raise BadInput(
            f"version {number} of {model} has {STATUS_TAG} {status} and must have passed: "
            "promote a version that passed its gates"
        )
    check_bytes(candidate)
    with _audit("promote", model, number, old, tracking) as run_id:
        # `previous` is set first, so that an interrupted promotion never loses the old champion.
        if old is not None:
            tracking.client.set_registered_model_alias(model, PREVIOUS, str(old))
        tracking.client.set_registered_model_alias(model, CHAMPION, str(number))
        if now.get(CHALLENGER) == number:
            tracking.client.delete_registered_model_alias(model, CHALLENGER)
        update_stages(model, tracking)
        _verify(model, number, old, tracking)
    replaced = f" and replaces version {old}" if old is not None else ""
    message = f"version {number} of {model} is the champion now{replaced}"
    return _outcome(model, number, old, True, message, run_id)


def rollback(model: str, tracking: Tracking) -> dict[str, Any]:
    """Undoes the last promotion: `previous` becomes the champion again, and the champion is archived without an alias.

    `previous` then names the version before that, so that another rollback goes back further. The result, the errors
    and the lock are those of `promote`.
    """
    now = aliases(model, tracking)
    champion, back = now.get(CHAMPION), now.get(PREVIOUS)
    if back is None:
        raise BadInput(
            f"{model} has no version with alias {PREVIOUS}, so there is no version to go back to: "
            "promote a version by its number"
        )
    older = _version_before(model, back, champion, tracking)
    with _audit("rollback", model, back, champion, tracking) as run_id:
        # `previous` is changed last. After an interruption both aliases name one version, and a rollback completes it.
        tracking.client.set_registered_model_alias(model, CHAMPION, str(back))
        if older is None:
            tracking.client.delete_registered_model_alias(model, PREVIOUS)
        else:
            tracking.client.set_registered_model_alias(model, PREVIOUS, str(older))
        update_stages(model, tracking)
        _verify(model, back, older, tracking)
    replaced = f" and replaces version {champion}" if champion != back else ": an interrupted change is undone"
    message = f"version {back} of {model} is the champion again{replaced}"
    return _outcome(model, back, champion, champion != back, message, run_id)


def audit_experiment(tracking: Tracking) -> str:
    """The id of the experiment with one run per promotion or rollback. Raises TrackingUnavailable or BadInput."""
    return experiment_id(tracking.client, AUDIT_EXPERIMENT, tracking.uri)


def _complete(model: str, number: int, now: dict[str, int], tracking: Tracking) -> dict[str, Any]:
    """Completes a promotion that was interrupted after the version became the champion."""
    with mlflow_errors(f"complete the promotion of version {number} of {model!r}", tracking.uri):
        if now.get(CHALLENGER) == number:
            tracking.client.delete_registered_model_alias(model, CHALLENGER)
        update_stages(model, tracking)
        _verify(model, number, now.get(PREVIOUS), tracking)
    message = f"version {number} of {model} is the champion already"
    return _outcome(model, number, now.get(PREVIOUS), False, message, None)


def _version_before(model: str, version: int, champion: int | None, tracking: Tracking) -> int | None:
    """The version that `version` replaced when it was promoted, if it still exists."""
    noted = describe(model, version, tracking).tags.get("promotion.previous", "")
    if not noted.isdigit() or int(noted) in (version, champion):
        return None
    try:
        return describe(model, int(noted), tracking).version
    except BadInput:
        return None


def _outcome(
    model: str, version: int, previous: int | None, changed: bool, message: str, run_id: str | None
) -> dict[str, Any]:
    return {
        "model": model,
        "version": version,
        "previous": previous,
        "changed": changed,
        "message": message,
        "run_id": run_id,
    }


def _verify(model: str, champion: int, previous: int | None, tracking: Tracking) -> None:
    """Reads the registry. Raises RatchetError unless this version alone is the champion and in Production."""
    now = aliases(model, tracking)
    production = [number for number, stage in stages(model, tracking).items() if stage == "Production"]
    if now.get(CHAMPION) != champion or now.get(PREVIOUS) != previous or production != [champion]:
        raise RatchetError(
            f"the registry does not show the change: champion of {model} should be version {champion} and previous "
            f"{previous}, but the aliases are {now} and the versions in Production are {production}: "
            "another program changes this model; run it again"
        )


@contextlib.contextmanager
def _audit(action: str, model: str, version: int, previous: int | None, tracking: Tracking) -> Iterator[str]:
    """Records the change in the block as an audit run, FAILED if the block raises, and as tags of the version."""
    client = tracking.client
    at = datetime.now(UTC).isoformat(timespec="seconds")
    what = {
        "action": action,
        "model": model,
        "version": str(version),
        "previous": "" if previous is None else str(previous),
    }
    with mlflow_errors(f"{action} version {version} of {model!r}", tracking.uri):
        experiment = audit_experiment(tracking)
        tags = {**{f"promotion.{k}": v for k, v in what.items()}, "promotion.at": at, "mlflow.source.name": "ratchet"}
        run_id = client.create_run(experiment, tags=tags, run_name=f"{action}-{model}-{version}").info.run_id
        for name, value in what.items():
            client.log_param(run_id, name, value)
        try:
            yield run_id
            noted = {"promotion.run_id": run_id, "promotion.at": at}
            # A rollback keeps `promotion.previous`, because the next rollback needs it.
            noted |= {"promotion.previous": what["previous"]} if action == "promote" else {}
            for name, value in noted.items():
                client.set_model_version_tag(model, str(version), name, value)
        except BaseException:
            with contextlib.suppress(Exception):  # the error that is being raised is the important one
                client.set_terminated(run_id, "FAILED")
            raise
        client.set_terminated(run_id, "FINISHED")
