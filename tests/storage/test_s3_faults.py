"""The S3 store against a real server behind a proxy that fails (faults.py), and stores on a disk that is full."""

import errno
import hashlib
import json
import logging
import subprocess
import sys
from contextlib import contextmanager
from io import BytesIO

import faults
import httpx
import pytest
from botocore.awsrequest import AWSResponse
from urllib3 import HTTPResponse

from configs.errors import DiskFull, StorageRefused, StorageUnavailable
from tasks.core.storage import s3
from tasks.core.storage.files import disk
from tasks.core.storage.store import open_store

BIG = bytes(range(256)) * 80_000  # 20 MB: three parts


@pytest.fixture
def behind(stack, monkeypatch):
    """Opens the proxy in front of the stack's S3 with these rates of faults; the environment leads to it as long as it is open. Waits are short."""
    monkeypatch.setattr(s3, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(s3, "JITTER", 0.01)

    @contextmanager
    def opened(rates):
        with faults.faulty(stack["s3"], rates, seed=1) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
            yield proxy

    return opened


@pytest.fixture
def limits(monkeypatch):
    """Sets the attempts of an operation, each of one request."""

    def set_to(attempts):
        monkeypatch.setattr(s3, "ATTEMPTS", attempts)
        monkeypatch.setattr(s3, "REQUEST_ATTEMPTS", 1)

    return set_to


@pytest.mark.parametrize(
    ("kind", "rate"), [("500", 0.25), ("503", 0.1), ("timeout", 0.1), ("reset", 0.25), ("truncated", 0.25)]
)
def test_bytes_and_files_come_back_through_faults_of_one_kind(behind, s3_root, tmp_path, kind, rate):
    (tmp_path / "big").write_bytes(BIG)
    with behind({kind: rate}) as proxy:
        store = open_store(s3_root, timeout_seconds=1)
        for n in range(12):
            store.put_bytes(f"small/{n:02}", b"%d" % n)
        store.put_file(tmp_path / "big", "big")
        store.get_file("big", tmp_path / "back")
        store.delete(["small/00"])
        assert [store.get_bytes(f"small/{n:02}") for n in range(12)] == [None] + [b"%d" % n for n in range(1, 12)]
        assert store.list("") == {"big": len(BIG)} | {f"small/{n:02}": len(str(n)) for n in range(1, 12)}
        assert (tmp_path / "back").read_bytes() == BIG
        assert set(proxy.counts) == {kind}


def test_bytes_damaged_on_their_way_up_are_sent_again(behind, s3_root, tmp_path):
    (tmp_path / "big").write_bytes(BIG)
    with behind({"wrong": 0.4}) as proxy:
        store = open_store(s3_root)
        for n in range(10):
            store.put_bytes(str(n), b"some bytes")
        store.put_file(tmp_path / "big", "big")
        assert proxy.counts["wrong"] > 3
    store = open_store(s3_root)
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == BIG
    assert {store.get_bytes(str(n)) for n in range(10)} == {b"some bytes"}


def test_bytes_that_are_damaged_each_time_are_refused_by_the_server(behind, s3_root, limits):
    limits(2)
    with behind({"wrong": 1}) as proxy, pytest.raises(StorageUnavailable, match="XAmzContentSHA256Mismatch"):
        open_store(s3_root).put_bytes("k", b"some bytes")
    assert (proxy.requests, open_store(s3_root).list("")) == (2, {})


def test_uploads_are_signed_with_the_sha256_of_each_body_and_carry_no_second_checksum(s3_root, tmp_path):
    (tmp_path / "big").write_bytes(BIG)
    store, seen = open_store(s3_root), []
    store.client.meta.events.register(
        "before-send.s3", lambda request, **_: seen.append({k.lower(): v for k, v in request.headers.items()})
    )
    store.put_bytes("small", b"some bytes")
    store.put_file(tmp_path / "big", "big")
    bodies = [b"some bytes"] + [BIG[start : start + 2**23] for start in range(0, len(BIG), 2**23)]
    signed = {v.decode() if isinstance(v, bytes) else v for v in (h["x-amz-content-sha256"] for h in seen)}
    assert {hashlib.sha256(body).hexdigest() for body in bodies} <= signed
    assert [name for h in seen for name in h if "crc" in name or "md5" in name] == []


def test_payloads_are_signed_over_tls_too(monkeypatch):
    for name, value in {
        "ENDPOINT_URL_S3": "https://127.0.0.1:9",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
        "DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store, seen = open_store("s3://b"), []

    def capture(request, **_):
        seen.append(request.headers["X-Amz-Content-SHA256"])
        return AWSResponse(request.url, 200, {}, HTTPResponse(BytesIO(), preload_content=False))

    store.client.meta.events.register("before-send.s3", capture)
    store.put_bytes("k", b"some bytes")
    assert seen == [hashlib.sha256(b"some bytes").hexdigest().encode()]


def test_store_that_is_always_busy_is_one_sentence_after_the_limit(behind, s3_root, limits, caplog):
    limits(3)
    said = rf"^storage.root is {s3_root} and the S3 store at http://127.0.0.1:\d+ does not serve it \(.*SlowDown.*\): start it [^\n]*AWS_SECRET_ACCESS_KEY$"
    with (
        behind({"503": 1}) as proxy,
        pytest.raises(StorageUnavailable, match=said),
        caplog.at_level(logging.WARNING, "ratchet"),
    ):
        open_store(s3_root).put_bytes("a/b", b"x")
    assert proxy.requests == 3
    assert [r.getMessage().split(" (")[0] for r in caplog.records] == [f"writing {s3_root}/a/b failed"] * 2


def test_check_is_not_tried_again_beyond_the_request(behind, s3_root, limits):
    limits(3)
    with behind({"500": 1}) as proxy, pytest.raises(StorageUnavailable, match="does not serve it"):
        open_store(s3_root).check()
    assert proxy.requests == 1


def test_request_without_an_answer_is_given_up_after_the_timeout(behind, s3_root, limits):
    limits(1)
    with behind({"timeout": 1}), pytest.raises(StorageUnavailable, match="Read timeout"):
        open_store(s3_root, timeout_seconds=0.2).get_bytes("k")


@pytest.mark.parametrize(
    "work",
    [
        lambda s, f: s.put_bytes("k", b"x"),
        lambda s, f: s.get_bytes("k"),
        lambda s, f: s.list(),
        lambda s, f: s.put_file(f, "k"),
        lambda s, f: s.delete(["k"]),
    ],
    ids=["put_bytes", "get_bytes", "list", "put_file", "delete"],
)
@pytest.mark.parametrize(
    ("bucket", "secret", "code"),
    [("ratchet", "wrong", "SignatureDoesNotMatch"), ("no-such-bucket", None, "NoSuchBucket")],
)
def test_what_is_refused_is_not_tried_again(behind, tmp_path, monkeypatch, work, bucket, secret, code):
    (tmp_path / "file").touch()
    with behind({}) as proxy:
        if secret:
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with pytest.raises(
            StorageRefused,
            match=rf"refuses it \(.*{code}.*check AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ):
            work(open_store(f"s3://{bucket}/x"), tmp_path / "file")
        assert proxy.requests == 1


def test_missing_credentials_are_refused(stack, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageRefused, match="Unable to locate credentials"):
        open_store("s3://ratchet").get_bytes("k")


def test_half_a_download_leaves_the_folder_as_it_was(behind, s3_root, tmp_path, limits):
    limits(2)
    open_store(s3_root).put_bytes("k", b"some bytes")
    (tmp_path / "k").write_bytes(b"old")
    with behind({"truncated": 1}), pytest.raises(StorageUnavailable, match="does not serve it"):
        open_store(s3_root).get_file("k", tmp_path / "k")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"k": b"old"}


def test_objects_that_could_not_be_removed_are_tried_again(behind, s3_root):
    with behind({}) as proxy:
        store = open_store(s3_root)
        store.put_bytes("k", b"")
        answers = iter([{"Errors": [{"Key": "k", "Code": "InternalError", "Message": "not now"}]}, {}])
        store.client.meta.events.register(
            "after-call.s3.DeleteObjects", lambda parsed, **_: parsed.update(next(answers))
        )
        store.delete(["k"])
        assert (proxy.requests, list(answers)) == (3, [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_named_with_what_was_written_and_the_remedy(tmp_path, number):
    said = rf"^the disk of {tmp_path} is full \(.*; [\d,]+ bytes free\) and file could not be written: free space there, then press Retry: what was finished"
    with pytest.raises(DiskFull, match=said), disk(tmp_path / "missing/file"):
        raise OSError(number, "full")


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path):
    with pytest.raises(PermissionError), disk(tmp_path / "file"):
        raise PermissionError(errno.EACCES, "no")


@pytest.mark.parametrize("kind", ["dir_root", "s3_root"])
def test_download_to_a_full_disk_leaves_no_file(request, kind, small_disk, tmp_path):
    (tmp_path / "big").write_bytes(BIG)
    store = open_store(request.getfixturevalue(kind))
    store.put_file(tmp_path / "big", "big")
    with pytest.raises(DiskFull, match=f"^the disk of {small_disk}/in is full .* and big could not be written"):
        store.get_file("big", small_disk / "in/big")
    assert list((small_disk / "in").iterdir()) == []


def test_store_on_a_full_disk_keeps_the_objects_it_has(small_disk, tmp_path):
    (tmp_path / "big").write_bytes(BIG)
    store = open_store(f"file://{small_disk}")
    store.put_bytes("k", b"old")
    with pytest.raises(DiskFull, match="and k could not be written"):
        store.put_bytes("k", BIG)
    with pytest.raises(DiskFull, match="and big could not be written"):
        store.put_file(tmp_path / "big", "big")
    assert ([p.name for p in small_disk.iterdir()], store.get_bytes("k")) == (["k"], b"old")


def test_proxy_flips_one_byte_on_the_way_down(behind, s3_root):
    open_store(s3_root).put_bytes("k", bytes(100))
    with behind({"wrong": 1}):
        store = open_store(s3_root)
        assert sorted(store.get_bytes("k")) == [0] * 99 + [1]
        assert store.list("") == {"k": 100}


def test_proxy_runs_as_a_command_and_says_what_it_did(stack):
    with subprocess.Popen(
        [sys.executable, faults.__file__, stack["s3"], "0", "1", "500=1"], stdout=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        assert httpx.get(url).status_code == 500
        process.terminate()
        assert json.loads(process.stdout.read()) == {"requests": 1, "500": 1}
