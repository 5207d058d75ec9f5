"""The Prefect tasks that promote and roll back a registered model, one at a time per model."""

import contextlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task

from configs.errors import RatchetError
from configs.schema import TrackingSection
from tasks.core.tracking import promotion, registry
from tasks.core.tracking.runs import Tracking, connect
from tasks.runtime import locks
from tasks.runtime.errors import hide_tracebacks
from tasks.runtime.stage import RETRIES

WAIT_SECONDS = 180

hide_tracebacks()


@contextmanager
def model_lock(model: str) -> Iterator[None]:
    """Holds the lock of a registered model while the block runs. MLflow itself has no lock for aliases and stages.

    A holder that is killed loses the lock after a minute. Raises RatchetError when it stays taken for three minutes.
    """
    name = f"promote-{re.sub(r'[^A-Za-z0-9._-]', '-', model)}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.held(name, seconds=WAIT_SECONDS))
        except TimeoutError as error:
            raise RatchetError(
                f"the lock {name} was taken for {WAIT_SECONDS} s: "
                f"wait until the other promotion of {model} has ended, then try again"
            ) from error
        yield


@task(name="promote", task_run_name="promote-{model}", **RETRIES)
def promote_version(model: str, version: int | None) -> dict[str, Any]:
    """Makes a version the champion; without a version, the challenger.

    Returns what tasks.core.tracking.promotion.promote returns, and links.
    """
    with model_lock(model):
        tracking = connect(TrackingSection())
        return _with_links(promotion.promote(model, version, tracking), tracking)


@task(name="rollback", task_run_name="rollback-{model}", **RETRIES)
def rollback_version(model: str) -> dict[str, Any]:
    """Makes the version with alias `previous` the champion again.

    Returns what tasks.core.tracking.promotion.rollback returns, and links.
    """
    with model_lock(model):
        tracking = connect(TrackingSection())
        return _with_links(promotion.rollback(model, tracking), tracking)


def _with_links(result: dict[str, Any], tracking: Tracking) -> dict[str, Any]:
    version = registry.describe(result["model"], result["version"], tracking)
    urls = {"model_version": registry.version_url(version, tracking)}
    if result["run_id"]:
        urls["audit_run"] = tracking.run_url(result["run_id"], promotion.audit_experiment(tracking))
    return {**result, "urls": urls}
