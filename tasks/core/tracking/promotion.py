"""Promotion and rollback of a registered model, each read back and with an audit run of its own."""

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
    mirror,
    stages,
)
from tasks.core.tracking.runs import Tracking
from tasks.core.tracking.server import experiment_id, mlflow_errors

PROMOTIONS = "ratchet-promotions"


def promote(model: str, version: int | None, tracking: Tracking) -> dict[str, Any]:
    """Makes a version (none: the challenger) the champion, in Production; the champion before it becomes `previous`, Archived.

    Not safe beside another promotion of the same model: MLflow has no compare-and-swap, so the caller holds a lock (tasks/promote.py).
    A promotion that was cut off is completed by another. Returns model, version, previous, changed, message, run_id. Raises BadInput for what
    may not be promoted, IntegrityError for a model that is no longer the one that was registered, TrackingUnavailable, and RatchetError when the
    registry does not hold afterwards what was asked.
    """
    now = aliases(model, tracking)
    number = version if version is not None else now.get(CHALLENGER)
    if number is None:
        raise BadInput(
            f"{model} has no version with alias {CHALLENGER}: give a version, or train one that passes its gates"
        )
    candidate, old = describe(model, number, tracking), now.get(CHAMPION)
    if number == old:
        with mlflow_errors(f"complete the promotion of version {number} of {model!r}", tracking.uri):
            if now.get(CHALLENGER) == number:
                tracking.client.delete_registered_model_alias(model, CHALLENGER)
            mirror(model, tracking)
            _verify(model, number, now.get(PREVIOUS), tracking)
        return _outcome(
            model, number, now.get(PREVIOUS), False, f"version {number} of {model} is the champion already", None
        )
    if not candidate.passed:
        status = candidate.tags.get(STATUS_TAG, "missing")
        raise BadInput(
            f"version {number} of {model} has {STATUS_TAG} {status} and must have passed: promote one that passed its gates"
        )
    check_bytes(candidate)
    with _audit("promote", model, number, old, tracking) as run_id:
        # `previous` first: wherever this is cut off, the old champion is still named, and promoting again completes it.
        if old is not None:
            tracking.client.set_registered_model_alias(model, PREVIOUS, str(old))
        tracking.client.set_registered_model_alias(model, CHAMPION, str(number))
        if now.get(CHALLENGER) == number:
            tracking.client.delete_registered_model_alias(model, CHALLENGER)
        mirror(model, tracking)
        _verify(model, number, old, tracking)
    came = f" in place of version {old}" if old is not None else ""
    return _outcome(model, number, old, True, f"version {number} of {model} is the champion now{came}", run_id)


def rollback(model: str, tracking: Tracking) -> dict[str, Any]:
    """Undoes the last promotion: `previous` is the champion again, in Production, and the champion goes to Archived without an alias.

    `previous` then names the version before that, so that rolling back goes on. Same result, errors and need of a lock as `promote`.
    """
    now = aliases(model, tracking)
    champion, back = now.get(CHAMPION), now.get(PREVIOUS)
    if back is None:
        raise BadInput(
            f"{model} has no version with alias {PREVIOUS}: there is nothing to go back to; promote a version by its number"
        )
    noted = describe(model, back, tracking).tags.get("promotion.previous", "")
    older = (
        int(noted)
        if noted.isdigit() and int(noted) not in (back, champion) and _exists(model, int(noted), tracking)
        else None
    )
    with _audit("rollback", model, back, champion, tracking) as run_id:
        # `previous` last: where this is cut off, both aliases name the same version, and rolling back again completes it.
        tracking.client.set_registered_model_alias(model, CHAMPION, str(back))
        if older is None:
            tracking.client.delete_registered_model_alias(model, PREVIOUS)
        else:
            tracking.client.set_registered_model_alias(model, PREVIOUS, str(older))
        mirror(model, tracking)
        _verify(model, back, older, tracking)
    gone = f" in place of version {champion}" if champion != back else ", for a change that had been cut off is undone"
    return _outcome(
        model, back, champion, champion != back, f"version {back} of {model} is the champion again{gone}", run_id
    )


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


def _exists(model: str, number: int, tracking: Tracking) -> bool:
    try:
        describe(model, number, tracking)
    except BadInput:
        return False
    return True


def _verify(model: str, champion: int, previous: int | None, tracking: Tracking) -> None:
    """Reads back. Raises RatchetError unless this version alone is champion and in Production."""
    now = aliases(model, tracking)
    production = [number for number, stage in stages(model, tracking).items() if stage == "Production"]
    if now.get(CHAMPION) != champion or now.get(PREVIOUS) != previous or production != [champion]:
        raise RatchetError(
            f"the registry does not hold what was asked: champion of {model} should be version {champion}, previous {previous}, but aliases are {now} "
            f"and in Production are {production}: something else changes this model; run it again"
        )


def audit_experiment(tracking: Tracking) -> str:
    """Id of the experiment that holds one run per promotion. Raises TrackingUnavailable or BadInput."""
    return experiment_id(tracking.client, PROMOTIONS, tracking.uri)


@contextlib.contextmanager
def _audit(action: str, model: str, version: int, previous: int | None, tracking: Tracking) -> Iterator[str]:
    """One run in the experiment of promotions around the change, FAILED when it failed, and tags on the version."""
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
            # A rollback keeps what the version was promoted over, so that going back can go on.
            noted = {"promotion.run_id": run_id, "promotion.at": at}
            noted |= {"promotion.previous": what["previous"]} if action == "promote" else {}
            for name, value in noted.items():
                client.set_model_version_tag(model, str(version), name, value)
        except BaseException:
            with contextlib.suppress(Exception):  # the error under way is the one to show
                client.set_terminated(run_id, "FAILED")
            raise
        client.set_terminated(run_id, "FINISHED")
