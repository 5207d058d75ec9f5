"""Tasks of the lm-evaluation-harness as an evaluation set (extra `[lm-eval]`)."""

import json
import re
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, DataError
from configs.schema import EvaluationSet


def evaluate(section: EvaluationSet, model: Any, tokenizer: Any, batch_size: int, seed: int, out: Path) -> dict[str, Any]:
    """Metrics of one task, with the harness's own names (`acc`, `exact_match`, ...), and its results in `out/results.json`.

    A task is one that the harness ships (its data comes from the Hub) or the path of a task's YAML file. Metrics of a filter other than `none` are
    named `<metric>.<filter>`; intervals are the mean with 1.96 standard errors, where the harness gives these.
    Raises ConfigError where the harness is not installed or has no such task, DataError where the task's data cannot be loaded.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"evaluation.sets has the task {section.task}, which needs lm-evaluation-harness ({error}): pip install 'ratchet[lm-eval]'"
        ) from error
    # A chat template of ours has no padding side for the harness to undo: it sets its own.
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    local = Path(section.task).suffix in (".yaml", ".yml")
    manager = TaskManager(include_path=str(Path(section.task).parent)) if local else TaskManager()
    name = Path(section.task).stem if local else section.task
    if name not in manager.all_tasks:
        raise ConfigError(f"evaluation.sets has the task {section.task}, which lm-evaluation-harness does not know: see `lm_eval ls tasks`")
    seeds = {f"{library}_seed": seed for library in ("random", "numpy_random", "torch_random", "fewshot_random")}
    settings = {"limit": section.max_samples, "bootstrap_iters": 1000, "log_samples": False, "task_manager": manager, **seeds}
    try:
        found = lm_eval.simple_evaluate(model=harness, tasks=[name], **settings)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the task {section.task} of evaluation.sets cannot be run ({' '.join(str(error).split())[:200]}): check its data and the network"
        ) from error
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(found["results"], sort_keys=True, indent=2, default=str) + "\n")
    return _metrics(found["results"][name], found["n-samples"][name]["effective"])


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
