import json
import math
import socket
import threading
import time
import uuid
from pathlib import Path

import pytest
from wire import Wire, history

from configs.errors import BadInput, ConfigError, TrackingUnavailable
from configs.schema import TrackingSection
from tasks.core.tracking.runs import best_effort, connect
from tasks.core.tracking.server import mlflow_errors
from tasks.core.tracking.spool import flatten, points


@pytest.fixture
def section(stack):
    return TrackingSection(experiment=f"test-{uuid.uuid4().hex[:8]}")


@pytest.fixture
def tracking(section):
    return connect(section)


@pytest.fixture
def wire(tracking):
    wire = Wire(tracking.uri)
    yield wire
    wire.close()


def test_no_address_is_a_config_error(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(
        ConfigError, match=r"tracking.uri is not set and neither is MLFLOW_TRACKING_URI: .*`ratchet up`"
    ):
        connect(TrackingSection())


def test_a_server_that_does_not_answer_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        TrackingUnavailable, match=f"the MLflow server at http://127.0.0.1:{port} does not answer .*`ratchet up`"
    ):
        connect(TrackingSection(uri=f"http://127.0.0.1:{port}"))


def test_an_address_that_is_none_is_named():
    with pytest.raises(TrackingUnavailable, match=r"http://nowhere\.invalid does not answer"):
        connect(TrackingSection(uri="http://nowhere.invalid"))


def test_without_verification_nothing_is_sent():
    assert connect(TrackingSection(uri="http://127.0.0.1:9"), verify=False).uri == "http://127.0.0.1:9"


def test_four_that_connect_at_once_get_one_experiment(section):
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(connect(section).experiment())) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(ids) == 4 and len(set(ids)) == 1


def test_a_deleted_experiment_is_restored(tracking, section):
    tracking.client.delete_experiment(tracking.experiment())
    again = connect(section)
    assert again.experiment() == tracking.experiment()
    assert again.client.get_experiment(again.experiment()).lifecycle_stage == "active"


def test_a_retry_of_the_flow_run_continues_its_parent(tracking, section):
    first = tracking.parent("flow-1", "brave-fox", {"grpo": {"kl_coef": 0.05}}, {"ratchet.store": "s3://ratchet"})
    tracking.finish(first, "FAILED", {})
    again = connect(section).parent("flow-1", "brave-fox", {"grpo": {"kl_coef": 0.05}})
    run = tracking.client.get_run(first)
    assert again == first
    assert run.info.status == "RUNNING" and run.info.run_name == "brave-fox"
    assert run.data.params == {"grpo.kl_coef": "0.05"} and run.data.tags["ratchet.store"] == "s3://ratchet"
    assert tracking.parent("flow-2", "calm-owl") != first


def test_finish_keeps_metrics_tags_and_report(tracking, tmp_path):
    parent = tracking.parent("flow-1", "brave-fox")
    assert tracking.finish(parent, "FINISHED", {"grpo.accuracy": 0.85}, {"gate.status": "passed"}, "| base | sft |\n")
    run = tracking.client.get_run(parent)
    assert (
        run.info.status == "FINISHED"
        and run.data.metrics == {"grpo.accuracy": 0.85}
        and run.data.tags["gate.status"] == "passed"
    )
    path = tracking.client.download_artifacts(parent, "report.md", str(tmp_path))
    assert Path(path).read_text() == "| base | sft |\n"


def test_a_stage_is_a_child_run_with_curves_and_links(tracking):
    parent = tracking.parent("flow-1", "brave-fox")
    stage = tracking.stage(parent, "sft", "k" * 64, {"learning_rate": 2e-4, "trl": {}})
    stage.log(10, {"loss": 2.5, "note": "text", "none": None})
    stage.log(20, {"loss": 1.5, "rewards/f(x)/mean": True})
    assert (
        stage.finish("FINISHED", {"seconds": 3.0}, {"ratchet.digest": "d"}, {"model": "s3://ratchet/sft/k/model"}) == 0
    )
    run = tracking.client.get_run(stage.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "sft"
    assert (
        run.data.tags["mlflow.parentRunId"] == parent
        and run.data.tags["ratchet.stage"] == "sft"
        and run.data.tags["ratchet.key"] == "k" * 64
    )
    assert run.data.tags["artifact.model"] == "s3://ratchet/sft/k/model" and run.data.tags["ratchet.digest"] == "d"
    assert run.data.params == {"learning_rate": "0.0002", "trl": "{}"}
    assert history(tracking, stage.run_id, "loss") == [(10, 2.5), (20, 1.5)]
    assert set(run.data.metrics) == {"loss", "rewards/f_x_/mean", "seconds"}


def test_a_retried_stage_goes_on_in_its_run_and_repeats_no_step(tracking):
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
    other = tracking.stage(parent, "grpo", "other", {})
    other.finish("FINISHED")
    assert other.run_id not in (None, first.run_id)


def test_params_too_long_for_mlflow_are_kept_whole_as_an_artifact(tracking, tmp_path):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {"chat_template": "x" * 7000, "seed": 1})
    assert stage.finish("FINISHED") == 0
    assert tracking.client.get_run(stage.run_id).data.params == {
        "chat_template": "in the artifact params.json",
        "seed": "1",
    }
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
    assert (entry.dataset.name, entry.dataset.digest, entry.dataset.source) == (
        "data",
        "a" * 36,
        '{"uri": "s3://ratchet/data/k/a"}',
    )
    assert {t.key: t.value for t in entry.tags} == {"mlflow.data.context": "training", "sha256": "a" * 64}


def test_a_status_that_ends_no_run_is_refused(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {})
    with pytest.raises(ValueError, match="status is 'DONE' and must be one of FINISHED, FAILED, KILLED"):
        stage.finish("DONE")


def test_a_refusal_becomes_bad_input(tracking):
    with (
        pytest.raises(BadInput, match=r"refused to show a run: .*not-a-run"),
        mlflow_errors("show a run", tracking.uri),
    ):
        tracking.client.get_run("not-a-run")


def test_a_connection_that_breaks_becomes_tracking_unavailable(tracking, wire):
    through = connect(TrackingSection(uri=wire.uri), verify=False)
    wire.cut()
    with pytest.raises(TrackingUnavailable, match="could not show a run"), mlflow_errors("show a run", wire.uri):
        through.client.get_run("0" * 32)


def test_best_effort_gives_up_after_its_time():
    assert best_effort(lambda: time.sleep(5), "sleep", "otherwise", seconds=0.1) == "otherwise"


def test_flatten_joins_names_with_dots():
    assert flatten({"a": {"b": 1, "c": [1, "x"]}, "d": None, "e": {}}) == {
        "a.b": "1",
        "a.c": '[1, "x"]',
        "d": "None",
        "e": "{}",
    }


def test_points_leave_out_what_is_no_number():
    assert [(p.name, p.value, p.step) for p in points({"loss": 1, "text": "x", "none": None, "ok": True}, 7)] == [
        ("loss", 1.0, 7),
        ("ok", 1.0, 7),
    ]
