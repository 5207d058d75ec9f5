"""The object store: `file:///folder`, or `s3://bucket/prefix` with any endpoint and the same semantics (s3.py, the only file that knows S3)."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Protocol

from configs.errors import ConfigError
from tasks.core.storage.directory import DirectoryStore


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
        from tasks.core.storage.s3 import S3Store

        return S3Store(root, timeout_seconds)
    if scheme == "file" and rest.startswith("/"):
        return DirectoryStore(root)
    raise ConfigError(f"storage.root is {root!r} and must be s3://bucket/prefix or file:///absolute/folder")
