import uuid
from types import SimpleNamespace

import pytest
from mlflow_runs import wait_for

from configs.schema import TrackingSection
from tasks.core.tracking import stage_links
from tasks.core.tracking.runs import connect

HEAD = "| stage | done by run | cached | seconds |\n|---|---|---|---|\n"


@pytest.fixture
def key():
    """A stage key that no other test uses, because runs are searched in all experiments."""
    return uuid.uuid4().hex


def cached(stage, key, uri="s3://ratchet/a"):
    """What a stage returns whose artifact exists already."""
    return SimpleNamespace(stage=stage, key=key, uri=uri, cached=True, seconds=0.25, mlflow_run=None)


def stage_run(tracking, parent, stage, key, uri="s3://ratchet/a"):
    """The id of a stage's run that made the artifact at `uri`."""
    run = tracking.stage(parent, stage, key, {})
    assert run.finish("FINISHED", tags={"ratchet.uri": uri}) == 0
    return run.run_id


def page(tracking, run_id):
    return f"#/experiments/{tracking.experiment()}/runs/{run_id}?workflowType=machine_learning"


def test_the_parent_run_links_to_the_runs_that_made_its_artifacts(tracking, key):
    first, second = tracking.parent("flow-1", "brave-fox"), tracking.parent("flow-2", "calm-owl")
    sft = stage_run(tracking, first, "sft", key, "s3://ratchet/sft")
    grpo = stage_run(tracking, second, "grpo", key, "s3://ratchet/grpo")
    done_now = {"uri": "s3://ratchet/grpo", "cached": False, "seconds": 12.34, "mlflow_run": grpo}
    results = [
        cached("sft", key, "s3://ratchet/sft"),
        SimpleNamespace(stage="grpo", key=key, **done_now),
        cached("judge", key, "s3://ratchet/judge"),
    ]
    assert stage_links.stage_tags(tracking, second, results) == {
        "ratchet.sft.uri": "s3://ratchet/sft",
        "ratchet.sft.cached": "True",
        "ratchet.sft.run": sft,
        "ratchet.grpo.uri": "s3://ratchet/grpo",
        "ratchet.grpo.cached": "False",
        "ratchet.grpo.run": grpo,
        "ratchet.judge.uri": "s3://ratchet/judge",
        "ratchet.judge.cached": "True",
        "mlflow.note.content": f"{HEAD}| sft | [brave-fox]({page(tracking, sft)}) | yes | 0.2 |\n"
        f"| grpo | [this run]({page(tracking, grpo)}) | no | 12.3 |\n"
        "| judge | unknown | yes | 0.2 |\n",
    }


def test_a_stage_that_is_cached_after_a_retry_links_to_the_run_of_the_same_parent(tracking, key):
    parent = tracking.parent("flow-1", "brave-fox")
    sft = stage_run(tracking, parent, "sft", key)
    tags = stage_links.stage_tags(tracking, parent, [cached("sft", key)])
    assert tags["mlflow.note.content"] == f"{HEAD}| sft | [this run]({page(tracking, sft)}) | yes | 0.2 |\n"


def test_of_several_runs_with_one_key_the_run_that_made_this_artifact_is_found(tracking, key):
    uris = ["s3://ratchet/a", "s3://ratchet/b", "s3://ratchet/c"]
    ids = [stage_run(tracking, tracking.parent(uri, "fox"), "sft", key, uri) for uri in uris]
    assert [stage_links.find_run_id(tracking, cached("sft", key, uri)) for uri in uris] == ids


def test_a_run_that_was_killed_after_the_upload_is_found_by_its_key(tracking, key):
    stage = tracking.stage(tracking.parent("flow-1", "fox"), "sft", key, {})
    assert wait_for(lambda: stage.run_id)
    assert stage_links.find_run_id(tracking, cached("sft", key)) == stage.run_id


def test_a_failed_run_is_not_linked(tracking, key):
    assert tracking.stage(tracking.parent("flow-1", "fox"), "sft", key, {}).finish("FAILED") == 0
    assert stage_links.find_run_id(tracking, cached("sft", key)) is None


def test_a_run_that_made_another_artifact_is_not_linked(tracking, key):
    stage_run(tracking, tracking.parent("flow-1", "fox"), "sft", key, "s3://other-store/a")
    assert stage_links.find_run_id(tracking, cached("sft", key)) is None


def test_a_run_in_another_experiment_is_found(tracking, key):
    other = connect(TrackingSection(experiment=f"{tracking.name}-other"))
    sft = stage_run(other, other.parent("flow-1", "fox"), "sft", key)
    tags = stage_links.stage_tags(tracking, "", [cached("sft", key)])
    assert tags["mlflow.note.content"] == f"{HEAD}| sft | [fox]({page(other, sft)}) | yes | 0.2 |\n"


def test_markdown_characters_in_the_name_of_a_run_are_escaped(tracking, key):
    sft = stage_run(tracking, tracking.parent("flow-1", "a|b [c]"), "sft", key)
    tags = stage_links.stage_tags(tracking, "", [cached("sft", key)])
    assert rf"| sft | [a\|b \[c\]]({page(tracking, sft)}) |" in tags["mlflow.note.content"]


def test_during_an_outage_only_known_runs_are_linked(tracking, proxy, through_proxy, key):
    proxy.disconnect()
    done_now = SimpleNamespace(stage="grpo", key=key, uri="u", cached=False, seconds=1.0, mlflow_run="0" * 32)
    tags = stage_links.stage_tags(through_proxy, "", [cached("sft", key), done_now])
    assert "ratchet.sft.run" not in tags
    assert tags["ratchet.grpo.run"] == "0" * 32
    assert "| sft | unknown | yes | 0.2 |\n| grpo | [this run](" in tags["mlflow.note.content"]
