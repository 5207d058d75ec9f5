"""Stages in child processes. The parent side starts one and follows it; the child side, `python -m tasks.core.launch REQUEST`, does the work.

A child has a session of its own, reads nothing, writes its output to a file, and dies with its parent. It appends JSON lines to
`events.jsonl` and ends by writing `result.json`: metrics, or an error of the tree in configs/errors.py.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, RatchetError, StageFailed, StageKilled, by_name
from tasks.core.artifacts import Checkpoints

POLL_SECONDS = 0.2
GRACE_SECONDS = 10


@dataclass
class Context:
    """What a stage may use beside its arguments."""

    emit: Callable[..., None]
    checkpoints: Checkpoints | None = None


# ---------------------------------------------------------------- parent


def run_child(request: dict[str, Any], work: Path, on_event: Callable[[dict[str, Any]], None], processes: int = 1) -> dict[str, Any]:
    """Runs one stage in a child process and returns its metrics.

    `request` names the stage and carries its arguments (see `STAGES`); `work` is an empty folder for the request, the log and the result.
    `on_event` gets every event while the child runs. Raises what the child raised, StageKilled when a signal ended it, StageFailed otherwise.
    """
    work.mkdir(parents=True, exist_ok=True)
    (work / "request.json").write_text(json.dumps({**request, "processes": processes, "work": str(work)}))
    command = [sys.executable, "-m", "tasks.core.launch", str(work / "request.json")]
    with (work / "child.log").open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=child_environment())
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


def _outcome(code: int, stage: str, work: Path) -> dict[str, Any]:
    result = json.loads((work / "result.json").read_text()) if (work / "result.json").exists() else {}
    if "error" in result:
        raise by_name(result["error"])(result["message"])
    if code == 0 and "metrics" in result:
        return result["metrics"]
    tail = "\n".join((work / "child.log").read_text(errors="replace").splitlines()[-20:])
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the kernel does this when memory runs out: lower batch_size, num_generations or max_new_tokens)" if name == "SIGKILL" else ""
        raise StageKilled(f"the process of stage {stage} was ended by {name}{hint}; its last lines:\n{tail}")
    raise StageFailed(f"the process of stage {stage} ended with code {code}; its last lines:\n{tail}")


# ---------------------------------------------------------------- child


def _data(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import DataSection
    from tasks.core import data

    return data.prepare(DataSection(**r["section"]), r["seed"], out)


def _base(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ModelSection
    from tasks.core import models

    return models.build_base(ModelSection(**r["section"]), Path(r["inputs"]["data"]), r["seed"], out)


def _train(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ComputeSection, GRPOSection, ModelSection, SFTSection

    inputs = {name: Path(path) for name, path in r["inputs"].items()}
    common = dict(model=ModelSection(**r["model"]), compute=ComputeSection(**r["compute"]), seed=r["seed"], data=inputs["data"], out=out, context=context)
    if r["stage"] == "sft":
        from tasks.core import sft

        return sft.train(SFTSection(**r["section"]), base=inputs["base"], **common)
    from tasks.core import grpo

    return grpo.train(GRPOSection(**r["section"]), sft=inputs["sft"], **common)


def _evaluate(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ComputeSection, EvaluationSection, ModelSection, RewardConfig
    from tasks.core import evaluate, models

    model = ModelSection(**r["model"])

    def folder(role: str | None) -> str | Path | None:
        if role is None:
            return None
        here = Path(r["inputs"][role])
        return models.locate(model, here) if role == "base" else here / "model"

    return evaluate.measure(
        EvaluationSection(**r["section"]),
        r["reward_type"],
        RewardConfig(**r["reward_config"]),
        model=model,
        compute=ComputeSection(**r["compute"]),
        seed=r["seed"],
        policy=folder(r["policy"]),
        reference=folder(r["reference"]),
        data=Path(r["inputs"]["data"]),
        out=out,
        emit=context.emit,
    )


STAGES = {"data": _data, "base": _base, "sft": _train, "grpo": _train, "evaluate_base": _evaluate, "evaluate_sft": _evaluate, "evaluate_grpo": _evaluate}


def work_on(request: dict[str, Any]) -> dict[str, Any]:
    """Does a stage in this process and returns its metrics."""
    events = Path(request["work"]) / "events.jsonl"
    context = Context(emit=lambda **event: emit(events, **event))
    if request.get("checkpoints"):
        from tasks.core.store import open_store

        kept = request["checkpoints"]
        context.checkpoints = Checkpoints(open_store(kept["root"]), request["stage"], kept["key"], kept["keep"])
    out = Path(request["work"]) / "out"
    out.mkdir(exist_ok=True)
    if _is_main():
        context.emit(event="message", message=f"started as process {os.getpid()}", pid=os.getpid())
    return STAGES[request["stage"]](request, context, out)


def _is_main() -> bool:
    """Whether this is the process that reports: the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def emit(path: Path, **event: Any) -> None:
    """Appends one event; a single short write, so that lines of several writers do not mix."""
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def main(arguments: list[str]) -> int:
    """Child entry: `REQUEST` runs the stage, or its launcher where there are several processes; `--rank REQUEST` is one of these."""
    rank, path = arguments[0] == "--rank", Path(arguments[-1])
    request = json.loads(path.read_text())
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        if request["processes"] > 1 and not rank:
            return subprocess.run(_accelerate(request, path)).returncode
        result = {"metrics": work_on(request)}
    except RatchetError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    if _is_main():
        part = path.with_name("result.part")
        part.write_text(json.dumps(result))
        part.replace(path.with_name("result.json"))
    return 0 if "metrics" in result else 3


def _accelerate(request: dict[str, Any], path: Path) -> list[str]:
    import torch

    on_gpu = request["compute"]["device"] != "cpu" and torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < request["processes"]:
        raise ConfigError(f"compute.num_processes is {request['processes']} and this machine has {torch.cuda.device_count()} GPUs: lower it")
    where = ["--multi_gpu"] if on_gpu else ["--cpu"]
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    count = ["--num_processes", str(request["processes"])]
    return [sys.executable, "-m", "accelerate.commands.launch", *where, *count, *plain, "-m", "tasks.core.launch", "--rank", str(path)]


def _die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
