"""The Prefect task that registers the trained model with its verdict."""

import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.states import State

from configs.schema import RegistrySection
from tasks.core.storage import artifacts
from tasks.core.tracking import registry
from tasks.promote import model_lock
from tasks.runtime.progress import numbers
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 1


@task(name="register", task_run_name="register", **RETRIES)
def register(run: Run, section: RegistrySection, grpo: Artifact, evaluation: Artifact, verdict: Artifact) -> State:
    """Makes a model version of the GRPO artifact, with the verdict as tags; one that passed goes to Staging as challenger."""
    passed = verdict.metrics["passed"]
    # The address is part of the key: a GRPO stage that was redone lies elsewhere, and the version must lead there.
    stage = Stage(
        "register", VERSION, {"registry": section.key(), "model": f"{grpo.uri}/model"}, {"grpo": grpo, "judge": verdict}
    )
    tags = {f"metric.{k}": f"{v:.6g}" for k, v in numbers(evaluation.metrics).items()}
    tags |= {
        "gate.status": "passed" if passed else "rejected",
        "ratchet.grpo.uri": grpo.uri,
        "ratchet.verdict.uri": verdict.uri,
    }
    tags |= {f"gate.{g['name']}": f"{g['outcome']}: {g['sentence']}" for g in verdict.metrics["verdict"]["gates"]}

    def make(out: Path) -> dict[str, Any]:
        folder = fetch(
            run, grpo, out.parent / "grpo"
        )  # checks every byte against the manifest: no damaged model gets a version
        version = registry.register(
            section, run.tracking, f"{grpo.uri}/model", grpo.mlflow_run or run.parent, tags, stage.key, folder / "model"
        )
        if passed:
            with model_lock(section.name):
                version = registry.stage_challenger(version, run.tracking)
        found = {"name": version.name, "version": version.version}
        (out / "registration.json").write_text(json.dumps(found, sort_keys=True) + "\n")
        return found

    def still_there(manifest: artifacts.Manifest) -> bool:
        return registry.find(section, run.tracking, stage.key) is not None

    stage.make, stage.still_there = make, still_there
    return run_stage(run, stage)
