"""Every error that Ratchet raises on purpose, as one tree.

RatchetError                 exit code 1
├── BadInput                 exit code 2, never retried: the user must change something
│   ├── ConfigError          a field of the run configuration
│   ├── DataError            a row, column or file of the dataset
│   ├── ModelError           a folder or Hub id that is not a usable model
│   └── StorageRefused       the S3-compatible store refuses: credentials, permissions, no such bucket
├── Unavailable              exit code 2, retried: a service does not answer
│   ├── StorageUnavailable   the S3-compatible store
│   ├── DiskFull             this machine's disk
│   ├── TrackingUnavailable  the MLflow server
│   └── StackError           the embedded stack: a port is taken, or a service does not start (not retried)
├── IntegrityError           exit code 1: stored bytes differ from their manifest
└── StageFailed              exit code 1: the child process of a stage ended without a result
    └── StageKilled          exit code 1, retried: the child was killed (out of memory, a lost machine, a signal)
"""


class RatchetError(Exception):
    """Base of the tree. Its message is one sentence for the user."""

    exit_code = 1
    retry = False


class BadInput(RatchetError):
    """Input from the user that cannot be honoured."""

    exit_code = 2


class ConfigError(BadInput):
    """A field of the run configuration."""


class DataError(BadInput):
    """A row, column or file of the dataset."""


class ModelError(BadInput):
    """A folder or Hub id that is not a model, or a model that cannot be used as configured."""


class StorageRefused(BadInput):
    """The S3-compatible store answers and refuses: wrong credentials, no permission, no such bucket."""


class Unavailable(RatchetError):
    """A service does not answer. Another try can succeed."""

    exit_code = 2
    retry = True


class StorageUnavailable(Unavailable):
    """The S3-compatible store does not answer, or answers that it is not available."""


class DiskFull(Unavailable):
    """This machine's disk is full. Another try can succeed when the user has freed space."""


class TrackingUnavailable(Unavailable):
    """The MLflow server does not answer, or fails."""


class StackError(Unavailable):
    """The embedded stack cannot start."""

    retry = False


class IntegrityError(RatchetError):
    """Stored bytes differ from their manifest."""


class StageFailed(RatchetError):
    """The child process of a stage ended without a result."""


class StageKilled(StageFailed):
    """The child process of a stage was killed from outside."""

    retry = True


def by_name(name: str) -> type[RatchetError]:
    """The class in the tree with this name; StageFailed for any other name (a third party's error in a child)."""
    found = {RatchetError.__name__: RatchetError}
    queue = [RatchetError]
    while queue:
        for cls in queue.pop().__subclasses__():
            found[cls.__name__] = cls
            queue.append(cls)
    return found.get(name, StageFailed)


def first_line(error: BaseException) -> str:
    """The reason in a library's error message, short enough to be part of a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # In some libraries the first line only announces the reason.
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text.rstrip(".")[:200]
