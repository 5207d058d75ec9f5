"""Tasks of the lm-evaluation-harness as an evaluation set (extra `[lm-eval]`)."""

import hashlib
import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, DataError
from configs.schema import EvaluationSet

# Of the files beside a task's YAML: what it may include, call or read.
_PARTS = {".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".parquet", ".txt"}


def digest(task: str) -> str:
    """What decides a task's metrics besides the model, for the stage key: the harness's version and, of a task in a YAML file, all files beside that.

    Raises ConfigError where the harness is not installed or the file is not there.
    """
    try:
        found = [f"lm_eval {importlib.metadata.version('lm_eval')}"]
    except importlib.metadata.PackageNotFoundError as error:
        raise _not_installed(task, error) from error
    if _is_file(task):
        file = Path(task)
        if not file.is_file():
            raise ConfigError(
                f"evaluation.sets has the task {task}, and there is no such file: correct the path, or name a task that the harness ships"
            )
        parts = sorted(part for part in file.parent.iterdir() if part.suffix in _PARTS and part.is_file())
        found += [f"{part.name} {hashlib.sha256(part.read_bytes()).hexdigest()}" for part in parts]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def find(task: str) -> tuple[str, Any]:
    """The name of a task and the harness's manager that knows it. Raises ConfigError where the harness is not installed or has no such task."""
    digest(task)
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise _not_installed(task, error) from error
    name = Path(task).stem if _is_file(task) else task
    manager = _manager(str(Path(task).parent) if _is_file(task) else None)
    if name not in manager.all_tasks:
        remedy = f"the file must be YAML and say `task: {name}`" if _is_file(task) else "see `lm_eval ls tasks`"
        raise ConfigError(
            f"evaluation.sets has the task {task}, which lm-evaluation-harness does not know as {name}: {remedy}"
        )
    return name, manager


@cache
def _manager(folder: str | None) -> Any:
    """Knows the tasks that the harness ships (ten seconds of reading), or those of a folder."""
    from lm_eval.tasks import TaskManager

    return TaskManager() if folder is None else TaskManager(include_path=folder, include_defaults=False)


def evaluate(
    section: EvaluationSet, model: Any, tokenizer: Any, batch_size: int, seed: int, out: Path
) -> dict[str, Any]:
    """Metrics of one task, with the harness's own names (`acc`, `exact_match`, ...), and its results in `out/results.json`.

    A task is one that the harness ships (its data comes from the Hub) or the path of a task's YAML file. Metrics of a filter other than `none` are
    named `<metric>.<filter>`; intervals are the mean with 1.96 standard errors, where the harness gives these.
    Raises ConfigError where the harness is not installed or has no such task, DataError where the task's data cannot be loaded.
    """
    name, manager = find(section.task)
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    # A chat template of ours has no padding side for the harness to undo: it sets its own.
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    seeds = {f"{library}_seed": seed for library in ("random", "numpy_random", "torch_random", "fewshot_random")}
    settings = {
        "limit": section.max_samples,
        "bootstrap_iters": 1000,
        "log_samples": False,
        "task_manager": manager,
        **seeds,
    }
    try:
        found = lm_eval.simple_evaluate(model=harness, tasks=[name], **settings)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the task {section.task} of evaluation.sets cannot be run ({' '.join(str(error).split())[:200]}): check its data and the network"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found["results"], sort_keys=True, indent=2, default=str) + "\n")
    return _metrics(found["results"][name], found["n-samples"][name]["effective"])


def _is_file(task: str) -> bool:
    return Path(task).suffix in (".yaml", ".yml")


def _not_installed(task: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"evaluation.sets has the task {task}, which needs lm-evaluation-harness ({error}): pip install 'ratchet[lm-eval]'"
    )


def _metrics(results: dict[str, Any], count: int) -> dict[str, Any]:
    metrics: dict[str, Any] = {"num_prompts": count}
    intervals = {}
    for key, value in results.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        # MLflow takes no other characters in the name of a metric.
        name = re.sub(r"[^\w.-]", "_", metric if kind == "none" else f"{metric}.{kind}")
        metrics[name] = float(value)
        error = results.get(f"{metric}_stderr,{kind}")
        if isinstance(error, int | float):
            intervals[name] = [value - 1.96 * error, value + 1.96 * error]
    return {**metrics, "intervals": intervals}
