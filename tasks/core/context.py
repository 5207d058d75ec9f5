"""What a stage may use beside its arguments: a way to report, and a place for checkpoints."""

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.checkpoints import Checkpoints

# The exit code of a child that found the disk full.
FULL_DISK = errno.ENOSPC


@dataclass
class Context:
    """What a stage may use beside its arguments."""

    emit: Callable[..., None]
    checkpoints: Checkpoints | None = None

    @property
    def upload_wait_seconds(self) -> float:
        """Seconds for which the stage has waited for uploads of checkpoints."""
        return self.checkpoints.waited if self.checkpoints else 0.0


def emit(path: Path, **event: Any) -> None:
    """Appends one event; a single short write, so that lines of several writers do not mix."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
