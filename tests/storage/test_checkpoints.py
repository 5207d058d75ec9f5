import json
import shutil
import threading

import pytest

from configs.errors import StageFailed, StorageUnavailable
from tasks.core.storage.checkpoints import Checkpoints
from tasks.core.storage.store import open_store


@pytest.fixture
def store(dir_root):
    opened = open_store(dir_root)
    opened.check()
    return opened


def made(tmp_path, state):
    where = tmp_path / "checkpoint"
    where.mkdir()
    (where / "state").write_text(state)
    return where


def saved(store, tmp_path, *steps, keep=2):
    """Checkpoints whose file `state` holds their step, all arrived in the store."""
    kept = Checkpoints(store, tmp_path / "disk", "sft", "k", keep)
    for step in steps:
        kept.save(step, made(tmp_path, str(step)))
    assert kept.wait()
    return kept


def elsewhere(store, tmp_path):
    """The same checkpoints, seen from a machine with an empty disk."""
    return Checkpoints(store, tmp_path / "empty", "sft", "k", keep=2)


def state(found):
    return found[0], (found[1] / "state").read_text()


def damage(store, step):
    """Flips the state of a checkpoint."""
    prefix = f"sft/k/checkpoints/step-{step}"
    store.put_bytes(f"{prefix}/{json.loads(store.get_bytes(f'{prefix}/manifest.json'))['folder']}/state", b"X")


def test_newest_is_taken_and_old_ones_are_pruned_on_both_sides(store, tmp_path):
    kept = saved(store, tmp_path, 2, 4, 10)
    assert (kept.steps(), kept.steps(kept.disk), state(kept.latest())) == ([4, 10], [4, 10], (10, "10"))


def test_another_machine_takes_the_newest_from_the_store(store, tmp_path):
    saved(store, tmp_path, 2, 4)
    assert state(elsewhere(store, tmp_path).latest()) == (4, "4")


def test_the_disk_is_ahead_of_the_store_while_an_upload_is_on_its_way(store, tmp_path, monkeypatch):
    arriving, may_go_on = threading.Event(), threading.Event()
    real = store.put_file

    def slow(path, key):
        arriving.set()
        may_go_on.wait()
        real(path, key)

    kept = saved(store, tmp_path, 2)
    monkeypatch.setattr(store, "put_file", slow)
    kept.save(4, made(tmp_path, "4"))
    arriving.wait()
    assert (state(kept.latest()), state(elsewhere(store, tmp_path).latest())) == ((4, "4"), (2, "2"))
    may_go_on.set()
    assert kept.wait() and kept.steps() == [2, 4]


def test_a_store_that_is_away_costs_no_checkpoint_and_the_next_one_arrives(store, tmp_path, monkeypatch, caplog):
    def away(path, key):
        raise StorageUnavailable("the store is away")

    kept = Checkpoints(store, tmp_path / "disk", "sft", "k", keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_file", away)
        kept.save(2, made(tmp_path, "2"))
        assert kept.wait()
    kept.save(4, made(tmp_path, "4"))
    assert kept.wait()
    assert (kept.steps(), kept.steps(kept.disk)) == ([4], [2, 4])
    assert "sft/k/checkpoints/step-2 is on this disk alone, and training goes on: the store is away" in caplog.text


def test_damaged_in_the_store_is_told_and_the_one_before_is_taken(store, tmp_path):
    saved(store, tmp_path, 2, 4)
    damage(store, 4)
    told = []
    assert state(elsewhere(store, tmp_path).latest(told.append)) == (2, "2")
    assert [text.partition(":")[0] for text in told] == [
        "the checkpoint of step 4 in the store is damaged and is not used"
    ]


def test_damaged_on_this_disk_is_told_and_the_same_is_taken_from_the_store(store, tmp_path):
    kept = saved(store, tmp_path, 2, 4)
    damage(kept.disk, 4)
    told = []
    assert state(kept.latest(told.append)) == (4, "4")
    assert [text.partition(":")[0] for text in told] == [
        "the checkpoint of step 4 on this disk is damaged and is not used"
    ]


def test_a_link_in_place_of_a_file_is_not_followed(store, tmp_path):
    kept = saved(store, tmp_path, 2, 4)
    (tmp_path / "outside").write_text("4")
    file = next((tmp_path / "disk/sft/k/checkpoints/step-4").rglob("state"))
    file.unlink()
    file.symlink_to(tmp_path / "outside")
    store.delete([key for key in store.list("") if "/step-4/" in key])
    assert state(kept.latest(lambda text: None)) == (2, "2")


@pytest.mark.parametrize("name", ["step-4.bak", "step-4-copy", "step-²", "step-99999999999999999999999", "step-9"])
def test_a_copy_under_another_name_is_no_checkpoint(store, tmp_path, name):
    kept = saved(store, tmp_path, 2, 4)
    shutil.copytree(tmp_path / "disk/sft/k/checkpoints/step-4", tmp_path / "disk/sft/k/checkpoints" / name)
    assert state(kept.latest(lambda text: None)) == (4, "4")


def test_one_that_cannot_be_read_on_this_disk_is_taken_from_the_store(store, tmp_path):
    kept = saved(store, tmp_path, 2, 4)
    file = next((tmp_path / "disk/sft/k/checkpoints/step-4").rglob("state"))
    file.unlink()
    file.mkdir()
    assert state(kept.latest(lambda text: None)) == (4, "4")


def test_a_disk_that_cannot_be_written_is_one_sentence(store, tmp_path):
    (tmp_path / "disk").write_text("")
    kept = Checkpoints(store, tmp_path / "disk", "sft", "k", keep=2)
    with pytest.raises(
        StageFailed,
        match=rf"^the checkpoint of step 2 cannot be kept in {tmp_path}/disk \(.*\): make it a folder that can be written$",
    ):
        kept.save(2, made(tmp_path, "2"))


def test_without_a_whole_one_there_is_none(store, tmp_path):
    saved(store, tmp_path, 2)
    damage(store, 2)
    assert elsewhere(store, tmp_path).latest(lambda text: None) is None


def test_cleared_checkpoints_leave_nothing(store, tmp_path):
    kept = saved(store, tmp_path, 2)
    kept.clear()
    assert (store.list("sft/k/checkpoints"), kept.disk.list("")) == ({}, {})
