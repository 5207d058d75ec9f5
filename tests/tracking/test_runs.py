import json
import math
import threading
from pathlib import Path

import pytest
from mlflow_runs import history

from configs.schema import TrackingSection
from tasks.core.tracking.runs import best_effort, connect


def test_a_retry_of_the_flow_run_continues_its_parent_run(tracking):
    first = tracking.parent("flow-1", "brave-fox", {"grpo": {"kl_coef": 0.05}}, {"ratchet.store": "s3://ratchet"})
    tracking.finish(first, "FAILED", {})
    again = connect(TrackingSection(experiment=tracking.name))
    assert again.parent("flow-1", "brave-fox", {"grpo": {"kl_coef": 0.05}}) == first
    run = tracking.client.get_run(first)
    assert run.info.status == "RUNNING" and run.info.run_name == "brave-fox"
    assert run.data.params == {"grpo.kl_coef": "0.05"} and run.data.tags["ratchet.store"] == "s3://ratchet"


def test_another_flow_run_has_another_parent_run(tracking):
    assert tracking.parent("flow-2", "calm-owl") != tracking.parent("flow-1", "brave-fox")


def test_finish_logs_metrics_tags_and_the_report(tracking, tmp_path):
    parent = tracking.parent("flow-1", "brave-fox")
    assert tracking.finish(parent, "FINISHED", {"grpo.accuracy": 0.85}, {"gate.status": "passed"}, "| base | sft |\n")
    run = tracking.client.get_run(parent)
    assert (run.info.status, run.data.metrics, run.data.tags["gate.status"]) == (
        "FINISHED",
        {"grpo.accuracy": 0.85},
        "passed",
    )
    path = tracking.client.download_artifacts(parent, "report.md", str(tmp_path))
    assert Path(path).read_text() == "| base | sft |\n"


def test_a_stage_is_a_child_run_with_curves_and_links(tracking):
    parent = tracking.parent("flow-1", "brave-fox")
    stage = tracking.stage(parent, "sft", "k" * 64, {"learning_rate": 2e-4, "trl": {}})
    stage.log(10, {"loss": 2.5, "note": "text", "none": None})
    stage.log(20, {"loss": 1.5, "rewards/f(x)/mean": True})
    links = {"model": "s3://ratchet/sft/k/model"}
    assert stage.finish("FINISHED", {"seconds": 3.0}, {"ratchet.digest": "d"}, links) == 0
    run = tracking.client.get_run(stage.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "sft"
    names = ("mlflow.parentRunId", "ratchet.stage", "ratchet.key", "artifact.model", "ratchet.digest")
    assert [run.data.tags[name] for name in names] == [parent, "sft", "k" * 64, "s3://ratchet/sft/k/model", "d"]
    assert run.data.params == {"learning_rate": "0.0002", "trl": "{}"}
    assert history(tracking, stage.run_id, "loss") == [(10, 2.5), (20, 1.5)]
    assert set(run.data.metrics) == {"loss", "rewards/f_x_/mean", "seconds"}


def test_a_retried_stage_continues_its_run_and_repeats_no_step(tracking):
    parent = tracking.parent("flow-1", "brave-fox")
    first = tracking.stage(parent, "grpo", "k", {"logging_steps": 1})
    for step in (1, 2, 3):
        first.log(step, {"reward": step / 10})
    first.finish("FAILED")
    again = tracking.stage(parent, "grpo", "k", {"logging_steps": 2})
    for step in (2, 3, 4):
        again.log(step, {"reward": step / 10})
    assert again.finish("FINISHED") == 0
    run = tracking.client.get_run(first.run_id)
    assert again.run_id == first.run_id and run.info.status == "FINISHED"
    assert history(tracking, first.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert run.data.params == {"logging_steps": "1"} and run.data.tags["ratchet.changed.logging_steps"] == "2"


def test_a_stage_with_another_key_has_another_run(tracking):
    parent = tracking.parent("flow-1", "brave-fox")
    stages = [tracking.stage(parent, "grpo", key, {}) for key in ("k", "other")]
    assert [stage.finish("FINISHED") for stage in stages] == [0, 0]
    assert len({None, *(stage.run_id for stage in stages)}) == 3


def test_params_that_are_too_long_are_kept_whole_in_an_artifact(tracking, tmp_path):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {"chat_template": "x" * 7000, "seed": 1})
    assert stage.finish("FINISHED") == 0
    params = tracking.client.get_run(stage.run_id).data.params
    assert params == {"chat_template": "in the artifact params.json", "seed": "1"}
    path = tracking.client.download_artifacts(stage.run_id, "params.json", str(tmp_path))
    assert json.loads(Path(path).read_text()) == {"chat_template": "x" * 7000, "seed": 1}


def test_more_params_and_points_than_a_batch_holds_all_arrive(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {f"p{i}": i for i in range(230)})
    stage.log(1, {f"m{i}": i for i in range(1200)})
    assert stage.finish("FINISHED") == 0
    data = tracking.client.get_run(stage.run_id).data
    assert len(data.params) == 230 and len(data.metrics) == 1200


def test_nan_and_infinity_arrive_as_nan(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {})
    stage.log(1, {"loss": math.nan, "grad_norm": math.inf})
    assert stage.finish("FINISHED") == 0
    metrics = tracking.client.get_run(stage.run_id).data.metrics
    assert math.isnan(metrics["loss"]) and math.isnan(metrics["grad_norm"])


def test_a_dataset_has_its_whole_digest_as_a_tag(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {})
    stage.dataset("data", "a" * 64, "s3://ratchet/data/k/a")
    assert stage.finish("FINISHED") == 0
    (entry,) = tracking.client.get_run(stage.run_id).inputs.dataset_inputs
    shown = (entry.dataset.name, entry.dataset.digest, entry.dataset.source)
    assert shown == ("data", "a" * 36, '{"uri": "s3://ratchet/data/k/a"}')
    assert {t.key: t.value for t in entry.tags} == {"mlflow.data.context": "training", "sha256": "a" * 64}


def test_finish_refuses_a_status_that_does_not_end_a_run(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {})
    with pytest.raises(ValueError, match="status is 'DONE' and must be one of FINISHED, FAILED, KILLED"):
        stage.finish("DONE")


def test_best_effort_gives_up_after_its_time():
    assert best_effort(lambda: threading.Event().wait(60), "wait", "otherwise", seconds=0.1) == "otherwise"
