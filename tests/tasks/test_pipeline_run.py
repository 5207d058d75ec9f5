import pytest

from tasks.core.storage.store import open_store
from tasks.runtime.pipeline_run import tracked
from tasks.runtime.stage import Artifact, Run


def test_a_failed_run_links_to_the_run_of_a_cached_stage(tracking, dir_root, tmp_path):
    sft = tracking.stage(tracking.parent("flow-1", "brave-fox"), "sft", "key-of-a-failed-run", {})
    assert sft.finish("FINISHED", tags={"ratchet.uri": "s3://ratchet/a"}) == 0
    parent = tracking.parent("flow-2", "calm-owl")
    run = Run("flow-2", open_store(dir_root), tracking, parent, tmp_path, 60.0, tmp_path / "outbox")
    artifact = Artifact(
        stage="sft", key="key-of-a-failed-run", uri="s3://ratchet/a", digest="d", cached=True, seconds=0.1
    )
    with pytest.raises(ValueError, match="GRPO failed"), tracked(run) as stages:
        stages.done["sft"] = artifact
        raise ValueError("GRPO failed")
    found = tracking.client.get_run(parent)
    assert (found.info.status, found.data.tags["ratchet.sft.run"]) == ("FAILED", sft.run_id)
    assert "| sft | [brave-fox](#/experiments/" in found.data.tags["mlflow.note.content"]
