import fcntl
import os
import time

from tasks.runtime.work_folder import KEPT_SECONDS, LOCK, remove_abandoned


def working(work, name="123-sft-x"):
    folder = work / name
    folder.mkdir(parents=True)
    return folder, (folder / LOCK).open("w")


def test_folder_of_a_process_that_is_gone_is_removed(tmp_path):
    folder, file = working(tmp_path)
    file.close()
    remove_abandoned(tmp_path)
    assert not folder.exists()


def test_folder_whose_process_lives_stays_whatever_its_process_id_means_here(tmp_path):
    folder, file = working(tmp_path, "999999999-sft-x")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_abandoned(tmp_path)
        assert folder.exists()


def test_folder_that_has_no_lock_yet_stays(tmp_path):
    (tmp_path / "1-sft-x").mkdir()
    remove_abandoned(tmp_path)
    assert (tmp_path / "1-sft-x").exists()


def test_what_is_kept_stays_for_a_week(tmp_path):
    for name, age in (("old", KEPT_SECONDS + 60), ("new", KEPT_SECONDS - 60)):
        file = tmp_path / "kept/sft" / name / "manifest.json"
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        os.utime(file, (time.time() - age,) * 2)
    remove_abandoned(tmp_path)
    assert [folder.name for folder in (tmp_path / "kept/sft").iterdir()] == ["new"]
