"""What checkpoints cost a training, against the S3 store of the environment (`eval "$(ratchet env)"`).

    python benchmarks/uploads.py [MEBIBYTES [REPETITIONS]]

Prints, as the median of alternating repetitions, the rate of sending a checkpoint (hashed files and manifest included) as a share of the rate of a plain
`boto3.upload_file` of the same bytes.
"""

import os
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import boto3
from botocore.config import Config

from tasks.core.storage.checkpoints import Checkpoints
from tasks.core.storage.store import open_store


def main(mebibytes: int = 256, repetitions: int = 9) -> None:
    """Prints one line per repetition and the medians."""
    root = f"s3://ratchet/benchmark-{uuid.uuid4()}"
    store = open_store(root)
    client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))
    body, ratios, commits = os.urandom(mebibytes * 2**20), [], []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(1, repetitions + 1):
            file = Path(folder) / f"checkpoint-{n}" / "optimizer.pt"
            file.parent.mkdir()
            file.write_bytes(body)
            plain = timed(
                lambda file=file: client.upload_file(str(file), "ratchet", f"{root.rpartition('/')[2]}/plain")
            )
            kept = Checkpoints(store, Path(folder) / "kept", "sft", "key", keep=1)
            commits.append(timed(lambda kept=kept, file=file, n=n: kept.save(n, file.parent)))
            sent = timed(kept.wait)
            ratios.append(plain / sent)
            print(
                f"plain {mebibytes / plain:.0f} MiB/s, sent {mebibytes / sent:.0f} MiB/s, ratio {ratios[-1]:.2f}; committed in {commits[-1]:.2f} s",
                flush=True,
            )
    store.delete(list(store.list()))
    print(f"median ratio {statistics.median(ratios):.2f}, median seconds to commit {statistics.median(commits):.2f}")


def timed(work) -> float:
    """Seconds that the work takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
