"""Files on this machine's disk: written whole or not at all, and a full disk told apart from other errors."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from configs.errors import DiskFull


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
