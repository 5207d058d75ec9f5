import logging

import pytest
from wire import history, wait_for

from configs.schema import TrackingSection
from tasks.core.tracking.curves import StageRun
from tasks.core.tracking.runs import Tracking, connect
from tasks.core.tracking.spool import Record


@pytest.fixture
def through(tracking, wire):
    """The same experiment, by way of the wire."""
    return connect(TrackingSection(uri=wire.uri, experiment=tracking.name))


def children(tracking, parent):
    return tracking.client.search_runs([tracking.experiment()], f"tags.`mlflow.parentRunId` = '{parent}'")


def test_an_outage_is_waited_out_and_the_points_arrive(tracking, wire, through):
    stage = through.stage(through.parent("flow-1", "fox"), "grpo", "k", {})
    stage.log(1, {"reward": 0.1})
    assert wait_for(lambda: stage.run_id and history(tracking, stage.run_id, "reward") == [(1, 0.1)])
    wire.cut()
    for step in (2, 3):
        stage.log(step, {"reward": step / 10})
    assert wait_for(lambda: wire.refused > 3)
    wire.mend()
    assert wait_for(lambda: history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)])
    assert stage.finish("FINISHED") == 0


@pytest.mark.parametrize("failure", ["cut", "hang"])
def test_a_server_away_for_the_whole_stage_gets_all_of_it_later_and_once(
    tracking, wire, through, tmp_path, caplog, failure
):
    parent = through.parent("flow-1", "fox")
    getattr(wire, failure)()
    stage = through.stage(parent, "grpo", "k", {"seed": 7}, attempt=3, spool=tmp_path)
    stage.dataset("data", "a" * 64, "s3://ratchet/data/k")
    for step in range(1, 1501):
        stage.log(step, {"reward": step / 10})
    with caplog.at_level(logging.WARNING):
        assert stage.finish("FINISHED", {"final/reward": 0.5}, {"ratchet.digest": "d"}) == 1501
    (file,) = tmp_path.iterdir()
    assert (
        stage.run_id is None
        and f"1501 points, its tags and its status are kept in {file} and sent when it answers" in caplog.text
    )
    wire.mend()
    assert through.settle(120) == 0
    (run,) = children(tracking, parent)
    assert (run.info.run_id, run.info.status, run.info.end_time) == (stage.run_id, "FINISHED", stage.record.ended)
    assert history(tracking, stage.run_id, "reward") == [(step, step / 10) for step in range(1, 1501)]
    assert run.data.params == {"seed": "7"} and run.data.metrics["final/reward"] == 0.5
    assert (run.data.tags["ratchet.attempt"], run.data.tags["ratchet.digest"]) == ("3", "d")
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["data"]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_kept_when_all_has_arrived(tracking, tmp_path):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {}, spool=tmp_path)
    stage.log(1, {"loss": 2.0})
    assert stage.finish("FINISHED") == 0
    assert stage.done.is_set() and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_warning_and_the_memory_delivers(
    tracking, wire, through, tmp_path, caplog
):
    taken = tmp_path / "file"
    taken.write_text("")
    parent = through.parent("flow-1", "fox")
    wire.cut()
    stage = through.stage(parent, "grpo", "k", {}, spool=taken)
    stage.log(1, {"reward": 0.1})
    with caplog.at_level(logging.WARNING):
        assert stage.finish("FINISHED") == 1
    assert f"in memory alone, for {taken} cannot be written (" in caplog.text
    wire.mend()
    assert through.settle(120) == 0
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1)]


def test_a_parent_that_ends_during_an_outage_is_ended_later(tracking, wire, through, tmp_path):
    parent = through.parent("flow-1", "fox")
    wire.cut()
    assert (
        through.finish(parent, "FINISHED", {"accuracy": 0.5}, {"gate.status": "passed"}, "| base |\n", spool=tmp_path)
        is False
    )
    assert len(list(tmp_path.iterdir())) == 1
    wire.mend()
    assert through.settle(120) == 0
    run = tracking.client.get_run(parent)
    assert (run.info.status, run.data.metrics, run.data.tags["gate.status"]) == (
        "FINISHED",
        {"accuracy": 0.5},
        "passed",
    )
    assert [file.path for file in tracking.client.list_artifacts(parent)] == ["report.md"]
    assert list(tmp_path.iterdir()) == []


def test_attempts_of_a_stage_during_one_outage_arrive_as_one_curve(tracking, wire, through, tmp_path):
    parent = through.parent("flow-1", "fox")
    wire.cut()
    for attempt, status in ((1, "FAILED"), (2, "FINISHED")):
        stage = through.stage(parent, "grpo", "k", {}, attempt, tmp_path)
        for step in range(1, 3 + attempt):
            stage.log(step, {"reward": step / 10})
        assert stage.finish(status) == 2 + attempt
    assert len(list(tmp_path.iterdir())) == 2
    wire.mend()
    assert through.settle(120) == 0
    (run,) = children(tracking, parent)
    assert (run.info.status, run.data.tags["ratchet.attempt"]) == ("FINISHED", "2")
    assert history(tracking, run.info.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert list(tmp_path.iterdir()) == []


def test_a_continued_run_has_the_number_of_the_last_attempt(tracking):
    parent = tracking.parent("flow-1", "fox")
    for attempt in (1, 2):
        stage = tracking.stage(parent, "grpo", "k", {}, attempt)
        stage.finish("FAILED")
        assert tracking.client.get_run(stage.run_id).data.tags["ratchet.attempt"] == str(attempt)
    assert len(children(tracking, parent)) == 1


def test_a_step_that_is_logged_twice_counts_once(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "grpo", "k", {})
    for step, reward in ((1, 0.1), (2, 0.2), (1, 0.7), (2, 0.7), (3, 0.3)):
        stage.log(step, {"reward": reward})
    assert stage.finish("FINISHED") == 0
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_another_pipeline_run_has_a_whole_curve_of_its_own(tracking):
    for flow in ("flow-1", "flow-2"):
        stage = tracking.stage(tracking.parent(flow, "fox"), "grpo", "k", {})
        for step in (1, 2):
            stage.log(step, {"reward": step / 10})
        assert stage.finish("FINISHED") == 0
        assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)]


def test_a_batch_whose_answer_was_lost_is_not_doubled(tracking, wire, through):
    stage = through.stage(through.parent("flow-1", "fox"), "grpo", "k", {})
    assert wait_for(lambda: stage.run_id is not None)
    wire.mute(b"log-batch")
    stage.log(1, {"reward": 0.1})
    assert wait_for(lambda: wire.muted > 0)
    wire.mend()
    stage.log(2, {"reward": 0.2})
    assert wait_for(lambda: history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)])
    stage.finish("FINISHED")
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)]


def test_a_batch_is_not_doubled_in_a_store_that_would_take_it_twice(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    class LosesAnAnswer(Tracking):
        answers = 0

        def send(self, run_id, sent, tags):
            super().send(run_id, sent, tags)
            self.answers += bool(sent)
            if sent and self.answers == 1:
                raise ConnectionResetError("the answer was lost")

    tracking = LosesAnAnswer(f"file://{tmp_path / 'mlruns'}", "curves")
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "grpo", "k", {})
    stage.log(1, {"reward": 0.1})
    assert wait_for(lambda: tracking.answers == 1)
    stage.log(2, {"reward": 0.2})
    assert stage.finish("FINISHED") == 0
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)]


def test_a_run_whose_making_was_not_answered_is_made_once(tracking, wire, through):
    parent = through.parent("flow-1", "fox")
    wire.mute(b"runs/create")
    stage = through.stage(parent, "grpo", "k", {})
    assert wait_for(lambda: wire.muted > 1)
    wire.mend()
    assert wait_for(lambda: stage.run_id is not None)
    stage.finish("FINISHED")
    assert [(run.info.run_id, run.info.status) for run in children(tracking, parent)] == [(stage.run_id, "FINISHED")]


def test_a_refused_batch_is_counted_and_does_not_stop_the_next(tracking):
    class RefusesOne(Tracking):
        def send(self, run_id, sent, tags):
            # The real server's refusal of a name that is too long.
            super().send(run_id, [p._replace(name="a" * 300) if p.name == "bad" else p for p in sent], tags)

    run_id = tracking.parent("flow-1", "fox")
    stage = StageRun(
        RefusesOne(tracking.uri, tracking.name), Record(uri=tracking.uri, experiment=tracking.name, run_id=run_id)
    ).start()
    stage.log(1, {"bad": 1.0})
    assert wait_for(lambda: stage._lost == 1)
    stage.log(2, {"good": 1.0})
    assert stage.finish("FINISHED") == 1
    assert tracking.client.get_run(run_id).data.metrics == {"good": 1.0}
