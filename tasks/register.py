"""The Prefect task that registers the trained model with its verdict."""

import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.states import State

from configs.schema import RegistrySection
from tasks.core.storage import artifacts
from tasks.core.tracking import registry, stage_links
from tasks.promote import model_lock
from tasks.runtime.progress import numbers
from tasks.runtime.stage import RETRIES, Artifact, Run, Stage, fetch, run_stage

VERSION = 1


@task(name="register", task_run_name="register", **RETRIES)
def register(run: Run, section: RegistrySection, grpo: Artifact, evaluation: Artifact, verdict: Artifact) -> State:
    """Registers the GRPO artifact as a model version with the verdict as tags.

    A version that passed becomes the challenger, in Staging.
    """
    passed = verdict.metrics["passed"]
    # The address is part of the key: a GRPO stage that is redone has another address, and needs another version.
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
        # The only time that the model's bytes are read. `fetch` compares them with the manifest.
        model = fetch(run, grpo, out.parent / "grpo") / "model"
        run_id = stage_links.find_run_id(run.tracking, grpo) or run.parent
        version = registry.register(section, run.tracking, f"{grpo.uri}/model", run_id, tags, stage.key, model)
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
