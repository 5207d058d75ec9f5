"""What a child and its parent agree on: the file of events, and the exit code for a full disk."""

import errno
import json
from pathlib import Path
from typing import Any

# The exit code of a child that found the disk full.
FULL_DISK = errno.ENOSPC


def emit(path: Path, **event: Any) -> None:
    """Appends one event; a single short write, so that lines of several writers do not mix."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")
