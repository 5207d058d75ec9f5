"""The child side of a stage: `python -m tasks.core.execution.child REQUEST` does the work that a request names and writes `result.json`."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, RatchetError, StageFailed
from tasks.core.execution.protocol import FULL_DISK, emit
from tasks.core.storage.checkpoints import Checkpoints
from tasks.core.training.context import Context


def _data(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import DataSection
    from tasks.core.data import prepare

    metrics = prepare.prepare(DataSection(**r["section"]), r["seed"], out, context.emit)
    _audit(r["reward"], out)
    return metrics


def _audit(reward: dict, data: Path) -> None:
    """Refuses a reward that pays for what nobody wants, before anything is trained on it."""
    from configs.schema import RewardConfig
    from tasks.core.scoring import reward_audit, rewards

    reward_audit.audit(
        rewards.build(reward["reward_type"], RewardConfig(**reward["reward_config"])), reward_audit.samples(data)
    )


def _base(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ModelSection
    from tasks.core.model import location

    data = r["inputs"].get("data")  # a scratch model alone is built on the data
    return location.build_base(ModelSection(**r["section"]), Path(data) if data else None, r["seed"], out)


def _train(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ComputeSection, GRPOSection, ModelSection, SFTSection

    inputs = {name: Path(path) for name, path in r["inputs"].items()}
    common = dict(
        model=ModelSection(**r["model"]),
        compute=ComputeSection(**r["compute"]),
        seed=r["seed"],
        data=inputs["data"],
        out=out,
        context=context,
    )
    if r["stage"] == "sft":
        from tasks.core.training import sft

        return sft.train(SFTSection(**r["section"]), base=inputs["base"], grpo=GRPOSection(**r["grpo"]), **common)
    from tasks.core.training import grpo

    _audit(r["section"], inputs["data"])  # once more: the data may have been there before the reward was
    return grpo.train(GRPOSection(**r["section"]), sft=inputs["sft"], **common)


def _evaluate(r: dict, context: Context, out: Path) -> dict:
    from configs.schema import ComputeSection, DataSection, EvaluationSection, ModelSection, RewardConfig
    from tasks.core.evaluation import measure
    from tasks.core.model import location

    model = ModelSection(**r["model"])

    def folder(role: str | None) -> str | Path | None:
        if role is None:
            return None
        here = Path(r["inputs"][role])
        return location.locate(model, here) if role == "base" else here / "model"

    return measure.measure(
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
        source=DataSection(**r.get("source", {})),
    )


STAGES = {
    "data": _data,
    "base": _base,
    "sft": _train,
    "grpo": _train,
    **{f"evaluate_{role}": _evaluate for role in ("base", "sft", "grpo", "champion")},
}


def work_on(request: dict[str, Any]) -> dict[str, Any]:
    """Does a stage in this process and returns its metrics."""
    events = Path(request["work"]) / "events.jsonl"
    context = Context(emit=lambda **event: emit(events, **event))
    if request.get("checkpoints"):
        from tasks.core.storage.store import open_store

        kept = request["checkpoints"]
        context.checkpoints = Checkpoints(
            open_store(kept["root"], kept["timeout_seconds"]),
            Path(kept["disk"]),
            request["stage"],
            kept["key"],
            kept["keep"],
        )
    out = Path(request["work"]) / "out"
    out.mkdir(exist_ok=True)
    if _is_main():
        logging.getLogger("ratchet").addHandler(_Reported(context))
        context.emit(event="message", message=f"started as process {os.getpid()}", pid=os.getpid())
    return STAGES[request["stage"]](request, context, out)


class _Reported(logging.Handler):
    """Warnings of ours reach the user as events: the child's own output is kept only when it fails."""

    def __init__(self, context: Context):
        super().__init__(logging.WARNING)
        self.context = context

    def emit(self, record: logging.LogRecord) -> None:
        self.context.emit(event="message", message=record.getMessage(), level="warning")


class _Terminated(SystemExit):
    """SIGTERM came: what is under way ends, and a checkpoint that is on its way may arrive."""


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated(128 + number)


def _is_main() -> bool:
    """Whether this is the process that reports: the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0"


def main(arguments: list[str]) -> int:
    """Child entry: `REQUEST` runs the stage, or its launcher where there are several processes; `--rank REQUEST` is one of these."""
    rank, path = arguments[0] == "--rank", Path(arguments[-1])
    request = json.loads(path.read_text())
    # A rank's parent is the launcher, which dies with the task process; by now either may be gone already.
    threading.Thread(target=_die_with_parent, args=(os.getppid() if rank else request["parent"],), daemon=True).start()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if rank and int(os.environ.get("WORLD_SIZE", "1")) != request["processes"]:
            raise StageFailed(
                f"{request['processes']} processes were asked for and {os.environ.get('WORLD_SIZE', '1')} started"
            )
        if request["processes"] > 1 and not rank:
            return subprocess.run(_ranks(request, path)).returncode
        result = {"metrics": work_on(request)}
    except RatchetError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        if not _disk_is_full(error, path.parent):
            raise
        # There is no room for a result either: the parent knows this code.
        return FULL_DISK
    except _Terminated:
        # Ended by the signal, as whoever waits for this process must see it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    if _is_main():
        part = path.with_name("result.part")
        part.write_text(json.dumps(result))
        part.replace(path.with_name("result.json"))
    return 0 if "metrics" in result else 3


def _disk_is_full(error: BaseException | None, folder: Path) -> bool:
    """Whether this is what an error comes from: each library says it in its own way."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < 2**20


def _ranks(request: dict[str, Any], path: Path) -> list[str]:
    import torch

    on_gpu = request["compute"]["device"] != "cpu" and torch.cuda.is_available()
    if on_gpu and torch.cuda.device_count() < request["processes"]:
        raise ConfigError(
            f"compute.num_processes is {request['processes']} and this machine has {torch.cuda.device_count()} GPUs: lower it"
        )
    # Accelerate's own launcher starts a single process on a CPU, whatever number it is told; torch's does what it is told on both.
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(request["processes"]),
        "-m",
        "tasks.core.execution.child",
        "--rank",
        str(path),
    ]


def _die_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
