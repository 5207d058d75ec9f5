import json
import logging
import math
import subprocess
import sys

import pytest
from wire import history, wait_for

from configs.schema import TrackingSection
from tasks.core.tracking.runs import connect
from tasks.core.tracking.spool import Point, Record, claim, keep

# No process has it: Linux ends at 4194304.
GONE = (2**22 + 1, 0.0)

STAGE = """
import sys
from pathlib import Path
from configs.schema import TrackingSection
from tasks.core.tracking.runs import connect
uri, name, parent, spool = sys.argv[1:]
stage = connect(TrackingSection(uri=uri, experiment=name), verify=False).stage(parent, "grpo", "k", {"seed": 7}, 1, Path(spool))
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
from tasks.core.tracking.spool import claim
print("ready", flush=True)
sys.stdin.readline()
print(*[record.id for _, record in claim(Path(sys.argv[1]), "http://mlflow", "e", set())], flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def processes():
    """Starts Python processes whose input and output are pipes; none outlives the test."""
    started = []

    def start(code, *arguments):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def left(tracking, **fields) -> Record:
    """A record of a process that is gone."""
    return Record(
        **{
            "uri": tracking.uri,
            "experiment": tracking.name,
            "owner": GONE,
            "stage": "grpo",
            "key": "k",
            "status": "FAILED",
            "ended": 1,
            **fields,
        }
    )


def test_what_a_process_left_is_delivered_by_another_when_it_is_gone(tracking, wire, tmp_path, processes):
    through = connect(TrackingSection(uri=wire.uri, experiment=tracking.name))
    parent = through.parent("flow-1", "fox")
    wire.cut()
    writer = processes(ENDS_DURING_AN_OUTAGE, wire.uri, tracking.name, parent, tmp_path)
    assert writer.stdout.readline() == "3\n"
    assert through.deliver_spooled(tmp_path) == 0
    writer.kill()
    writer.wait()
    assert through.deliver_spooled(tmp_path) == 1
    assert through.deliver_spooled(tmp_path) == 0
    assert wait_for(lambda: wire.refused > 10) and len(list(tmp_path.iterdir())) == 1
    wire.mend()
    assert through.settle(120) == 0
    (run,) = tracking.client.search_runs([tracking.experiment()], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert (run.info.status, run.data.params, run.data.tags["ratchet.attempt"]) == ("FAILED", {"seed": "7"}, "1")
    assert history(tracking, run.info.run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert list(tmp_path.iterdir()) == []


def test_after_a_kill_a_resumed_training_that_tells_all_its_steps_again_has_each_once(tracking, tmp_path, processes):
    parent = tracking.parent("flow-1", "fox")
    killed = processes(IS_KILLED, tracking.uri, tracking.name, parent, tmp_path)
    run_id = killed.stdout.readline().strip()
    killed.kill()
    killed.wait()
    stage = tracking.stage(parent, "grpo", "k", {"seed": 7}, attempt=2, spool=tmp_path)
    for step in range(1, 6):
        stage.log(step, {"reward": step / 10})
    assert stage.finish("FINISHED") == 0
    run = tracking.client.get_run(run_id)
    assert (stage.run_id, run.info.status, run.data.tags["ratchet.attempt"]) == (run_id, "FINISHED", "2")
    assert history(tracking, run_id, "reward") == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def test_what_was_kept_fills_gaps_and_leaves_a_later_attempt_as_it_is(tracking, tmp_path):
    parent = tracking.parent("flow-1", "fox")
    stage = tracking.stage(parent, "grpo", "k", {}, attempt=2)
    stage.log(2, {"reward": 0.2})
    stage.finish("FINISHED", tags={"ratchet.digest": "new"})
    points = [Point("reward", 0.1, 1000, 1), Point("reward", 0.9, 1000, 2)]
    keep(
        left(tracking, parent=parent, attempt=1, points=points, tags={"ratchet.digest": "old"}, params={"seed": 7}),
        tmp_path,
    )
    assert tracking.deliver_spooled(tmp_path) == 1
    assert tracking.settle(120) == 0
    run = tracking.client.get_run(stage.run_id)
    assert (run.info.status, run.data.tags["ratchet.digest"], run.data.tags["ratchet.attempt"], run.data.params) == (
        "FINISHED",
        "new",
        "2",
        {},
    )
    assert sorted(history(tracking, stage.run_id, "reward")) == [(1, 0.1), (2, 0.2)]


def test_a_parent_that_a_retry_has_ended_since_stays_as_it_is(tracking, tmp_path):
    parent = tracking.parent("flow-1", "fox")
    tracking.finish(parent, "FINISHED", {"accuracy": 0.5})
    keep(left(tracking, stage="", key="", run_id=parent), tmp_path)
    assert tracking.deliver_spooled(tmp_path) == 1
    assert tracking.settle(120) == 0
    assert tracking.client.get_run(parent).info.status == "FINISHED"
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_no_longer_there_leaves_the_file_and_a_warning(tracking, tmp_path, caplog):
    keep(left(tracking, run_id="0" * 32), tmp_path)
    with caplog.at_level(logging.WARNING):
        assert tracking.deliver_spooled(tmp_path) == 1
        assert tracking.settle(120) == 0
    (file,) = tmp_path.iterdir()
    assert "refused to open stage grpo" in caplog.text and f"; remove {file} if nobody wants it" in caplog.text


@pytest.mark.parametrize("text", ["", "{", '{"uri": "http://mlflow"}', '{"uri": 1, "experiment": []}', "[]", "\0\0\0"])
def test_a_damaged_file_is_set_aside_and_the_others_are_taken(tmp_path, caplog, text):
    good = keep(Record(uri="http://mlflow", experiment="e", owner=GONE), tmp_path)
    bad = tmp_path / "00.json"
    bad.write_text(text)
    with caplog.at_level(logging.WARNING):
        taken = claim(tmp_path, "http://mlflow", "e", set())
    assert [record.id for _, record in taken] == [good.stem]
    assert (tmp_path / "00.json.damaged").read_text() == text
    assert f"{bad} cannot be read and is set aside as 00.json.damaged" in caplog.text


def test_files_of_another_server_or_experiment_are_left_alone(tmp_path):
    for uri, experiment in (("http://other", "e"), ("http://mlflow", "other")):
        keep(Record(uri=uri, experiment=experiment, owner=GONE), tmp_path)
    before = sorted(tmp_path.iterdir())
    assert claim(tmp_path, "http://mlflow", "e", set()) == []
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_process_claimed_is_taken_over_when_it_is_gone(tmp_path, processes):
    keep(Record(uri="http://mlflow", experiment="e", owner=GONE), tmp_path)
    claimer = processes(CLAIMS, tmp_path)
    claimer.stdin.write("go\n")
    claimer.stdin.flush()
    assert claimer.stdout.readline() == "ready\n" and len(claimer.stdout.readline()) == 33
    assert claim(tmp_path, "http://mlflow", "e", set()) == []
    claimer.kill()
    claimer.wait()
    assert len(claim(tmp_path, "http://mlflow", "e", set())) == 1


def test_of_several_processes_that_claim_at_once_one_gets_each_file(tmp_path, processes):
    ids = {keep(Record(uri="http://mlflow", experiment="e", owner=GONE), tmp_path).stem for _ in range(200)}
    claimers = [processes(CLAIMS, tmp_path) for _ in range(3)]
    assert [claimer.stdout.readline() for claimer in claimers] == ["ready\n"] * 3
    for claimer in claimers:
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    taken = [name for claimer in claimers for name in claimer.stdout.readline().split()]
    assert len(taken) == 200 and set(taken) == ids


def test_a_folder_that_is_not_there_holds_nothing(tracking, tmp_path):
    assert tracking.deliver_spooled(tmp_path / "none") == 0


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = Record(
        uri="http://mlflow",
        experiment="e",
        owner=GONE,
        points=[Point("loss", math.nan, 1000, 1)],
        datasets=[("data", "d", "s3://d")],
        texts={"a": "ä"},
    )
    ((_, read),) = claim(keep(record, tmp_path).parent, "http://mlflow", "e", set())
    assert json.dumps(read.model_dump()) == json.dumps(record.model_dump())
