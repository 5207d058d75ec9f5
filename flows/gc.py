"""Garbage collection: asks Prefect and the registry what is still referred to, shows what is not, and removes it."""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.settings import PREFECT_API_URL

from configs.errors import ConfigError, Unavailable
from configs.schema import TrackingSection
from tasks.core.garbage import inventory
from tasks.core.garbage import plan as planning
from tasks.core.garbage.plan import Item, Plan
from tasks.core.storage.files import folder_of
from tasks.core.storage.store import Store
from tasks.core.tracking import registry, runs, server

PAGE = 200  # the most flow runs that the server gives at once
COLUMNS = "{:<14} {:<12} {:<12} {:>9}  {:<25}  {}"


def collect(
    store: Store, remove: bool, checkpoints_older_than: float | None, as_json: bool, say: Callable[[str], None]
) -> None:
    """Says what is garbage, row by row, or what of it was removed, and the sum; or all of it as one JSON object. Notes go to stderr."""
    again = planner(store, checkpoints_older_than)
    plan = again()
    for note in plan.notes + [f"{store.uri(prefix)} is damaged" for prefix in plan.damaged]:
        print(f"ratchet: {note}", file=sys.stderr)
    if not as_json:
        say(COLUMNS.format("stage", "key", "what", "size", "created", "reason"))
    items = []
    for item in delete(store, plan, again) if remove else plan.items:
        items.append(item)
        if not as_json:
            say(row(item))
    say(json.dumps(summary(store.root, plan, items, remove), sort_keys=True) if as_json else total(items, remove))


def planner(store: Store, checkpoints_older_than: float | None) -> Callable[[], Plan]:
    """Lists the store once, and makes a plan, now and whenever it is called, of what refers to it by then.

    Raises ConfigError without addresses, StorageUnavailable, TrackingUnavailable, Unavailable, IntegrityError.
    """
    api = PREFECT_API_URL.value()
    if not api:
        raise ConfigError(
            "PREFECT_API_URL is not set, so nobody knows which runs are live: start the embedded stack with `ratchet up`, or set it"
        )
    if store.root.startswith("file://") and not folder_of(store.root).is_dir():
        raise ConfigError(
            f"the store's root is {store.root}, and there is no such folder: check --root or RATCHET_STORE"
        )
    mlflow = runs.connect(TrackingSection(), verify=False)
    server.check(mlflow.uri)
    states(set(), api)
    keep = None if checkpoints_older_than is None else timedelta(days=checkpoints_older_than)
    shelves = inventory.scan(store)

    def plan() -> Plan:
        refs = inventory.references(store, lambda runs: states(runs, api), lambda: registry.every_version(mlflow))
        return planning.plan(store.root, shelves, refs, datetime.now(UTC), keep)

    return plan


def states(runs: set[str], api: str) -> dict[str, str]:
    """The type of the state (`RUNNING`, ...) of those flow runs that the Prefect server knows. Raises Unavailable when it does not answer."""
    ids = [UUID(run) for run in sorted(runs) if _is_uuid(run)]
    found: dict[str, str] = {}
    try:
        httpx.get(
            f"{api}/health", timeout=10
        ).raise_for_status()  # the client itself would try for long, and raise what is no HTTP error
        with get_client(sync_client=True) as client:
            for start in range(0, len(ids), PAGE):
                wanted = FlowRunFilter(id=FlowRunFilterId(any_=ids[start : start + PAGE]))
                # One without a state was made just now.
                found |= {
                    str(r.id): r.state_type.value if r.state_type else "PENDING"
                    for r in client.read_flow_runs(flow_run_filter=wanted, limit=PAGE)
                }
    except (httpx.HTTPError, RuntimeError) as error:
        raise Unavailable(
            f"the Prefect server at {api} does not say which runs are live ({error}): start it (`ratchet up`), or set PREFECT_API_URL to one that runs"
        ) from error
    return found


def _is_uuid(run: str) -> bool:
    try:
        return str(UUID(run)) == run
    except ValueError:
        return False


def delete(store: Store, listed: Plan, again: Callable[[], Plan]) -> Iterator[Item]:
    """Removes what was listed and is garbage in a new plan too, and yields each item when it is gone; may be killed and repeated at any moment.

    Manifests go first, and `again` is asked once more when they are gone: a run that found one before has said so by then, and gets it back;
    a run that looks later finds none and does the stage anew. Raises what `again` raises, with every manifest back in its place.
    """
    doomed = _both(listed, again())
    manifests = {key: store.get_bytes(key) for item in doomed for key in item.keys if key.endswith("/manifest.json")}
    restore = set(manifests)
    try:
        store.delete(sorted(manifests))
        doomed = _both(Plan(doomed), again())
        restore -= {key for item in doomed for key in item.keys}
    finally:
        for key in restore:
            if manifests[key] is not None and store.get_bytes(key) is None:
                store.put_bytes(key, manifests[key])
    for item in doomed:
        first = item.keys[0]
        if item.what == "attempt" and first.split("/")[2].encode() in (
            store.get_bytes(f"{item.stage}/{item.key}/manifest.json") or b""
        ):
            continue  # it was published since
        if item.seen is not None and store.get_bytes(first) != item.seen:
            continue  # a run has begun here, or goes on
        store.delete(item.keys)
        yield item


def _both(first: Plan, second: Plan) -> list[Item]:
    """The items of the second that are in the first too."""
    named = {(i.what, i.keys[0]) for i in first.items}
    return [i for i in second.items if (i.what, i.keys[0]) in named]


def row(item: Item) -> str:
    """An item as a line of the table."""
    return COLUMNS.format(item.stage, item.key[:12], item.what, size(item.size), item.created[:25], item.reason)


def size(count: float) -> str:
    """Bytes for people: `999 B`, `1.5 KB`, in powers of 1000."""
    units = iter(("B", "KB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.95 and unit != "TB":
        count, unit = count / 1000, next(units)
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def total(items: list[Item], deleted: bool) -> str:
    """The last line: how many, how large, and whether they are gone."""
    end = (
        "deleted" if deleted else "nothing was deleted: repeat with --delete" if items else "there is nothing to delete"
    )
    return f"{len(items)} item{'' if len(items) == 1 else 's'}, {size(sum(i.size for i in items))}: {end}"


def summary(root: str, plan: Plan, items: list[Item], deleted: bool) -> dict:
    """The same as one object: items without their objects' names."""
    rows = [i.model_dump(exclude={"keys", "seen"}) for i in items]
    whole = {"root": root, "items": rows, "count": len(items), "bytes": sum(i.size for i in items), "deleted": deleted}
    return {**whole, "damaged": plan.damaged, "notes": plan.notes}
