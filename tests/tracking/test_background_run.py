"""Curves with the server present, and with answers that are lost. Outages are in test_delivery.py."""

from mlflow_runs import children, history, wait_for

from tasks.core.tracking import delivery
from tasks.core.tracking.records import Record
from tasks.core.tracking.runs import Tracking


def test_a_step_that_is_logged_twice_counts_once(tracking):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "grpo", "k", {})
    for step, reward in ((1, 0.1), (2, 0.2), (1, 0.7), (2, 0.7), (3, 0.3)):
        stage.log(step, {"reward": reward})
    assert stage.finish("FINISHED") == 0
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_another_pipeline_run_has_the_whole_curve_again(tracking):
    for flow in ("flow-1", "flow-2"):
        stage = tracking.stage(tracking.parent(flow, "fox"), "grpo", "k", {})
        for step in (1, 2):
            stage.log(step, {"reward": step / 10})
        assert stage.finish("FINISHED") == 0
        assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)]


def test_a_continued_run_has_the_number_of_the_last_attempt(tracking):
    parent = tracking.parent("flow-1", "fox")
    for attempt in (1, 2):
        stage = tracking.stage(parent, "grpo", "k", {}, attempt)
        stage.finish("FAILED")
        assert tracking.client.get_run(stage.run_id).data.tags["ratchet.attempt"] == str(attempt)
    assert len(children(tracking, parent)) == 1


def test_the_outbox_is_empty_when_everything_has_arrived(tracking, tmp_path):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", "k", {}, outbox=tmp_path)
    stage.log(1, {"loss": 2.0})
    assert stage.finish("FINISHED") == 0
    assert stage.done.is_set() and list(tmp_path.iterdir()) == []


def test_a_batch_whose_answer_was_lost_is_logged_once(tracking, proxy, through_proxy):
    stage = through_proxy.stage(through_proxy.parent("flow-1", "fox"), "grpo", "k", {})
    assert wait_for(lambda: stage.run_id is not None)
    proxy.lose_answers(b"log-batch")
    stage.log(1, {"reward": 0.1})
    assert wait_for(lambda: proxy.lost > 0)
    proxy.restore()
    stage.log(2, {"reward": 0.2})
    assert wait_for(lambda: history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)])
    stage.finish("FINISHED")
    assert history(tracking, stage.run_id, "reward") == [(1, 0.1), (2, 0.2)]


def test_a_batch_is_logged_once_in_a_store_that_keeps_duplicates(monkeypatch, tmp_path):
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


def test_a_run_whose_creation_was_not_answered_exists_once(tracking, proxy, through_proxy):
    parent = through_proxy.parent("flow-1", "fox")
    proxy.lose_answers(b"runs/create")
    stage = through_proxy.stage(parent, "grpo", "k", {})
    assert wait_for(lambda: proxy.lost > 1)
    proxy.restore()
    assert wait_for(lambda: stage.run_id is not None)
    stage.finish("FINISHED")
    assert [(run.info.run_id, run.info.status) for run in children(tracking, parent)] == [(stage.run_id, "FINISHED")]


def test_a_refused_batch_is_counted_and_the_next_one_is_sent(tracking):
    class RefusesOne(Tracking):
        def send(self, run_id, sent, tags):
            # The real server refuses a name that is too long.
            super().send(run_id, [p._replace(name="a" * 300) if p.name == "bad" else p for p in sent], tags)

    run_id = tracking.parent("flow-1", "fox")
    record = Record(uri=tracking.uri, experiment=tracking.name, run_id=run_id)
    run = delivery.start(RefusesOne(tracking.uri, tracking.name), record)
    run.log(1, {"bad": 1.0})
    assert wait_for(lambda: not run.record.points)
    run.log(2, {"good": 1.0})
    assert run.finish("FINISHED") == 1
    assert tracking.client.get_run(run_id).data.metrics == {"good": 1.0}
