"""Folders on this machine's disk in which stages work, and the removal of those that dead processes left."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.core.storage.files import disk

# A finished result that waits for its upload is removed when nobody has come back for it in this time.
KEPT_SECONDS = 7 * 24 * 3600
# The file in a work folder that its process holds locked.
LOCK = "lock"


@contextmanager
def work_folder(parent: Path, stage: str) -> Iterator[Path]:
    """Yields a new folder `<pid>-<stage>-<random>` below `parent`, locked while the block runs and removed after it.

    Raises DiskFull.
    """
    with disk(parent / stage):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{stage}-", dir=parent))
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Removes work folders of processes that have ended, and results in `kept/` older than KEPT_SECONDS."""
    for folder in parent.glob("*-*"):
        with contextlib.suppress(OSError):
            # A living process holds the lock of its folder. A process id would not tell: it means nothing in another
            # container that shares the disk.
            with (folder / LOCK).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    for folder in (parent / "kept").glob("*/*"):
        newest = max((p.stat().st_mtime for p in folder.rglob("*") if p.exists()), default=0.0)
        if time.time() - newest > KEPT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
