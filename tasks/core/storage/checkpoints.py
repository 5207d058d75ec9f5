"""Training checkpoints of one stage key: committed on this disk at once, and sent to the store while training goes on.

Each is an artifact of its own under `<stage>/<key>/checkpoints/step-N/`, in the same layout on both sides.
"""

import logging
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path

from configs.errors import IntegrityError, RatchetError, StageFailed, StorageUnavailable
from tasks.core.storage import artifacts
from tasks.core.storage.artifacts import Manifest
from tasks.core.storage.directory import DirectoryStore
from tasks.core.storage.store import Store

log = logging.getLogger("ratchet")
# Where a checkpoint's manifest lies; whatever else somebody puts there is none.
STEP = r"step-([0-9]{1,15})/manifest\.json"


class Checkpoints:
    """The checkpoints of one stage key; `disk` is the folder of this machine that holds them beside the store."""

    def __init__(self, store: Store, disk: Path, stage: str, key: str, keep: int):
        self.store, self.disk = store, DirectoryStore(disk.absolute().as_uri())
        self.stage, self.key, self.keep = stage, key, keep
        self.prefix = f"{stage}/{key}/checkpoints"
        # Seconds for which training has waited for uploads.
        self.waited = 0.0
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._sending: Future[None] | None = None

    def steps(self, store: Store | None = None) -> list[int]:
        """Steps that have a manifest in the store (or in the one given), oldest first."""
        found = (
            re.fullmatch(STEP, key.removeprefix(f"{self.prefix}/"))
            for key in (store or self.store).list(f"{self.prefix}/step-")
        )
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, folder: Path) -> None:
        """Takes a checkpoint's folder over and starts to send it; waits only while the one before is still on its way.

        Raises DiskFull, and StageFailed where this disk cannot be written otherwise. A store that does not answer is warned of: the checkpoint is on this
        disk, and the next one is sent again.
        """
        self.wait()
        prefix = self._at(step)
        try:
            manifest = artifacts.commit(
                self.disk, prefix, folder, stage=self.stage, key=self.key, metrics={"step": step}
            )
        except OSError as error:
            raise StageFailed(
                f"the checkpoint of step {step} cannot be kept in {self.disk.folder} ({error}): make it a folder that can be written"
            ) from error
        self._prune(self.disk)
        self._sending = self._sender.submit(self._send, prefix, manifest)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until nothing is on its way, at most `seconds`; says whether that is so."""
        began = time.monotonic()
        try:
            if self._sending is not None:
                self._sending.result(seconds)
                self._sending = None
        except TimeoutError:
            return False
        finally:
            self.waited += time.monotonic() - began
        return True

    def latest(self, say: Callable[[str], None] = log.warning) -> tuple[int, Path] | None:
        """(step, folder) of the newest checkpoint that is whole, from this disk or else from the store; `say` is told of damaged ones."""
        near, far = self.steps(self.disk), self.steps()
        for step in sorted({*near, *far}, reverse=True):
            for store, has in ((self.disk, near), (self.store, far)):
                if step in has and (folder := self._whole(store, step, say)) is not None:
                    return step, folder
        return None

    def clear(self) -> None:
        """Removes all checkpoints: the stage's artifact is there."""
        shutil.rmtree(self.disk.folder / self.stage / self.key, ignore_errors=True)
        self._remove(self.store, f"{self.prefix}/")

    def _at(self, step: int) -> str:
        return f"{self.prefix}/step-{step}"

    def _send(self, prefix: str, manifest: Manifest) -> None:
        try:
            artifacts.send(self.disk, self.store, prefix, manifest)
            self._prune(self.store)
        except (RatchetError, OSError) as error:
            log.warning("%s is on this disk alone, and training goes on: %s", prefix, error)

    def _whole(self, store: Store, step: int, say: Callable[[str], None]) -> Path | None:
        prefix, where = self._at(step), "on this disk" if store is self.disk else "in the store"
        damage = ""
        try:
            manifest = artifacts.find(store, prefix)
            # A copy of another step's is whole in itself.
            if manifest is not None and manifest.metrics.get("step") == step:
                if store is self.disk:
                    return artifacts.verify(self.disk, prefix, manifest)
                folder = artifacts.folder_on(self.disk, prefix, manifest)
                shutil.rmtree(folder, ignore_errors=True)
                return artifacts.fetch(store, prefix, manifest, folder)
        except (IntegrityError, OSError) as error:
            damage = f": {error}"
        except StorageUnavailable as error:
            # A store that is away is asked again; a disk that cannot be read is as good as damaged.
            if store is self.store:
                raise
            damage = f": {error}"
        say(f"the checkpoint of step {step} {where} is damaged and is not used{damage}")
        return None

    def _prune(self, store: Store) -> None:
        for old in self.steps(store)[: -self.keep]:
            self._remove(store, f"{self._at(old)}/")

    @staticmethod
    def _remove(store: Store, prefix: str) -> None:
        keys = list(store.list(prefix))
        # Manifests first: a half-removed checkpoint must not look whole.
        store.delete(sorted(keys, key=lambda k: not k.endswith("/manifest.json")))
