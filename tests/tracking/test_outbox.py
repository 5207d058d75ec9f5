"""Records in files: what a dead process left is delivered by another, once."""

import json
import logging
import math
import subprocess
import sys

import pytest
from mlflow_runs import children, history, wait_for

from tasks.core.tracking.outbox import claim, keep
from tasks.core.tracking.records import Point, Record

# No process has this id: Linux's largest is 4194304.
DEAD = (2**22 + 1, 0.0)

STAGE = """
import sys
from pathlib import Path
from configs.schema import TrackingSection
from tasks.core.tracking import background_run
from tasks.core.tracking.runs import connect
background_run.QUIET_SECONDS = 0.5
uri, name, parent, outbox = sys.argv[1:]
tracking = connect(TrackingSection(uri=uri, experiment=name), verify=False)
stage = tracking.stage(parent, "grpo", "k", {"seed": 7}, 1, Path(outbox))
"""
ENDS_DURING_AN_OUTAGE = f"""{STAGE}
for step in (1, 2, 3):
    stage.log(step, {{"reward": step / 10}})
print(stage.finish("FAILED"), flush=True)
sys.stdin.read()
"""
IS_KILLED = f"""{STAGE}
for step in (1, 2):
    stage.log(step, {{"reward": step / 10}})
while stage.record.points:
    stage.done.wait(0.1)
print(stage.run_id, flush=True)
sys.stdin.read()
"""
CLAIMS = """
import sys
from pathlib import Path
from tasks.core.tracking.outbox import claim
print("ready", flush=True)
sys.stdin.readline()
print(*[record.id for _, record in claim(Path(sys.argv[1]), "http://mlflow", "e", set())], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start_python():
    """Starts Python processes with pipes for input and output, and kills them after the test."""
    started = []

    def start(code, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def of_dead_process(tracking, **fields) -> Record:
    """A record that a dead process left."""
    defaults = {"owner": DEAD, "stage": "grpo", "key": "k", "status": "FAILED", "ended": 1}
    return Record(uri=tracking.uri, experiment=tracking.name, **{**defaults, **fields})


def test_the_record_of_a_dead_process_is_delivered_by_another(
    tracking, proxy, through_proxy, short_finish, tmp_path, start_python
):
    parent = through_proxy.parent("flow-1", "fox")
    proxy.disconnect()
    writer = start_python(ENDS_DURING_AN_OUTAGE, proxy.uri, tracking.name, parent, tmp_path)
    assert writer.stdout.readline() == "3\n"
    assert through_proxy.deliver_outbox(tmp_path) == 0
    writer.kill()
    writer.wait()
    refused = proxy.refused
    assert through_proxy.deliver_outbox(tmp_path) == 1
    assert through_proxy.deliver_outbox(tmp_path) == 0
    assert wait_for(lambda: proxy.refused > refused + 3) and len(list(tmp_path.iterdir())) == 1
    proxy.restore()
    assert through_proxy.settle(120) == 0
    (run,) = children(tracking, parent)
    assert (run.info.status, run.data.params, run.data.tags["ratchet.attempt"]) == ("FAILED", {"seed": "7"}, "1")
    assert history(tracking, run.info.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_resumes_after_a_kill_logs_every_step_once(tracking, tmp_path, start_python):
    parent = tracking.parent("flow-1", "fox")
    killed = start_python(IS_KILLED, tracking.uri, tracking.name, parent, tmp_path)
    run_id = killed.stdout.readline().strip()
    killed.kill()
    killed.wait()
    stage = tracking.stage(parent, "grpo", "k", {"seed": 7}, attempt=2, outbox=tmp_path)
    for step in range(1, 6):
        stage.log(step, {"reward": step / 10})
    assert stage.finish("FINISHED") == 0
    run = tracking.client.get_run(run_id)
    assert (stage.run_id, run.info.status, run.data.tags["ratchet.attempt"]) == (run_id, "FINISHED", "2")
    assert history(tracking, run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def test_an_earlier_attempt_fills_gaps_and_changes_nothing_else(tracking, tmp_path):
    parent = tracking.parent("flow-1", "fox")
    stage = tracking.stage(parent, "grpo", "k", {}, attempt=2)
    stage.log(2, {"reward": 0.2})
    stage.finish("FINISHED", tags={"ratchet.digest": "new"})
    points = [Point("reward", 0.1, 1000, 1), Point("reward", 0.9, 1000, 2)]
    fields = {"points": points, "tags": {"ratchet.digest": "old"}, "params": {"seed": 7}}
    keep(of_dead_process(tracking, parent=parent, attempt=1, **fields), tmp_path)
    assert tracking.deliver_outbox(tmp_path) == 1
    assert tracking.settle(120) == 0
    run = tracking.client.get_run(stage.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {})
    assert (run.data.tags["ratchet.digest"], run.data.tags["ratchet.attempt"]) == ("new", "2")
    assert sorted(history(tracking, stage.run_id, "reward")) == [(1, 0.1), (2, 0.2)]


def test_a_parent_run_that_a_retry_has_ended_keeps_its_status(tracking, tmp_path):
    parent = tracking.parent("flow-1", "fox")
    tracking.finish(parent, "FINISHED", {"accuracy": 0.5})
    keep(of_dead_process(tracking, stage="", key="", run_id=parent), tmp_path)
    assert tracking.deliver_outbox(tmp_path) == 1
    assert tracking.settle(120) == 0
    assert tracking.client.get_run(parent).info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_a_deleted_run_stays_in_the_outbox_with_a_warning(tracking, tmp_path, caplog):
    keep(of_dead_process(tracking, run_id="0" * 32), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert tracking.deliver_outbox(tmp_path) == 1
        assert tracking.settle(120) == 0
    (file,) = tmp_path.iterdir()
    assert "refused to open stage grpo" in caplog.text and f". Remove {file} if you do not need it" in caplog.text


@pytest.mark.parametrize("text", ["", "{", '{"uri": "http://mlflow"}', '{"uri": 1, "experiment": []}', "[]", "\0\0\0"])
def test_a_damaged_file_is_renamed_and_the_others_are_claimed(tmp_path, caplog, text):
    good = keep(Record(uri="http://mlflow", experiment="e", owner=DEAD), tmp_path)
    bad = tmp_path / "00.json"
    bad.write_text(text)
    with caplog.at_level(logging.WARNING):
        claimed = claim(tmp_path, "http://mlflow", "e", set())
    assert [record.id for _, record in claimed] == [good.stem]
    assert (tmp_path / "00.json.damaged").read_text() == text
    assert f"{bad} was kept for MLflow and is damaged. It is renamed to 00.json.damaged: " in caplog.text


def test_records_for_another_server_or_experiment_are_not_claimed(tmp_path):
    for uri, experiment in (("http://other", "e"), ("http://mlflow", "other")):
        keep(Record(uri=uri, experiment=experiment, owner=DEAD), tmp_path)
    before = sorted(tmp_path.iterdir())
    assert claim(tmp_path, "http://mlflow", "e", set()) == []
    assert sorted(tmp_path.iterdir()) == before


def test_a_claimed_record_is_claimed_again_after_the_claimer_dies(tmp_path, start_python):
    keep(Record(uri="http://mlflow", experiment="e", owner=DEAD), tmp_path)
    claimer = start_python(CLAIMS, tmp_path)
    claimer.stdin.write("go\n")
    claimer.stdin.flush()
    assert claimer.stdout.readline() == "ready\n" and len(claimer.stdout.readline()) == 33
    assert claim(tmp_path, "http://mlflow", "e", set()) == []
    claimer.kill()
    claimer.wait()
    assert len(claim(tmp_path, "http://mlflow", "e", set())) == 1


def test_each_record_is_claimed_by_one_of_several_processes(tmp_path, start_python):
    ids = {keep(Record(uri="http://mlflow", experiment="e", owner=DEAD), tmp_path).stem for _ in range(200)}
    claimers = [start_python(CLAIMS, tmp_path) for _ in range(3)]
    assert [claimer.stdout.readline() for claimer in claimers] == ["ready\n"] * 3
    for claimer in claimers:
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    claimed = [name for claimer in claimers for name in claimer.stdout.readline().split()]
    assert len(claimed) == 200 and set(claimed) == ids


def test_an_outbox_that_does_not_exist_is_empty(tracking, tmp_path):
    assert tracking.deliver_outbox(tmp_path / "none") == 0


def test_a_record_is_read_as_it_was_written(tmp_path):
    points, datasets = [Point("loss", math.nan, 1000, 1)], [("data", "d", "s3://d")]
    fields = {"points": points, "datasets": datasets, "texts": {"a": "ä"}}
    record = Record(uri="http://mlflow", experiment="e", owner=DEAD, **fields)
    ((_, read),) = claim(keep(record, tmp_path).parent, "http://mlflow", "e", set())
    assert json.dumps(read.model_dump()) == json.dumps(record.model_dump())
