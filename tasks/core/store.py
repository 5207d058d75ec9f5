"""The object store: `file:///folder`, or `s3://bucket/prefix` with any endpoint and the same semantics (s3.py, the only file that knows S3)."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from configs.errors import ConfigError, DataError, DiskFull, StorageUnavailable


class Store(Protocol):
    """Objects under one root. Keys are relative to it, with `/` between parts.

    Every method raises StorageUnavailable when the store does not answer after all retries, StorageRefused when it answers that it will not, and
    DiskFull when this machine's disk is full.
    """

    root: str

    def check(self) -> None:
        """Raises StorageUnavailable or StorageRefused, soon and in one sentence, unless the store can be used; makes a missing bucket or folder."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Keys that start with `prefix`, in order, with their sizes in bytes."""

    def newest(self, prefix: str) -> datetime | None:
        """When something that starts with `prefix` was last written to, as the store's clock has it; None where there is nothing."""

    def get_bytes(self, key: str) -> bytes | None:
        """The object's bytes; None where there is no such object."""

    def put_bytes(self, key: str, data: bytes) -> None:
        """Writes an object in one piece: readers see the old bytes or the new ones."""

    def get_file(self, key: str, path: Path) -> None:
        """Downloads an object, whole or not at all; raises DataError where there is no such object."""

    def put_file(self, path: Path, key: str) -> None:
        """Uploads a file, in parts where it is large."""

    def delete(self, keys: list[str]) -> None:
        """Removes objects; those that are not there count as removed."""

    def uri(self, key: str) -> str:
        """Address of an object, for people and for other programs."""


def resolve_root(root: str | None) -> str:
    """The root of the configuration, else the environment's RATCHET_STORE. Raises ConfigError where there is neither."""
    root = root or os.environ.get("RATCHET_STORE")
    if not root:
        raise ConfigError(
            "storage.root is not set, RATCHET_STORE neither, and no embedded stack was started in this folder: call `ratchet up` here, "
            "point RATCHET_HOME at the .ratchet folder of one that runs, or name s3://bucket/prefix"
        )
    return root.rstrip("/")


def open_store(root: str | None = None, timeout_seconds: float = 60) -> Store:
    """The store at `root`; one of S3 waits `timeout_seconds` for an answer before it asks again. Raises ConfigError for an address of another form."""
    root = resolve_root(root)
    scheme, _, rest = root.partition("://")
    if scheme == "s3" and rest.split("/")[0]:
        # Here, so that a folder does not need the S3 client.
        from tasks.core.s3 import S3Store

        return S3Store(root, timeout_seconds)
    if scheme == "file" and rest.startswith("/"):
        return DirectoryStore(root)
    raise ConfigError(f"storage.root is {root!r} and must be s3://bucket/prefix or file:///absolute/folder")


def folder_of(uri: str) -> Path:
    """The folder that a file:// address names."""
    return Path(unquote(uri.removeprefix("file://")))


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Raises DiskFull where the disk, or its user's quota, is used up while `path` is being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = next(p for p in path.absolute().parents if p.exists())
        raise DiskFull(
            f"the disk of {folder} is full ({error.strerror}; {shutil.disk_usage(folder).free:,} bytes free) and {path.name} could not be written: "
            "free space there, then press Retry: what was finished is kept"
        ) from error


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` when it is whole and removed when it is not. Raises DiskFull."""
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.parent / f".part-{uuid.uuid4().hex}"
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


class DirectoryStore:
    """A folder with the semantics of a bucket: objects appear whole, by rename."""

    def __init__(self, root: str):
        self.root = root
        self.folder = folder_of(root)

    @contextmanager
    def _translated(self):
        try:
            yield
        except OSError as error:
            raise StorageUnavailable(f"storage.root is {self.root} and cannot be used ({error}): make the folder writable or name another") from error

    def check(self) -> None:
        with self._translated():
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe-{uuid.uuid4().hex}"
            with disk(probe):
                probe.touch()
            probe.unlink()

    def list(self, prefix: str = "") -> dict[str, int]:
        # Walk from the deepest folder that the prefix names, not from the root.
        start = self.folder / prefix.rpartition("/")[0]
        with self._translated():
            files = [p for p in start.rglob("*") if p.is_file() and not p.is_symlink() and not p.name.startswith(".part-")]
            sizes = {p.relative_to(self.folder).as_posix(): p.stat().st_size for p in files}
        return {k: sizes[k] for k in sorted(sizes) if k.startswith(prefix)}

    def newest(self, prefix: str) -> datetime | None:
        start = self.folder / prefix.rpartition("/")[0]
        with self._translated():
            # What is being written counts too: it has another name until it is whole.
            files = (p for p in start.rglob("*") if p.is_file() and p.relative_to(self.folder).as_posix().startswith(prefix))
            last = max((p.stat().st_mtime for p in files), default=None)
        return None if last is None else datetime.fromtimestamp(last, UTC)

    def get_bytes(self, key: str) -> bytes | None:
        with self._translated():
            try:
                return (self.folder / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._translated(), appearing(self.folder / key) as part:
            part.write_bytes(data)

    def get_file(self, key: str, path: Path) -> None:
        with self._translated():
            try:
                with appearing(path) as part:
                    shutil.copyfile(self.folder / key, part)
            except FileNotFoundError:
                raise DataError(f"{self.uri(key)} does not exist: check the address") from None

    def put_file(self, path: Path, key: str) -> None:
        with self._translated(), appearing(self.folder / key) as part:
            shutil.copyfile(path, part)

    def delete(self, keys: list[str]) -> None:
        with self._translated():
            for key in keys:
                (self.folder / key).unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"
