"""Prefect tasks that promote and roll back a registered model, one at a time per model."""

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task

from configs.errors import RatchetError
from configs.schema import TrackingSection
from tasks import locks
from tasks.core import promotion, registry
from tasks.core.tracking import PAGE, Tracking, connect
from tasks.stage import RETRIES, quiet_tracebacks

WAIT_SECONDS = 180

quiet_tracebacks()


@contextmanager
def model_lock(model: str) -> Iterator[None]:
    """Holds the one place per model of those who move its aliases and stages, on whatever machine: MLflow itself has no lock.

    A holder that is killed loses it after a minute. Raises RatchetError when it stays taken for three minutes.
    """
    name = f"promote-{re.sub(r'[^A-Za-z0-9._-]', '-', model)}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(name, seconds=WAIT_SECONDS))
        except TimeoutError as error:
            raise RatchetError(f"the lock {name} was taken for {WAIT_SECONDS} s: wait for the other promotion of {model} to end, then run it again") from error
        yield


@task(name="promote", task_run_name="promote-{model}", **RETRIES)
def promote_version(model: str, version: int | None) -> dict[str, Any]:
    """Makes the version (none: the challenger) the champion. Returns what tasks.core.promotion.promote returns, with links."""
    with model_lock(model):
        tracking = connect(TrackingSection())
        return _with_links(promotion.promote(model, version, tracking), tracking)


@task(name="rollback", task_run_name="rollback-{model}", **RETRIES)
def rollback_version(model: str) -> dict[str, Any]:
    """Makes the version with alias `previous` the champion again. Returns what tasks.core.promotion.rollback returns, with links."""
    with model_lock(model):
        tracking = connect(TrackingSection())
        return _with_links(promotion.rollback(model, tracking), tracking)


def _with_links(result: dict[str, Any], tracking: Tracking) -> dict[str, Any]:
    urls = {"model_version": registry.version_url(registry.describe(result["model"], result["version"], tracking), tracking)}
    if result["run_id"]:
        urls["audit_run"] = f"{tracking.uri}/#/experiments/{promotion.audit_experiment(tracking)}/runs/{result['run_id']}{PAGE}"
    return {**result, "urls": urls}
