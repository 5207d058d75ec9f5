"""Outages of the server: everything arrives later, and once."""

import logging

import pytest
from mlflow_runs import children, history, wait_for


def test_points_that_are_logged_during_an_outage_arrive_after_it(tracking, proxy, through_proxy):
    stage = through_proxy.stage(through_proxy.parent("flow-1", "fox"), "grpo", "k", {})
    stage.log(1, {"reward": 0.1})
    assert wait_for(lambda: stage.run_id and history(tracking, stage.run_id, "reward") == [(1, 0.1)])
    proxy.disconnect()
    for step in (2, 3):
        stage.log(step, {"reward": step / 10})
    assert wait_for(lambda: proxy.refused > 3)
    proxy.restore()
    assert wait_for(lambda: history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)])
    assert stage.finish("FINISHED") == 0


@pytest.mark.parametrize("failure", ["disconnect", "hang"])
def test_a_stage_without_a_server_is_delivered_whole_and_once_afterwards(
    tracking, proxy, through_proxy, short_finish, tmp_path, caplog, failure
):
    parent = through_proxy.parent("flow-1", "fox")
    getattr(proxy, failure)()
    stage = through_proxy.stage(parent, "grpo", "k", {"seed": 7}, attempt=3, outbox=tmp_path)
    stage.dataset("data", "a" * 64, "s3://ratchet/data/k")
    for step in range(1, 1501):
        stage.log(step, {"reward": step / 10})
    with caplog.at_level(logging.WARNING):
        assert stage.finish("FINISHED", {"final/reward": 0.5}, {"ratchet.digest": "d"}) == 1501
    (file,) = tmp_path.iterdir()
    assert stage.run_id is None
    assert f"1501 points, its tags and its status are kept in {file} and sent later" in caplog.text
    proxy.restore()
    assert through_proxy.settle(120) == 0
    (run,) = children(tracking, parent)
    assert (run.info.run_id, run.info.status, run.info.end_time) == (stage.run_id, "FINISHED", stage.record.ended)
    assert history(tracking, stage.run_id, "reward") == [(step, step / 10) for step in range(1, 1501)]
    assert run.data.params == {"seed": "7"} and run.data.metrics["final/reward"] == 0.5
    assert (run.data.tags["ratchet.attempt"], run.data.tags["ratchet.digest"]) == ("3", "d")
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["data"]
    assert list(tmp_path.iterdir()) == []


def test_without_a_writable_outbox_the_points_are_delivered_from_memory(
    tracking, proxy, through_proxy, short_finish, tmp_path, caplog
):
    file = tmp_path / "file"
    file.write_text("")
    parent = through_proxy.parent("flow-1", "fox")
    proxy.disconnect()
    stage = through_proxy.stage(parent, "grpo", "k", {}, outbox=file)
    stage.log(1, {"reward": 0.1})
    with caplog.at_level(logging.WARNING):
        assert stage.finish("FINISHED") == 1
    assert f"in memory only, because {file} cannot be written (" in caplog.text
    proxy.restore()
    assert through_proxy.settle(120) == 0
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1)]


def test_a_parent_run_that_ends_during_an_outage_is_ended_later(tracking, proxy, through_proxy, short_finish, tmp_path):
    parent = through_proxy.parent("flow-1", "fox")
    proxy.disconnect()
    metrics, tags = {"accuracy": 0.5}, {"gate.status": "passed"}
    assert through_proxy.finish(parent, "FINISHED", metrics, tags, "| base |\n", tmp_path) is False
    assert len(list(tmp_path.iterdir())) == 1
    proxy.restore()
    assert through_proxy.settle(120) == 0
    run = tracking.client.get_run(parent)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {"accuracy": 0.5})
    assert run.data.tags["gate.status"] == "passed"
    assert [file.path for file in tracking.client.list_artifacts(parent)] == ["report.md"]
    assert list(tmp_path.iterdir()) == []


def test_two_attempts_during_one_outage_become_one_curve(tracking, proxy, through_proxy, short_finish, tmp_path):
    parent = through_proxy.parent("flow-1", "fox")
    proxy.disconnect()
    for attempt, status in ((1, "FAILED"), (2, "FINISHED")):
        stage = through_proxy.stage(parent, "grpo", "k", {}, attempt, tmp_path)
        for step in range(1, 3 + attempt):
            stage.log(step, {"reward": step / 10})
        assert stage.finish(status) == 2 + attempt
    assert len(list(tmp_path.iterdir())) == 2
    proxy.restore()
    assert through_proxy.settle(120) == 0
    (run,) = children(tracking, parent)
    assert (run.info.status, run.data.tags["ratchet.attempt"]) == ("FINISHED", "2")
    assert history(tracking, run.info.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert list(tmp_path.iterdir()) == []
