import pytest

from configs.errors import ConfigError, DataError, StorageRefused, StorageUnavailable
from tasks.core.storage.store import open_store


@pytest.fixture(params=["directory", "s3"])
def store(request):
    root = request.getfixturevalue({"directory": "dir_root", "s3": "s3_root"}[request.param])
    opened = open_store(root)
    opened.check()
    return opened


def test_bytes_come_back(store):
    store.put_bytes("a/b.json", b"one")
    assert store.get_bytes("a/b.json") == b"one"


def test_object_that_is_not_there_is_none(store):
    assert store.get_bytes("nothing") is None


def test_putting_again_replaces(store):
    store.put_bytes("k", b"old")
    store.put_bytes("k", b"new")
    assert store.get_bytes("k") == b"new"


def test_list_gives_sizes_in_order_under_the_prefix_alone(store):
    for key, data in {"x/b": b"22", "x/a": b"1", "xy": b"333", "z": b"4"}.items():
        store.put_bytes(key, data)
    assert list(store.list("x/").items()) == [("x/a", 1), ("x/b", 2)]


def test_list_takes_part_of_a_name(store):
    for key in ("step-1/m", "step-10/m", "other/m"):
        store.put_bytes(f"c/{key}", b"")
    assert list(store.list("c/step-")) == ["c/step-1/m", "c/step-10/m"]


def test_files_larger_than_one_part_come_back(store, tmp_path):
    big = bytes(range(256)) * 40_000
    (tmp_path / "big").write_bytes(big)
    store.put_file(tmp_path / "big", "big")
    store.get_file("big", tmp_path / "sub/back")
    assert (tmp_path / "sub/back").read_bytes() == big


def test_file_that_is_not_there_is_bad_data(store, tmp_path):
    with pytest.raises(DataError, match=r"nothing/here does not exist: check the address"):
        store.get_file("nothing/here", tmp_path / "x")


def test_deleted_objects_are_gone_and_deleting_again_is_no_error(store):
    store.put_bytes("k", b"")
    store.delete(["k"])
    store.delete(["k"])
    assert store.list("") == {}


def test_keys_may_hold_spaces_and_letters_of_any_language(store):
    store.put_bytes("ein Schlüssel/数", b"x")
    assert store.list("ein") == {"ein Schlüssel/数": 1}


@pytest.mark.parametrize("root", ["http://x/y", "s3://", "file://relative", "/plain/path"])
def test_root_of_another_form_is_refused(root):
    with pytest.raises(ConfigError, match=r"must be s3://bucket/prefix or file:///absolute/folder"):
        open_store(root)


def test_endpoint_that_does_not_answer_is_one_sentence(stack, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(
        StorageUnavailable, match=r"^storage.root is s3://b and the S3 store at http://127.0.0.1:9 does not serve it"
    ):
        open_store("s3://b").check()


def test_wrong_credentials_are_one_sentence(stack, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageRefused, match="check AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store("s3://ratchet").check()


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageUnavailable, match="make the folder writable or name another"):
        open_store(f"file://{tmp_path}/file/sub").check()
