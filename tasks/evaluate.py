"""The Prefect tasks that find the champion, measure a model on the held-out prompts, and judge."""

import json
import tempfile
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.states import State

from configs.data import ROW_FIELDS
from configs.errors import BadInput, ConfigError
from configs.schema import ComputeSection, DataSection, EvaluationSection, Gate, GRPOSection, ModelSection, RegistrySection
from tasks.core import artifacts, gates, registry, report, rewards, sets, table
from tasks.core.trainer import read_rows
from tasks.sft import loading
from tasks.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 4
JUDGE_VERSION = 2


@task(name="champion", task_run_name="champion", **RETRIES)
def find_champion(run: Run, section: RegistrySection, gates_: dict[str, Gate | None]) -> Artifact | None:
    """The artifact of the registered model's champion, for it is measured too; None where there is no champion yet.

    One whose artifact is not in this store, or is damaged, is left out with a warning. Raises ConfigError where a gate needs it.
    """
    try:
        number = registry.aliases(section.name, run.tracking).get(registry.CHAMPION)
    except BadInput:  # no model of that name: this run registers the first version
        return None
    if number is None:
        return None
    version = registry.describe(section.name, number, run.tracking)
    uri = version.tags.get("ratchet.model_uri", version.source)
    ours = registry.OUR_MODEL.fullmatch(uri)
    manifest = artifacts.find(run.store, ours["prefix"]) if ours and ours["root"] == run.store.root.rstrip("/") else None
    if manifest is not None and manifest.folder == ours["attempt"]:
        stage, _, key = ours["prefix"].partition("/")
        return Artifact(stage=stage, key=key, uri=uri.removesuffix("/model"), digest=manifest.digest, cached=True, seconds=0.0)
    what = f"version {number} of {section.name} is the champion and lies at {uri}, where this run, whose store is {run.store.root}, finds no whole artifact"
    if any(gate and gate.rival == "champion" for gate in gates_.values()):
        raise ConfigError(f"{what}: take the gate with rival champion out, use its store, or promote a version that is here")
    get_run_logger().warning("%s: it is not measured", what)
    return None


@task(name="evaluate", task_run_name="evaluate {role}", **RETRIES)
def evaluate(
    run: Run,
    role: str,
    section: EvaluationSection,
    grpo: GRPOSection,
    model: ModelSection,
    compute: ComputeSection,
    seed: int,
    source: DataSection,
    data: Artifact,
    policy: Artifact,
    reference: Artifact | None = None,
) -> State:
    """Accuracy, reward, lengths, errors, pass@k, on every set, and KL to the reference where there is one; the reward is GRPO's."""
    section = section.model_copy(update={"max_new_tokens": section.max_new_tokens or grpo.max_new_tokens})
    reward = {"reward_type": grpo.reward_type, "reward_config": grpo.reward_config.model_dump(mode="json")}
    code = rewards.source_digest(grpo.reward_type, grpo.reward_config)
    key = {"evaluation": section.key(), **reward, "reward_code": code, "model": loading(model), "device": compute.device, "seed": seed}
    request = {"section": section.model_dump(mode="json"), **reward, "model": model.model_dump(mode="json"), "compute": compute.model_dump(), "seed": seed}
    if files := sets.digests(section.sets):
        asked = source.model_dump(mode="json", include=ROW_FIELDS)
        key |= {"files": files, "asked": asked}
        request |= {"source": asked}
    inputs = {"data": data, policy.stage: policy} | ({reference.stage: reference} if reference else {})
    request |= {"policy": policy.stage, "reference": reference.stage if reference else None}
    return run_stage(run, Stage(f"evaluate_{role}", VERSION, key, inputs, request))


@task(name="judge", task_run_name="judge", **RETRIES)
def judge(run: Run, section: dict[str, Gate | None], base: Artifact, sft: Artifact, grpo: Artifact, champion: Artifact | None = None) -> State:
    """Applies the gates to the GRPO model's measurements; the artifact holds verdict.json, report.md, and the sample table (samples.md, samples.jsonl).

    The champion's measurements count only where a gate has it as rival: otherwise a promotion would change the verdict on a model that it does not touch.
    """
    active = {name: gate for name, gate in section.items() if gate}
    key = {name: gate.key() for name, gate in active.items()}
    inputs = {"base": base, "sft": sft, "grpo": grpo}
    if champion is not None and any(gate.rival == "champion" for gate in active.values()):
        inputs["champion"] = champion

    def make(out: Path) -> dict[str, Any]:
        folders = {name: fetch(run, a, out.parent / name) for name, a in inputs.items()}
        measured = {name: _evaluation(folder) for name, folder in folders.items()}
        candidate = measured["grpo"]
        verdict = gates.judge(candidate, {name: found for name, found in measured.items() if name in ("sft", "champion")}, active)
        compared = [gates.compare(candidate, found, name) for name, found in measured.items() if name != "grpo"]
        (out / "verdict.json").write_text(verdict.model_dump_json(indent=1) + "\n")
        (out / "report.md").write_text(report.markdown({name: _metrics(folder) for name, folder in folders.items()}, verdict, compared))
        counts = table.write(folders, out)
        said = {"verdict": verdict.model_dump(mode="json"), "comparisons": [c.model_dump(mode="json") for c in compared]}
        return {"passed": verdict.passed, **said, **{f"samples/{kind}": count for kind, count in counts.items()}}

    return run_stage(run, Stage("judge", JUDGE_VERSION, key, inputs, make=make))


def against(run: Run, candidate: Artifact, rival: Artifact, name: str) -> gates.Comparison:
    """The comparison of two evaluations that are in the store; `name` is the rival's."""
    with tempfile.TemporaryDirectory(prefix="ratchet-compare-") as folder:
        return gates.compare(*(_evaluation(fetch(run, a, Path(folder) / side)) for side, a in (("candidate", candidate), ("rival", rival))), name)


def _metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def _evaluation(folder: Path) -> gates.Evaluation:
    others = {file.parent.name: read_rows(file) for file in sorted(folder.glob("sets/*/completions.jsonl"))}
    return gates.evaluation(_metrics(folder), read_rows(folder / "completions.jsonl"), others)
