"""Runs a stage in a child process, `python -m tasks.core.execution.child REQUEST`, and follows it.

A child has a session of its own, reads nothing, writes its output to a file, and dies with its parent. It appends JSON lines to
`events.jsonl` and ends by writing `result.json`: metrics, or an error of the tree in configs/errors.py.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.errors import StageFailed, StageKilled, by_name
from tasks.core.execution.protocol import FULL_DISK
from tasks.core.storage.files import disk

POLL_SECONDS = 0.2
GRACE_SECONDS = 10
PROGRESS_BAR = re.compile(r"\d+%\|")


def run_child(
    request: dict[str, Any], work: Path, on_event: Callable[[dict[str, Any]], None], processes: int = 1
) -> dict[str, Any]:
    """Runs one stage in a child process and returns its metrics.

    `request` names the stage and carries its arguments (see tasks/core/execution/child.py); `work` is an empty folder for the request, the log and the result.
    `on_event` gets every event while the child runs. Raises what the child raised, DiskFull, StageKilled when a signal ended it, StageFailed otherwise.
    """
    with disk(work / "request.json"):
        work.mkdir(parents=True, exist_ok=True)
        (work / "request.json").write_text(
            json.dumps({**request, "processes": processes, "work": str(work), "parent": os.getpid()})
        )
    command = [sys.executable, "-m", "tasks.core.execution.child", str(work / "request.json")]
    with (work / "child.log").open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=child_environment(),
        )
    try:
        with _Tail(work / "events.jsonl") as events:
            while child.poll() is None:
                events.drain(on_event)
                time.sleep(POLL_SECONDS)
            events.drain(on_event)
    except BaseException:
        # Cancelled, interrupted or failed in here: no orphan may keep the GPU.
        _end_group(child)
        raise
    return _outcome(child.returncode, request["stage"], work)


def child_environment() -> dict[str, str]:
    """The parent's environment; string hashes fixed, so that no set's order can differ between runs."""
    return {**os.environ, "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


class _Tail:
    """The lines that were appended to a file since the last look."""

    def __init__(self, path: Path):
        path.touch()
        self.file = path.open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def drain(self, on_event: Callable[[dict[str, Any]], None]) -> None:
        while True:
            start = self.file.tell()
            line = self.file.readline()
            if not line.endswith("\n"):  # nothing new, or a line still being written
                self.file.seek(start)
                return
            on_event(json.loads(line))


def _end_group(child: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(GRACE_SECONDS)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _last_lines(log: Path, most: int = 20) -> list[str]:
    """What a child has said last, without progress bars."""
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and not PROGRESS_BAR.search(line)][-most:]


def _outcome(code: int, stage: str, work: Path) -> dict[str, Any]:
    result = json.loads((work / "result.json").read_text()) if (work / "result.json").exists() else {}
    if "error" in result:
        raise by_name(result["error"])(result["message"])
    if code == 0 and "metrics" in result:
        return result["metrics"]
    if code == FULL_DISK:
        with disk(work / f"the result of stage {stage}"):
            raise OSError(code, os.strerror(code))
    tail = "\n".join(_last_lines(work / "child.log"))
    if code < 0:
        name = signal.Signals(-code).name
        hint = (
            " (the kernel does this when memory runs out: lower batch_size, num_generations or max_new_tokens)"
            if name == "SIGKILL"
            else ""
        )
        raise StageKilled(f"the process of stage {stage} was ended by {name}{hint}; its last lines:\n{tail}")
    raise StageFailed(f"the process of stage {stage} ended with code {code}; its last lines:\n{tail}")
