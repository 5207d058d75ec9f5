"""The Prefect tasks that measure a model on the held-out prompts, and judge."""

import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.states import State

from configs.schema import ComputeSection, EvaluationSection, Gate, GRPOSection, ModelSection
from tasks.core import gates, report, rewards
from tasks.core.trainer import read_rows
from tasks.sft import loading
from tasks.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 2
JUDGE_VERSION = 1


@task(name="evaluate", task_run_name="evaluate {role}", **RETRIES)
def evaluate(
    run: Run,
    role: str,
    section: EvaluationSection,
    grpo: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    data: Artifact,
    policy: Artifact,
    reference: Artifact | None = None,
) -> State:
    """Greedy accuracy, mean reward, lengths, and KL to the reference where there is one; the reward is GRPO's."""
    section = section.model_copy(update={"max_new_tokens": section.max_new_tokens or grpo.max_new_tokens})
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    code = rewards.source_digest(grpo.reward_type, grpo.reward_config)
    key = {"evaluation": section.key(), **reward, "reward_code": code, "model": loading(model), "device": compute.device, "seed": seed}
    inputs = {"data": data, policy.stage: policy} | ({reference.stage: reference} if reference else {})
    request = {"section": section.model_dump(mode="json"), **reward, "model": model.model_dump(mode="json"), "compute": compute.model_dump(), "seed": seed}
    request |= {"policy": policy.stage, "reference": reference.stage if reference else None}
    return run_stage(run, Stage(f"evaluate_{role}", VERSION, key, inputs, request))


@task(name="judge", task_run_name="judge", **RETRIES)
def judge(run: Run, section: dict[str, Gate | None], base: Artifact, sft: Artifact, grpo: Artifact) -> State:
    """Applies the gates to the GRPO model's measurements; the artifact holds verdict.json and report.md."""
    active = {name: gate for name, gate in section.items() if gate}
    key = {name: gate.key() for name, gate in active.items()}
    inputs = {"base": base, "sft": sft, "grpo": grpo}

    def make(out: Path) -> dict[str, Any]:
        measured = {name: _evaluation(fetch(run, a, out.parent / name)) for name, a in inputs.items()}
        verdict = gates.judge(measured["grpo"], {"sft": measured["sft"]}, active)
        (out / "verdict.json").write_text(verdict.model_dump_json(indent=1) + "\n")
        (out / "report.md").write_text(report.markdown({name: e.metrics for name, e in measured.items()}, verdict))
        return {"passed": verdict.passed, "verdict": verdict.model_dump(mode="json")}

    return run_stage(run, Stage("judge", JUDGE_VERSION, key, inputs, make=make))


def _evaluation(folder: Path) -> gates.Evaluation:
    return gates.evaluation(json.loads((folder / "metrics.json").read_text()), read_rows(folder / "completions.jsonl"))
