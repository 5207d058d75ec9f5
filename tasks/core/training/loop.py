"""One training from its first step, or its newest checkpoint, to its last: log events, the history, and checkpoints handed over."""

import json
import math
from pathlib import Path
from typing import Any

from tasks.core.training.context import Context

# TRL's names in our reports. TRL's `kl` is the k3 estimate, which must not be taken for the KL that evaluation measures.
RENAMED = {"kl": "kl_k3"}
# Not in history.jsonl: clocks, which differ between equal runs, and sums that TRL starts again at 0 when it resumes.
VOLATILE = {
    "step_time",
    "num_tokens",
    "total_flos",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
    "train_loss",
}
# A training that ends, or is told to, gives its last checkpoint this long to arrive; it is on this disk in any case.
LAST_UPLOAD_SECONDS = 8.0


def run(trainer: Any, context: Context, work: Path) -> list[dict[str, Any]]:
    """Trains, from the newest checkpoint where there is one; returns the history, one row per log step. Every rank calls it."""
    from accelerate.utils import broadcast_object_list
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_reporter(trainer.accelerator, context))
    found: list[str | None] = [_newest(context) if trainer.is_world_process_zero() else None]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(found)
    try:
        trainer.train(resume_from_checkpoint=found[0])
    finally:
        if context.checkpoints is not None:
            context.checkpoints.wait(LAST_UPLOAD_SECONDS)
    return [row for row in map(history_row, trainer.state.log_history) if len(row) > 2]


def _newest(context: Context) -> str | None:
    """The newest whole checkpoint, if any; what it has logged is reported again, for it may not have arrived."""
    if context.checkpoints is None:
        return None
    found = context.checkpoints.latest(say=lambda text: context.emit(event="message", message=text, level="warning"))
    if found is None:
        return None
    step, folder = found
    context.emit(event="message", message=f"going on from the checkpoint of step {step}")
    state = json.loads((folder / "trainer_state.json").read_text())
    for logs in state["log_history"]:
        if "train_runtime" not in logs:
            context.emit(
                event="log",
                again=True,
                **_event(logs, logs["step"], state["max_steps"], logs["epoch"], state["num_train_epochs"]),
            )
    return str(folder)


def _event(logs: dict[str, Any], step: int, max_steps: int, epoch: float, num_epochs: int) -> dict[str, Any]:
    values = {name: value for name, value in _ours(logs).items() if name not in ("epoch", "step")}
    return {"step": step, "max_steps": max_steps, "epoch": epoch, "num_epochs": num_epochs, **values}


def _reporter(accelerator: Any, context: Context) -> Any:
    """A callback that emits an event per log step and hands checkpoints over."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and logs and "train_runtime" not in logs:
                context.emit(
                    event="log", **_event(logs, state.global_step, state.max_steps, state.epoch, state.num_train_epochs)
                )

        def on_step_end(self, args, state, control, **_):
            # No checkpoint at the end, where transformers makes one: resumed from it, it would train one step too many.
            if state.global_step >= state.max_steps:
                control.should_save = False

        def on_save(self, args, state, control, **_):
            # Each rank writes its own random state into the folder: hand it over when all have.
            accelerator.wait_for_everyone()
            if context.checkpoints is not None and state.is_world_process_zero:
                context.checkpoints.save(state.global_step, Path(args.output_dir) / f"checkpoint-{state.global_step}")
            accelerator.wait_for_everyone()

    return Reporter()


def history_row(logs: dict[str, Any]) -> dict[str, Any]:
    """One log entry of TRL under our names, without what differs between equal runs."""
    return {name: value for name, value in _ours(logs).items() if name not in VOLATILE}


def _ours(logs: dict[str, Any]) -> dict[str, Any]:
    row = {}
    for name, value in logs.items():
        if name.startswith("rewards/"):
            if not name.endswith("/mean"):
                continue
            name = name.removesuffix("/mean")
        # JSON has no NaN: a value that is not a number is no value.
        row[RENAMED.get(name, name)] = None if isinstance(value, float) and not math.isfinite(value) else value
    return row


def last_tenth(history: list[dict[str, Any]], name: str) -> float | None:
    """Mean of a metric over the log steps of the last tenth of the training, at least the last one; None where it was never logged."""
    rows = [row for row in history if row.get(name) is not None]
    if not rows:
        return None
    late = [row[name] for row in rows if row["step"] > 0.9 * history[-1]["step"]] or [rows[-1][name]]
    return sum(late) / len(late)
