"""Every error that Ratchet raises on purpose, as one tree.

RatchetError                 exit code 1
├── BadInput                 exit code 2, never retried: the user must change something
│   ├── ConfigError          a field of the run configuration
│   ├── DataError            a row, column or file of the data set
│   ├── ModelError           a model that is not one, or cannot be used as asked
│   └── StorageRefused       the S3-compatible store answers that it will not: credentials, permissions, no such bucket
├── Unavailable              exit code 2, retried: a service that does not answer
│   ├── StorageUnavailable   the S3-compatible store
│   ├── DiskFull             this machine's disk
│   ├── TrackingUnavailable  the MLflow server
│   └── StackError           the embedded stack: a port that is taken, a service that does not come up
├── IntegrityError           exit code 1: stored bytes that are not what their manifest says
└── StageFailed              exit code 1: the child process of a stage ended without a result
    └── StageKilled          exit code 1, retried: it was killed (out of memory, a lost machine, a signal)
"""


class RatchetError(Exception):
    """Base of the tree; its text is one sentence for the user."""

    exit_code = 1
    retry = False


class BadInput(RatchetError):
    """Something the user gave that cannot be honoured."""

    exit_code = 2


class ConfigError(BadInput):
    """A field of the run configuration."""


class DataError(BadInput):
    """A row, column or file of the data set."""


class ModelError(BadInput):
    """A model that is not one, or cannot be used as asked."""


class StorageRefused(BadInput):
    """The S3-compatible store answers and will not do it: wrong credentials, no permission, no such bucket."""


class Unavailable(RatchetError):
    """A service that does not answer; worth another try."""

    exit_code = 2
    retry = True


class StorageUnavailable(Unavailable):
    """The S3-compatible store does not answer, or answers that it cannot now."""


class DiskFull(Unavailable):
    """This machine's disk has no room left; worth another try when its owner has made some."""


class TrackingUnavailable(Unavailable):
    """The MLflow server does not answer or refuses."""


class StackError(Unavailable):
    """The embedded stack cannot come up."""

    retry = False


class IntegrityError(RatchetError):
    """Stored bytes differ from what their manifest says."""


class StageFailed(RatchetError):
    """The child process of a stage ended without a result."""


class StageKilled(StageFailed):
    """The child process of a stage was killed from outside."""

    retry = True


def by_name(name: str) -> type[RatchetError]:
    """The class of the tree with this name; `StageFailed` for one that is not in it (a third party's error in a child)."""
    found = {RatchetError.__name__: RatchetError}
    queue = [RatchetError]
    while queue:
        for cls in queue.pop().__subclasses__():
            found[cls.__name__] = cls
            queue.append(cls)
    return found.get(name, StageFailed)


def first_line(error: BaseException) -> str:
    """What a library says went wrong, in a form that fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # Some libraries only announce the reason in the first line.
    text = f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return text.rstrip(".")[:200]
