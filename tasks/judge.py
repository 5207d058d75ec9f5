"""The Prefect task that applies the gates."""

import json
import tempfile
from pathlib import Path
from typing import Any

from prefect import task
from prefect.states import State

from configs.schema import Gate
from tasks.core.judging import gates, report, samples
from tasks.core.storage.jsonl import read_rows
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 2


@task(name="judge", task_run_name="judge", **RETRIES)
def judge(
    run: Run,
    section: dict[str, Gate | None],
    base: Artifact,
    sft: Artifact,
    grpo: Artifact,
    champion: Artifact | None = None,
) -> State:
    """Applies the gates to the evaluation of the GRPO model. The other arguments are evaluations to compare it with.

    The artifact holds verdict.json, report.md and the sample table (samples.md, samples.jsonl). The champion is an
    input only if a gate names it as rival: otherwise a promotion would redo the verdict on an unchanged model.
    """
    active = {name: gate for name, gate in section.items() if gate}
    key = {name: gate.key() for name, gate in active.items()}
    inputs = {"base": base, "sft": sft, "grpo": grpo}
    if champion is not None and any(gate.rival == "champion" for gate in active.values()):
        inputs["champion"] = champion

    def make(out: Path) -> dict[str, Any]:
        folders = {name: fetch(run, artifact, out.parent / name) for name, artifact in inputs.items()}
        measured = {name: _read_evaluation(folder) for name, folder in folders.items()}
        candidate = measured["grpo"]
        rivals = {name: found for name, found in measured.items() if name in ("sft", "champion")}
        verdict = gates.judge(candidate, rivals, active)
        compared = [gates.compare(candidate, found, name) for name, found in measured.items() if name != "grpo"]
        metrics = {name: _read_metrics(folder) for name, folder in folders.items()}
        (out / "verdict.json").write_text(verdict.model_dump_json(indent=1) + "\n")
        (out / "report.md").write_text(report.markdown(metrics, verdict, compared))
        counts = samples.write(folders, out)
        return {
            "passed": verdict.passed,
            "verdict": verdict.model_dump(mode="json"),
            "comparisons": [c.model_dump(mode="json") for c in compared],
            **{f"samples/{kind}": count for kind, count in counts.items()},
        }

    return run_stage(run, Stage("judge", VERSION, key, inputs, make=make))


def compare_stored(run: Run, candidate: Artifact, rival: Artifact, name: str) -> gates.Comparison:
    """Compares two evaluations that are in the store; `name` is the rival's role."""
    with tempfile.TemporaryDirectory(prefix="ratchet-compare-") as folder:
        sides = {"candidate": candidate, "rival": rival}
        found = {side: _read_evaluation(fetch(run, a, Path(folder) / side)) for side, a in sides.items()}
        return gates.compare(found["candidate"], found["rival"], name)


def _read_metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def _read_evaluation(folder: Path) -> gates.Evaluation:
    sets = {file.parent.name: read_rows(file) for file in sorted(folder.glob("sets/*/completions.jsonl"))}
    return gates.evaluation(_read_metrics(folder), read_rows(folder / "completions.jsonl"), sets)
