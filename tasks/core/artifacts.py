"""Stage keys, manifests, artifacts and checkpoints: what makes a run cached and resumable.

A stage's key is the SHA-256 of what can change its result. What it makes lies under `<stage>/<key>/`: files in a folder of their own per
attempt, and `manifest.json`, written last. An artifact exists when its manifest does; two writers never mix, because each has its folder.
"""

import hashlib
import json
import logging
import re
import subprocess
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from configs.errors import DataError, IntegrityError
from tasks.core.store import Store

log = logging.getLogger("ratchet")
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def stage_key(stage: str, stage_version: int, section: dict[str, Any], inputs: dict[str, str]) -> str:
    """SHA-256, in hex, of everything that can change the stage's result: its section, its inputs' digests, its VERSION."""
    return hashlib.sha256(canonical({"stage": stage, "version": stage_version, "section": section, "inputs": inputs})).hexdigest()


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class File(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int
    sha256: str

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise ValueError(f"the path {path!r} leaves its folder")
        return path


class Manifest(BaseModel):
    """What an artifact holds and where it came from."""

    stage: str
    key: str
    folder: str
    files: list[File]
    inputs: dict[str, str]
    section: dict[str, Any]
    metrics: dict[str, Any]
    libraries: dict[str, str]
    git_commit: str | None
    created: str
    seconds: float
    checksum: str = ""

    @field_validator("folder")
    @classmethod
    def _names_an_attempt(cls, folder: str) -> str:
        if not re.fullmatch(r"attempt-[0-9a-f]{12}", folder):
            raise ValueError(f"the folder {folder!r} is no attempt's")
        return folder

    def own_checksum(self) -> str:
        """SHA-256 of everything that the manifest says: finds one that was edited."""
        return hashlib.sha256(canonical(self.model_dump(mode="json", exclude={"checksum"}))).hexdigest()

    @property
    def digest(self) -> str:
        """SHA-256 of the file list: equal content has equal digests, whoever made it and when."""
        return hashlib.sha256(canonical([f.model_dump() for f in self.files])).hexdigest()


@cache
def git_commit() -> str | None:
    """Commit of the code that runs, with `+` after it when the tree differs; None outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "") if commit.returncode == 0 else None


def scan(folder: Path) -> list[File]:
    """The files under a folder, in order of their paths."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return [File(path=p.relative_to(folder).as_posix(), size=p.stat().st_size, sha256=sha256(p)) for p in paths]


def publish(store: Store, prefix: str, folder: Path, *, stage: str, key: str, inputs=None, section=None, metrics=None, seconds=0.0) -> Manifest:
    """Uploads a folder under `prefix` as one artifact, the manifest last, and returns that manifest."""
    manifest = Manifest(
        stage=stage,
        key=key,
        folder=f"attempt-{uuid.uuid4().hex[:12]}",
        files=scan(folder),
        inputs=inputs or {},
        section=section or {},
        metrics=metrics or {},
        libraries={name: version(name) for name in LIBRARIES},
        git_commit=git_commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 3),
    )
    manifest.checksum = manifest.own_checksum()
    for file in manifest.files:
        store.put_file(folder / file.path, f"{prefix}/{manifest.folder}/{file.path}")
    store.put_bytes(f"{prefix}/manifest.json", manifest.model_dump_json(indent=1).encode())
    return manifest


def find(store: Store, prefix: str) -> Manifest | None:
    """The manifest under `prefix` if it can be read and every file it names is there in its size; None, with a warning where it is damaged, otherwise."""
    data = store.get_bytes(f"{prefix}/manifest.json")
    if data is None:
        return None
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        log.warning("%s is damaged and is not used: %s", store.uri(f"{prefix}/manifest.json"), error.errors()[0]["msg"])
        return None
    if manifest.checksum != manifest.own_checksum() or not prefix.startswith(f"{manifest.stage}/{manifest.key}"):
        log.warning("%s was edited or belongs elsewhere and is not used", store.uri(f"{prefix}/manifest.json"))
        return None
    stored = store.list(f"{prefix}/{manifest.folder}/")
    for file in manifest.files:
        size = stored.get(f"{prefix}/{manifest.folder}/{file.path}")
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes, not {file.size}"
            log.warning("%s is not used: its file %s %s", store.uri(prefix), file.path, found)
            return None
    return manifest


def fetch(store: Store, prefix: str, manifest: Manifest, folder: Path, only: Callable[[str], bool] = lambda path: True) -> Path:
    """Downloads an artifact's files into `folder`, each checked against its SHA-256; raises IntegrityError at the first that differs."""
    for file in manifest.files:
        if not only(file.path):
            continue
        source = f"{prefix}/{manifest.folder}/{file.path}"
        try:
            store.get_file(source, folder / file.path)
        except DataError as error:
            raise IntegrityError(f"{store.uri(source)} is named by its manifest and missing: run the stage again") from error
        if sha256(folder / file.path) != file.sha256:
            raise IntegrityError(f"{store.uri(source)} differs from its manifest: delete {store.uri(prefix)}/manifest.json and run again to redo the stage")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Checkpoints:
    """Training checkpoints of one stage key, in the store, each an artifact of its own."""

    def __init__(self, store: Store, stage: str, key: str, keep: int):
        self.store, self.stage, self.key, self.keep = store, stage, key, keep
        self.prefix = f"{stage}/{key}/checkpoints"

    def steps(self) -> list[int]:
        """Steps that have a manifest, oldest first."""
        names = [k.removeprefix(f"{self.prefix}/step-") for k in self.store.list(f"{self.prefix}/step-") if k.endswith("/manifest.json")]
        return sorted(int(name.split("/")[0]) for name in names)

    def save(self, step: int, folder: Path) -> None:
        """Uploads a checkpoint folder and removes the oldest beyond `keep`."""
        publish(self.store, f"{self.prefix}/step-{step}", folder, stage=self.stage, key=self.key)
        for old in self.steps()[: -self.keep]:
            self._remove(f"{self.prefix}/step-{old}/")

    def latest(self, folder: Path) -> Path | None:
        """Downloads the newest whole checkpoint to `folder/checkpoint-N`; a damaged one is reported and the one before it is taken."""
        for step in reversed(self.steps()):
            prefix = f"{self.prefix}/step-{step}"
            manifest = find(self.store, prefix)
            if manifest is None:
                continue
            try:
                return fetch(self.store, prefix, manifest, folder / f"checkpoint-{step}")
            except IntegrityError as error:
                log.warning("%s; taking the checkpoint before it", error)
        return None

    def clear(self) -> None:
        """Removes all checkpoints: the stage's artifact is there."""
        self._remove(f"{self.prefix}/")

    def _remove(self, prefix: str) -> None:
        keys = list(self.store.list(prefix))
        # Manifests first: a half-removed checkpoint must not look whole.
        self.store.delete(sorted(keys, key=lambda k: not k.endswith("/manifest.json")))
