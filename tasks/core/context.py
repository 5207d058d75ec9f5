"""What a stage may use beside its arguments: a way to report, and a place for checkpoints."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.artifacts import Checkpoints


@dataclass
class Context:
    """What a stage may use beside its arguments."""

    emit: Callable[..., None]
    checkpoints: Checkpoints | None = None


def emit(path: Path, **event: Any) -> None:
    """Appends one event; a single short write, so that lines of several writers do not mix."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
