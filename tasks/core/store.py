"""The object store: `s3://bucket/prefix` with any endpoint, or `file:///folder` with the same semantics. The only file that knows S3."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from configs.errors import ConfigError, DataError, StorageUnavailable


class Store(Protocol):
    """Objects under one root. Keys are relative to it, with `/` between parts. Every method raises StorageUnavailable when the store does not answer."""

    root: str

    def check(self) -> None:
        """Raises StorageUnavailable, in one sentence, unless the store can be used; makes the bucket or folder where it is missing."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Keys that start with `prefix`, in order, with their sizes in bytes."""

    def get_bytes(self, key: str) -> bytes | None:
        """The object's bytes; None where there is no such object."""

    def put_bytes(self, key: str, data: bytes) -> None:
        """Writes an object in one piece: readers see the old bytes or the new ones."""

    def get_file(self, key: str, path: Path) -> None:
        """Downloads an object; raises DataError where there is no such object."""

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


def open_store(root: str | None = None) -> Store:
    """The store at `root`. Raises ConfigError for an address of another form."""
    root = resolve_root(root)
    scheme, _, rest = root.partition("://")
    if scheme == "s3" and rest.split("/")[0]:
        return S3Store(root)
    if scheme == "file" and rest.startswith("/"):
        return DirectoryStore(root)
    raise ConfigError(f"storage.root is {root!r} and must be s3://bucket/prefix or file:///absolute/folder")


def folder_of(uri: str) -> Path:
    """The folder that a file:// address names."""
    return Path(unquote(uri.removeprefix("file://")))


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
            probe.touch()
            probe.unlink()

    def list(self, prefix: str = "") -> dict[str, int]:
        # Walk from the deepest folder that the prefix names, not from the root.
        start = self.folder / prefix.rpartition("/")[0]
        with self._translated():
            files = [p for p in start.rglob("*") if p.is_file() and not p.is_symlink() and not p.name.startswith(".part-")]
            sizes = {p.relative_to(self.folder).as_posix(): p.stat().st_size for p in files}
        return {k: sizes[k] for k in sorted(sizes) if k.startswith(prefix)}

    def get_bytes(self, key: str) -> bytes | None:
        with self._translated():
            try:
                return (self.folder / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._translated(), self._appearing(key) as part:
            part.write_bytes(data)

    def get_file(self, key: str, path: Path) -> None:
        with self._translated():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / key, path)
            except FileNotFoundError:
                raise DataError(f"{self.uri(key)} does not exist: check the address") from None

    def put_file(self, path: Path, key: str) -> None:
        with self._translated(), self._appearing(key) as part:
            shutil.copyfile(path, part)

    @contextmanager
    def _appearing(self, key: str):
        """A path to write to, renamed to the object's when it is whole."""
        target = self.folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f".part-{uuid.uuid4().hex}"
        try:
            yield part
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    def delete(self, keys: list[str]) -> None:
        with self._translated():
            for key in keys:
                (self.folder / key).unlink(missing_ok=True)

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"


class S3Store:
    """A bucket of an S3-compatible store; endpoint, region and credentials come from the environment, as boto3 reads them."""

    def __init__(self, root: str):
        import boto3
        from botocore.config import Config

        self.root = root
        self.bucket, _, prefix = root.removeprefix("s3://").partition("/")
        self.prefix = f"{prefix}/" if prefix else ""
        # Path addressing: compatible stores on an address of their own have no bucket host names.
        embedded = bool(os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"))
        config = Config(
            retries={"max_attempts": 5, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
            s3={"addressing_style": "path" if embedded else "auto"},
        )
        self.client = boto3.session.Session().client("s3", config=config)

    @contextmanager
    def _translated(self):
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            where = self.client.meta.endpoint_url
            raise StorageUnavailable(
                f"storage.root is {self.root} and the S3 store at {where} does not serve it ({error}): start it (`ratchet up`), "
                "or check AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error

    def check(self) -> None:
        from botocore.exceptions import ClientError

        with self._translated():
            try:
                self.client.head_bucket(Bucket=self.bucket)
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                    raise
                region = self.client.meta.region_name
                where = {} if region in (None, "us-east-1") else {"CreateBucketConfiguration": {"LocationConstraint": region}}
                self.client.create_bucket(Bucket=self.bucket, **where)

    def list(self, prefix: str = "") -> dict[str, int]:
        with self._translated():
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + prefix)
            return {o["Key"].removeprefix(self.prefix): o["Size"] for page in pages for o in page.get("Contents", [])}

    def get_bytes(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with self._translated():
            try:
                return self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()
            except ClientError as error:
                if error.response["Error"]["Code"] in ("NoSuchKey", "NoSuchBucket", "404"):
                    return None
                raise

    def put_bytes(self, key: str, data: bytes) -> None:
        with self._translated():
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def get_file(self, key: str, path: Path) -> None:
        from botocore.exceptions import ClientError

        path.parent.mkdir(parents=True, exist_ok=True)
        with self._translated():
            try:
                self.client.download_file(self.bucket, self.prefix + key, str(path))
            except ClientError as error:
                if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NoSuchBucket"):
                    raise DataError(f"{self.uri(key)} does not exist: check the address") from None
                raise

    def put_file(self, path: Path, key: str) -> None:
        with self._translated():
            self.client.upload_file(str(path), self.bucket, self.prefix + key)

    def delete(self, keys: list[str]) -> None:
        with self._translated():
            for start in range(0, len(keys), 1000):
                batch = [{"Key": self.prefix + key} for key in keys[start : start + 1000]]
                self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}"
