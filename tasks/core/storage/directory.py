"""A folder with the semantics of a bucket: `file:///folder`."""

from __future__ import annotations

import shutil
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from configs.errors import DataError, StorageUnavailable
from tasks.core.storage.files import appearing, disk, folder_of


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
            raise StorageUnavailable(
                f"storage.root is {self.root} and cannot be used ({error}): make the folder writable or name another"
            ) from error

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
            files = [
                p for p in start.rglob("*") if p.is_file() and not p.is_symlink() and not p.name.startswith(".part-")
            ]
            sizes = {p.relative_to(self.folder).as_posix(): p.stat().st_size for p in files}
        return {k: sizes[k] for k in sorted(sizes) if k.startswith(prefix)}

    def newest(self, prefix: str) -> datetime | None:
        start = self.folder / prefix.rpartition("/")[0]
        with self._translated():
            # What is being written counts too: it has another name until it is whole.
            files = (
                p for p in start.rglob("*") if p.is_file() and p.relative_to(self.folder).as_posix().startswith(prefix)
            )
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
