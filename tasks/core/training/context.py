"""What a stage may use beside its arguments: a way to report, and a place for checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks.core.storage.checkpoints import Checkpoints


@dataclass
class Context:
    """What a stage may use beside its arguments."""

    emit: Callable[..., None]
    checkpoints: Checkpoints | None = None

    @property
    def upload_wait_seconds(self) -> float:
        """Seconds for which the stage has waited for uploads of checkpoints."""
        return self.checkpoints.waited if self.checkpoints else 0.0
