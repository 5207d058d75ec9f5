import json
import logging

import pytest

from configs.errors import IntegrityError
from tasks.core.storage.artifacts import canonical, commit, condemn, fetch, find, publish, send, stage_key, verify
from tasks.core.storage.store import open_store


@pytest.fixture
def store(dir_root):
    opened = open_store(dir_root)
    opened.check()
    return opened


def folder(tmp_path, **files):
    where = tmp_path / "made"
    where.mkdir(exist_ok=True)
    for name, text in files.items():
        (where / name).write_text(text)
    return where


def manifest_of(store, prefix="sft/k"):
    return json.loads(store.get_bytes(f"{prefix}/manifest.json"))


def put_manifest(store, manifest, prefix="sft/k"):
    store.put_bytes(f"{prefix}/manifest.json", json.dumps(manifest).encode())


def test_key_does_not_depend_on_the_order_of_fields():
    assert stage_key("sft", 1, {"a": 1, "b": 2}, {"x": "1", "y": "2"}) == stage_key(
        "sft", 1, {"b": 2, "a": 1}, {"y": "2", "x": "1"}
    )


@pytest.mark.parametrize(
    "changed",
    [
        ("grpo", 1, {"a": 1}, {"x": "1"}),
        ("sft", 2, {"a": 1}, {"x": "1"}),
        ("sft", 1, {"a": 2}, {"x": "1"}),
        ("sft", 1, {"a": 1}, {"x": "2"}),
    ],
)
def test_key_depends_on_stage_version_section_and_inputs(changed):
    assert stage_key(*changed) != stage_key("sft", 1, {"a": 1}, {"x": "1"})


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError, match="Out of range float"):
        canonical({"a": float("nan")})


def test_published_files_come_back(store, tmp_path):
    publish(store, "sft/k", folder(tmp_path, a="one", b="two"), stage="sft", key="k")
    back = fetch(store, "sft/k", find(store, "sft/k"), tmp_path / "back")
    assert {p.name: p.read_text() for p in back.iterdir()} == {"a": "one", "b": "two"}


def test_equal_content_has_equal_digests(store, tmp_path):
    first = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    second = publish(store, "sft/other", folder(tmp_path, a="one"), stage="sft", key="other", seconds=9)
    assert first.digest == second.digest


def test_files_without_a_manifest_are_no_artifact(store):
    store.put_bytes("sft/k/attempt-1/a", b"half")
    assert find(store, "sft/k") is None


def test_two_writers_do_not_mix(store, tmp_path):
    publish(store, "sft/k", folder(tmp_path, a="one", b="one"), stage="sft", key="k")
    publish(store, "sft/k", folder(tmp_path, a="two", b="two"), stage="sft", key="k")
    back = fetch(store, "sft/k", find(store, "sft/k"), tmp_path / "back")
    assert {p.read_text() for p in back.iterdir()} == {"two"}


def test_missing_file_makes_an_artifact_damaged_and_names_it(store, tmp_path, caplog):
    manifest = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    store.delete([f"sft/k/{manifest.folder}/a"])
    with caplog.at_level(logging.WARNING):
        assert find(store, "sft/k") is None
    assert "its file a is missing" in caplog.text


def test_committed_folder_is_moved_and_found_whole(store, tmp_path):
    made = folder(tmp_path, a="one")
    manifest = commit(store, "sft/k", made, stage="sft", key="k")
    assert (made.exists(), find(store, "sft/k").folder, (verify(store, "sft/k", manifest) / "a").read_text()) == (
        False,
        manifest.folder,
        "one",
    )


def test_what_was_committed_here_arrives_elsewhere_as_the_same_artifact(store, tmp_path):
    elsewhere = open_store(f"file://{tmp_path / 'elsewhere'}")
    manifest = commit(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    send(store, elsewhere, "sft/k", manifest)
    assert find(elsewhere, "sft/k") == manifest


def test_flipped_byte_of_a_committed_artifact_is_found_before_use(store, tmp_path):
    manifest = commit(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    store.put_bytes(f"sft/k/{manifest.folder}/a", b"two")
    with pytest.raises(IntegrityError, match=r"/a differs from its manifest$"):
        verify(store, "sft/k", manifest)


def test_condemned_artifact_is_not_found_again(store, tmp_path):
    manifest = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    condemn(store, "sft/k", manifest)
    assert find(store, "sft/k") is None


def test_condemning_leaves_what_another_has_put_in_its_place(store, tmp_path):
    damaged = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    mended = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    condemn(store, "sft/k", damaged)
    assert find(store, "sft/k") == mended


def test_bytes_that_were_damaged_on_their_way_are_read_again(store, tmp_path, monkeypatch):
    publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    real, reads = store.get_file, []

    def once_damaged(key, path):
        real(key, path)
        reads.append(key)
        if len(reads) == 1:
            path.write_text("oxe")

    monkeypatch.setattr(store, "get_file", once_damaged)
    assert ((fetch(store, "sft/k", find(store, "sft/k"), tmp_path / "back") / "a").read_text(), len(reads)) == (
        "one",
        2,
    )


def test_links_are_no_part_of_an_artifact(store, tmp_path):
    made = folder(tmp_path, a="one")
    (made / "link").symlink_to("/etc/passwd")
    assert [file.path for file in publish(store, "sft/k", made, stage="sft", key="k").files] == ["a"]


def test_flipped_byte_is_found_before_use(store, tmp_path):
    manifest = publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    store.put_bytes(f"sft/k/{manifest.folder}/a", b"two")
    with pytest.raises(IntegrityError, match="differs from its manifest"):
        fetch(store, "sft/k", find(store, "sft/k"), tmp_path / "back")


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../b", "", "a\\..\\b"])
def test_manifest_path_that_leaves_the_folder_is_refused(store, tmp_path, path):
    publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k")
    manifest = manifest_of(store)
    manifest["files"][0]["path"] = path
    put_manifest(store, manifest)
    assert find(store, "sft/k") is None


@pytest.mark.parametrize(
    "change", [{"metrics": {"passed": True}}, {"key": "other"}, {"folder": "../sft"}, {"files": []}]
)
def test_edited_manifest_is_not_used(store, tmp_path, change):
    publish(store, "sft/k", folder(tmp_path, a="one"), stage="sft", key="k", metrics={"passed": False})
    put_manifest(store, manifest_of(store) | change)
    assert find(store, "sft/k") is None


def test_manifest_of_another_key_is_not_used(store, tmp_path):
    publish(store, "sft/other", folder(tmp_path, a="one"), stage="sft", key="other")
    put_manifest(store, manifest_of(store, "sft/other"))
    assert find(store, "sft/k") is None


def test_manifest_that_is_not_json_is_damaged(store):
    store.put_bytes("sft/k/manifest.json", b"{")
    assert find(store, "sft/k") is None
