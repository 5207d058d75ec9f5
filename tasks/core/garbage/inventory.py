"""What is in the store, and what may refer to it: objects of the forms that Ratchet writes, records of runs, and registered versions."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from pydantic import AwareDatetime, BaseModel, ValidationError

from configs.errors import IntegrityError
from tasks.core.storage.artifacts import Manifest, find
from tasks.core.storage.store import Store
from tasks.core.tracking.registry import Version

STAGES = (
    "data",
    "base",
    "evaluate_base",
    "sft",
    "evaluate_sft",
    "grpo",
    "evaluate_grpo",
    "evaluate_champion",
    "judge",
    "register",
)


FINAL = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


PREFIX = rf"(?P<prefix>(?:{'|'.join(STAGES)})/[0-9a-f]{{64}})"
OURS = re.compile(
    rf"{PREFIX}/(?P<part>manifest\.json|owner\.json|attempt-[0-9a-f]{{12}}(?=/.)|checkpoints(?=/step-\d+/.))(?:/.*)?",
    re.DOTALL,
)


RECORD = re.compile(r"runs/(?P<run>[^/]+)\.json")


class Owner(BaseModel):
    """`owner.json`: who works on a stage's key, from what."""

    flow_run: str | None = None
    inputs: dict[str, str] = {}
    created: AwareDatetime


class Record(BaseModel):
    """`runs/<id>.json`: what a pipeline run has found or begun."""

    prefixes: list[str]
    created: AwareDatetime


@dataclass
class Shelf:
    """What lies under one `<stage>/<key>/`. `manifest` is that of a whole artifact, `damaged` what can be read of one that is not."""

    parts: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    manifest: Manifest | None = None
    damaged: Manifest | None = None
    # The newest whole checkpoint's time, and when what no manifest names was last written to.
    checkpoint: datetime | None = None
    written: dict[str, datetime | None] = field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        return self.manifest is None and "manifest.json" in self.parts


@dataclass
class References:
    """What may refer to artifacts: owners and records with their bytes, the states of their runs as Prefect names them, and all versions."""

    owners: dict[str, tuple[Owner, bytes]]
    records: dict[str, tuple[Record | None, bytes]]
    states: dict[str, str]
    versions: list[Version]


class _Listing:
    """A store as one listing showed it: thousands of artifacts are looked up with one request per stage and one per manifest."""

    def __init__(self, store: Store):
        self.store, self.uri, self.get_bytes = store, store.uri, store.get_bytes
        self.sizes = {key: size for stage in STAGES for key, size in store.list(f"{stage}/").items()}
        self.keys = sorted(self.sizes)

    def list(self, prefix: str) -> dict[str, int]:
        start, end = (bisect_left(self.keys, prefix + last) for last in ("", "\U0010ffff"))
        return {key: self.sizes[key] for key in self.keys[start:end]}


def scan(store: Store) -> dict[str, Shelf]:
    """Every `<stage>/<key>` with what lies there. Raises StorageUnavailable."""
    listing = _Listing(store)
    shelves: dict[str, Shelf] = defaultdict(Shelf)
    for key in listing.keys:
        if match := OURS.fullmatch(key):
            shelves[match["prefix"]].parts[match["part"]][key] = listing.sizes[key]
    for prefix, shelf in shelves.items():
        if "manifest.json" in shelf.parts:
            shelf.manifest = find(listing, prefix)
            shelf.damaged = _readable(store, prefix) if shelf.is_damaged else None
        steps = {
            k.removesuffix("/manifest.json")
            for k in shelf.parts.get("checkpoints", ())
            if re.search(r"/step-\d+/manifest\.json$", k)
        }
        whole = [datetime.fromisoformat(m.created) for m in (find(listing, step) for step in steps) if m]
        shelf.checkpoint = max(whole, default=None)
        for part in shelf.parts:
            if (part == "checkpoints" and not shelf.checkpoint) or (
                part.startswith("attempt-") and part != (shelf.manifest and shelf.manifest.folder)
            ):
                shelf.written[part] = store.newest(f"{prefix}/{part}/")
    return dict(shelves)


def _readable(store: Store, prefix: str) -> Manifest | None:
    """What a damaged manifest says, if anything: enough to keep what it names, never to use it."""
    try:
        return Manifest.model_validate_json(store.get_bytes(f"{prefix}/manifest.json") or b"")
    except ValidationError:
        return None


def references(
    store: Store, states: Callable[[set[str]], dict[str, str]], versions: Callable[[], list[Version]]
) -> References:
    """Reads what refers to artifacts now; `states` gives the state types of those flow runs that Prefect knows.

    Raises IntegrityError for an owner.json, or the record of a run that is not over, that cannot be read: what it keeps is unknown.
    """
    owners, records = {}, {}
    for stage in STAGES:
        for key in store.list(f"{stage}/"):
            match = OURS.fullmatch(key)
            if match and key.endswith(f"{match['prefix']}/owner.json") and (said := store.get_bytes(key)) is not None:
                try:
                    owners[match["prefix"]] = Owner.model_validate_json(said), said
                except ValidationError as error:
                    raise _unreadable(store, key) from error
    for key in store.list("runs/"):
        match = RECORD.fullmatch(key)
        if match and (said := store.get_bytes(key)) is not None:
            try:
                records[match["run"]] = Record.model_validate_json(said), said
            except ValidationError:
                records[match["run"]] = None, said
    known = states({*records, *(owner.flow_run for owner, _ in owners.values() if owner.flow_run)})
    for run, (record, _) in records.items():
        if record is None and known.get(run) not in FINAL:
            raise _unreadable(store, f"runs/{run}.json")
    return References(owners, records, known, versions())


def _unreadable(store: Store, key: str) -> IntegrityError:
    return IntegrityError(
        f"{store.uri(key)} cannot be read, so what its run needs is not known and nothing is deleted: remove it once that run is over"
    )
