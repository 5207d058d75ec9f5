"""What in the store no live run, registered version or kept checkpoint refers to.

Only objects of the forms that Ratchet writes, under its own stages and `runs/`, are ever looked at: a bucket may be shared. The order of reading
is what makes the answer safe: objects first, then the records of runs, then the runs' states, then the registry. What a run takes into use or
registers in between is then seen in one of those that come after.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pydantic import BaseModel

from tasks.core.garbage.inventory import FINAL, PREFIX, STAGES, References, Shelf
from tasks.core.storage.files import folder_of
from tasks.core.tracking.registry import KEY_TAG, Version

# A run that this Prefect server does not know may be another server's; what is half-written may still be written by somebody unseen.
UNKNOWN_LIVES, HALF_WRITTEN_LIVES = timedelta(days=7), timedelta(hours=1)
ADDRESS = re.compile(rf"{PREFIX}(?:/(?P<folder>attempt-[0-9a-f]{{12}}))?(?:/.*)?")
NOTHING = "no run, version or checkpoint refers to it"


class Item(BaseModel):
    """One thing that is garbage; `keys` are its objects and `size` their bytes together."""

    stage: str
    key: str
    what: str
    reason: str
    size: int
    created: str
    keys: list[str]
    # What a record said when it was judged: one that was rewritten since is somebody's.
    seen: bytes | None = None


@dataclass
class Plan:
    """What is garbage, in order of stages; which manifests are damaged, garbage or not; and what the user should know."""

    items: list[Item] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan(
    root: str, shelves: dict[str, Shelf], refs: References, now: datetime, keep_checkpoints: timedelta | None = None
) -> Plan:
    """What is garbage, of what `scan` found; checkpoints of unfinished keys are kept for `keep_checkpoints`, for ever when that is None."""
    result = Plan(damaged=[prefix for prefix, shelf in shelves.items() if shelf.is_damaged])
    kept = _Kept(root, shelves, refs, now, keep_checkpoints, result.notes)
    for prefix in sorted(shelves, key=lambda prefix: (STAGES.index(prefix.split("/")[0]), prefix)):
        result.items += _judge(prefix, shelves[prefix], kept, refs, now)
    for run, (record, said) in sorted(refs.records.items()):
        if record is None or not kept.live(run, record.created):
            reason = (
                f"its run is over ({refs.states[run].capitalize()})"
                if run in refs.states
                else "its run is unknown to Prefect and old"
            )
            common = {
                "stage": "runs",
                "key": run,
                "what": "record",
                "keys": [f"runs/{run}.json"],
                "size": len(said),
                "seen": said,
            }
            result.items.append(Item(**common, reason=reason, created=_iso(record and record.created)))
    return result


class _Kept:
    """What is referred to: `prefixes` whose artifact stays, `folders` that a version names, `busy` prefixes of which all stays."""

    def __init__(
        self,
        root: str,
        shelves: dict[str, Shelf],
        refs: References,
        now: datetime,
        keep_checkpoints: timedelta | None,
        notes: list[str],
    ):
        self.shelves, self.refs, self.now, self.notes = shelves, refs, now, notes
        self.prefixes: set[str] = set()
        self.folders: set[str] = set()
        self.busy: set[str] = set()
        self.resumable: set[str] = set()
        for version in refs.versions:
            self._version(root, version)
        for run, (record, _) in refs.records.items():
            if record and self.live(run, record.created, f"flow run {run}"):
                self.prefixes |= set(record.prefixes)
                # What it has begun is not there yet: all that will be, and checkpoints to begin from.
                self.busy |= {p for p in record.prefixes if p not in shelves or not shelves[p].manifest}
        for prefix, (owner, _) in refs.owners.items():
            named = f"flow run {owner.flow_run}" if owner.flow_run else "a process without flow run"
            if self.live(owner.flow_run, owner.created, f"{named}, which owns {prefix[:-52]},"):
                self.busy.add(prefix)
        for prefix, shelf in shelves.items():
            if (
                shelf.checkpoint
                and not shelf.manifest
                and (keep_checkpoints is None or now - shelf.checkpoint <= keep_checkpoints)
            ):
                self.resumable.add(prefix)
                if prefix not in refs.owners:
                    notes.append(
                        f"{prefix[:-52]} has checkpoints and no owner.json: what it was trained from is not known and may be listed"
                    )
        self.prefixes |= self.busy | self.resumable
        self._upstream()

    def live(self, run: str | None, created: datetime, named: str = "") -> bool:
        """Whether a run is not over; one that Prefect does not know lives for a week from `created`, and a note says so."""
        state = self.refs.states.get(run or "")
        if state is not None:
            return state not in FINAL
        if now_live := self.now - created < UNKNOWN_LIVES:
            note = f"{named} is not known to this Prefect server and counts as live until {(created + UNKNOWN_LIVES).isoformat(timespec='minutes')}"
            if named and note not in self.notes:
                self.notes.append(note)
        return now_live

    def _version(self, root: str, version: Version) -> None:
        addresses = [
            match
            for value in (version.source, *version.tags.values())
            if (match := ADDRESS.fullmatch(_inside(root, value)))
        ]
        self.prefixes |= {match["prefix"] for match in addresses}
        self.folders |= {f"{match['prefix']}/{match['folder']}" for match in addresses if match["folder"]}
        if addresses and KEY_TAG in version.tags:
            self.prefixes.add(f"register/{version.tags[KEY_TAG]}")

    def _upstream(self) -> None:
        """Follows inputs, which are digests, to all artifacts that have them."""
        made: dict[str, list[str]] = defaultdict(list)
        for prefix, shelf in self.shelves.items():
            if manifest := shelf.manifest or shelf.damaged:
                made[manifest.digest].append(prefix)
        todo = list(self.prefixes)
        while todo:
            prefix = todo.pop()
            shelf = self.shelves.get(prefix, Shelf())
            manifest = shelf.manifest or shelf.damaged
            inputs = set(manifest.inputs.values()) if manifest else set()
            if prefix in self.refs.owners:
                inputs |= set(self.refs.owners[prefix][0].inputs.values())
            todo += (new := {source for digest in inputs for source in made[digest]} - self.prefixes)
            self.prefixes |= new


def _inside(root: str, address: str) -> str:
    """The part of an address that is under the root; "" for one that is not. Folders are compared as the file system resolves them."""

    def resolved(uri: str) -> str:
        return (
            f"file://{folder_of(uri).resolve().as_posix()}"
            if uri.startswith("file://")
            else re.sub(r"(?<!:)/+", "/", uri)
        )

    base, found = resolved(root).rstrip("/") + "/", resolved(address)
    return found.removeprefix(base) if found.startswith(base) else ""


def _judge(prefix: str, shelf: Shelf, kept: _Kept, refs: References, now: datetime) -> Iterator[Item]:
    """The garbage of one key."""
    if prefix in kept.busy:
        return
    stage, key = prefix.split("/")
    left = set(shelf.parts)

    def item(what: str, reason: str, parts: list[str], created: str, **more) -> Item:
        left.difference_update(parts)
        objects = {k: size for part in parts for k, size in shelf.parts.get(part, {}).items()}
        return Item(
            stage=stage,
            key=key,
            what=what,
            reason=reason,
            size=sum(objects.values()),
            created=created,
            keys=list(objects),
            **more,
        )

    used = prefix in kept.prefixes
    own = shelf.manifest.folder if shelf.manifest else None
    if shelf.manifest and not used:
        yield item("artifact", NOTHING, ["manifest.json", own], shelf.manifest.created)
    if shelf.is_damaged and not used:
        yield item(
            "artifact",
            f"its manifest is damaged, and {NOTHING}",
            ["manifest.json"],
            shelf.damaged.created if shelf.damaged else "",
        )
    for part in [p for p in shelf.parts if p.startswith("attempt-") and p != own]:
        referred = f"{prefix}/{part}" in kept.folders or (
            used and shelf.is_damaged and (shelf.damaged is None or shelf.damaged.folder == part)
        )
        if not referred and not _young(shelf.written[part], prefix, refs, now):
            yield item(
                "attempt",
                "no manifest or version names it, and no live run works on it",
                [part],
                _iso(shelf.written[part]),
            )
    if "checkpoints" in shelf.parts and prefix not in kept.resumable:
        if shelf.checkpoint:
            reason = (
                "the artifact that they led to exists"
                if shelf.manifest
                else "they are older than was asked for, and no live run works on them"
            )
            yield item("checkpoints", reason, ["checkpoints"], _iso(shelf.checkpoint))
        elif not _young(shelf.written["checkpoints"], prefix, refs, now):
            yield item(
                "checkpoints",
                "none of them is whole, and no live run works on them",
                ["checkpoints"],
                _iso(shelf.written["checkpoints"]),
            )
    if left == {"owner.json"} and prefix in refs.owners and not used:
        owner, said = refs.owners[prefix]
        yield item(
            "record", "nothing is left of what its run made here", ["owner.json"], _iso(owner.created), seen=said
        )


def _young(written: datetime | None, prefix: str, refs: References, now: datetime) -> bool:
    """Whether something half-written was begun or written to within the hour: somebody unseen may be at it."""
    begun = refs.owners[prefix][0].created if prefix in refs.owners else None
    return any(now - moment < HALF_WRITTEN_LIVES for moment in (written, begun) if moment)


def _iso(moment: datetime | None) -> str:
    return moment.isoformat(timespec="seconds") if moment else ""
