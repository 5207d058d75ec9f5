"""Prefect tasks that promote and roll back a registered model, one at a time per model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError

from configs.errors import RatchetError
from configs.schema import TrackingSection
from tasks.core import promotion, registry
from tasks.core.tracking import PAGE, Tracking, connect
from tasks.stage import RETRIES, quiet_tracebacks

WAIT_SECONDS, LEASE_SECONDS = 180, 60

quiet_tracebacks()


@contextmanager
def model_lock(model: str) -> Iterator[None]:
    """Holds the one place per model of those who move its aliases and stages, on whatever machine: MLflow itself has no lock.

    A holder that is killed loses it after a minute. Raises RatchetError when it stays taken for three minutes.
    """
    name = f"promote-{re.sub(r'[^A-Za-z0-9._-]', '-', model)}"
    _make_limit(name)
    entered = False
    try:
        with concurrency(name, timeout_seconds=WAIT_SECONDS, lease_duration=LEASE_SECONDS, strict=True):
            entered = True
            yield
    except TimeoutError as error:
        if entered:
            raise
        raise RatchetError(f"the lock {name} was taken for {WAIT_SECONDS} s: wait for the other promotion of {model} to end, then run it again") from error


def _make_limit(name: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            try:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
            except (ObjectAlreadyExists, PrefectHTTPStatusError):  # another one made it just now, or this raises
                client.read_global_concurrency_limit_by_name(name)


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
