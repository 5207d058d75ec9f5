"""Stage keys, manifests, artifacts and checkpoints: what makes a run cached and resumable.

A stage's key is the SHA-256 of what can change its result. What it makes lies under `<stage>/<key>/`: files in a folder of their own per
attempt, and `manifest.json`, written last. An artifact exists when its manifest does; two writers never mix, because each has its folder.
"""

import hashlib
import json
import logging
import re
import shutil
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
from tasks.core.storage.directory import DirectoryStore
from tasks.core.storage.files import disk as writing
from tasks.core.storage.store import Store

log = logging.getLogger("ratchet")
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")
# How often bytes that look wrong are read before they are believed to be stored so.
READS = 4


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def stage_key(stage: str, stage_version: int, section: dict[str, Any], inputs: dict[str, str]) -> str:
    """SHA-256, in hex, of everything that can change the stage's result: its section, its inputs' digests, its VERSION."""
    return hashlib.sha256(
        canonical({"stage": stage, "version": stage_version, "section": section, "inputs": inputs})
    ).hexdigest()


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
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
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
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "") if commit.returncode == 0 else None


def scan(folder: Path) -> list[File]:
    """The files under a folder, in order of their paths."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return [File(path=p.relative_to(folder).as_posix(), size=p.stat().st_size, sha256=sha256(p)) for p in paths]


def describe(folder: Path, *, stage: str, key: str, inputs=None, section=None, metrics=None, seconds=0.0) -> Manifest:
    """The manifest of what lies in a folder, for an attempt of its own."""
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
    return manifest


def publish(store: Store, prefix: str, folder: Path, **described: Any) -> Manifest:
    """Uploads a folder under `prefix` as one artifact, the manifest last, and returns that manifest; see `describe` for the rest."""
    manifest = describe(folder, **described)
    _upload(store, prefix, manifest, folder)
    return manifest


def commit(disk: DirectoryStore, prefix: str, folder: Path, **described: Any) -> Manifest:
    """Moves a folder into a store on this disk as one artifact, the manifest last, and returns that manifest: nothing is copied. Raises DiskFull."""
    manifest = describe(folder, **described)
    target = folder_on(disk, prefix, manifest)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)
    disk.put_bytes(f"{prefix}/manifest.json", _encoded(manifest))
    return manifest


def send(disk: DirectoryStore, store: Store, prefix: str, manifest: Manifest) -> None:
    """Uploads an artifact that was committed on this disk: the same one, again where an upload was cut off."""
    _upload(store, prefix, manifest, folder_on(disk, prefix, manifest))


def folder_on(disk: DirectoryStore, prefix: str, manifest: Manifest) -> Path:
    """Where the files of an artifact on this disk lie."""
    return disk.folder / prefix / manifest.folder


def _upload(store: Store, prefix: str, manifest: Manifest, folder: Path) -> None:
    for file in manifest.files:
        store.put_file(folder / file.path, f"{prefix}/{manifest.folder}/{file.path}")
    store.put_bytes(f"{prefix}/manifest.json", _encoded(manifest))


def _encoded(manifest: Manifest) -> bytes:
    return manifest.model_dump_json(indent=1).encode()


def find(store: Store, prefix: str) -> Manifest | None:
    """The manifest under `prefix` if it can be read and every file it names is there in its size; None, with a warning where it is damaged, otherwise.

    What looks damaged is read again before that is believed: bytes can be lost on their way, too.
    """
    for _ in range(READS):
        data = store.get_bytes(f"{prefix}/manifest.json")
        if data is None:
            return None
        manifest, damage = _read(store, prefix, data)
        if damage is None:
            return manifest
    log.warning("%s is not used: %s", store.uri(prefix), damage)
    return None


def _read(store: Store, prefix: str, data: bytes) -> tuple[Manifest | None, str | None]:
    """(manifest, None), or (None, what is wrong with it)."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        return None, f"its manifest.json is damaged: {error.errors()[0]['msg']}"
    if manifest.checksum != manifest.own_checksum() or not prefix.startswith(f"{manifest.stage}/{manifest.key}"):
        return None, "its manifest.json was edited or belongs elsewhere"
    stored = store.list(f"{prefix}/{manifest.folder}/")
    for file in manifest.files:
        size = stored.get(f"{prefix}/{manifest.folder}/{file.path}")
        if size != file.size:
            return (
                None,
                f"its file {file.path} {'is missing' if size is None else f'has {size} bytes, not {file.size}'}",
            )
    return manifest, None


def fetch(
    store: Store, prefix: str, manifest: Manifest, folder: Path, only: Callable[[str], bool] = lambda path: True
) -> Path:
    """Downloads an artifact's files into `folder`, each checked against its SHA-256; raises IntegrityError at the first that differs each time it is read."""
    for file in manifest.files:
        if only(file.path):
            _download(store, f"{prefix}/{manifest.folder}/{file.path}", folder / file.path, file)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _download(store: Store, source: str, path: Path, file: File) -> None:
    for _ in range(READS):
        try:
            store.get_file(source, path)
        except DataError as error:
            raise IntegrityError(f"{store.uri(source)} is named by its manifest and missing") from error
        if sha256(path) == file.sha256:
            return
        path.unlink()
    raise IntegrityError(f"{store.uri(source)} differs from its manifest")


def verify(disk: DirectoryStore, prefix: str, manifest: Manifest) -> Path:
    """The folder of an artifact on this disk; raises IntegrityError at the first file whose SHA-256 differs."""
    folder = folder_on(disk, prefix, manifest)
    for file in manifest.files:
        if sha256(folder / file.path) != file.sha256:
            raise IntegrityError(f"{folder / file.path} differs from its manifest")
    return folder


def condemn(store: Store, prefix: str, manifest: Manifest) -> None:
    """Takes a damaged artifact out of use, so that its stage is redone; one that another has put in its place meanwhile stays."""
    now = find(store, prefix)
    if now is None or now.folder == manifest.folder:
        store.delete([f"{prefix}/manifest.json"])
