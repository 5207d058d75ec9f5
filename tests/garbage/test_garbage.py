"""What is garbage and what is not: each letter is a stage's key, and two hours have passed since everything was written, unless a test says otherwise."""

import itertools
import json
import sys
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running
from tiny import STAGES

from configs.errors import IntegrityError, TrackingUnavailable
from configs.schema import RegistrySection, TrackingSection
from flows import cli
from flows.gc import delete, size
from tasks.core.garbage import inventory, plan
from tasks.core.storage.artifacts import find, publish
from tasks.core.storage.store import open_store
from tasks.core.tracking import registry
from tasks.core.tracking.registry import Version
from tasks.core.tracking.runs import connect

NOW = datetime.now(UTC)
LATER, LONG_AFTER = NOW + timedelta(hours=2), NOW + timedelta(days=8)
RUN = "11111111-1111-4111-8111-111111111111"
LIVE = {RUN: "RUNNING"}


@pytest.fixture
def store(dir_root):
    return open_store(dir_root)


@pytest.fixture
def make(tmp_path):
    """Publishes an artifact of one file, whose content its name decides, and gives its manifest."""

    def published(store, stage, letter, *inputs, text=None, where=""):
        folder = tmp_path / uuid.uuid4().hex
        (folder / "model").mkdir(parents=True)
        for name in ("MLmodel", "config.json", "model.safetensors"):
            (folder / "model" / name).write_text(text or stage + letter)
        named = {f"input{i}": manifest.digest for i, manifest in enumerate(inputs)}
        return publish(store, f"{stage}/{letter * 64}{where}", folder, stage=stage, key=letter * 64, inputs=named)

    return published


@pytest.fixture
def chain(store, make):
    """A whole pipeline's artifacts and one of data that it does not use; stage -> manifest."""
    made = {"data": make(store, "data", "a")}
    made["base"] = make(store, "base", "b", made["data"])
    made["sft"] = make(store, "sft", "c", made["base"], made["data"])
    made["grpo"] = make(store, "grpo", "d", made["sft"], made["data"])
    made["evaluate_grpo"] = make(store, "evaluate_grpo", "e", made["data"], made["grpo"], made["sft"])
    made["judge"] = make(store, "judge", "f", made["evaluate_grpo"])
    make(store, "register", "0", made["grpo"], made["judge"])
    make(store, "data", "9")
    return made


def half(store, stage, letter, folder="attempt-aaaaaaaaaaaa"):
    """What a writer that was killed has left."""
    store.put_bytes(f"{stage}/{letter * 64}/{folder}/weights", b"half")


def own(store, stage, letter, *inputs, run=RUN, created=NOW):
    said = {
        "attempt": 1,
        "flow_run": run,
        "host": "h",
        "pid": 1,
        "started": 1.0,
        "lease": None,
        "created": created.isoformat(),
    }
    store.put_bytes(
        f"{stage}/{letter * 64}/owner.json",
        json.dumps({**said, "inputs": {f"i{n}": m.digest for n, m in enumerate(inputs)}}).encode(),
    )


def record(store, *prefixes, run=RUN, created=NOW):
    named = [f"{stage}/{letter * 64}" for stage, letter in prefixes]
    store.put_bytes(
        f"runs/{run}.json", json.dumps({"flow_run": run, "created": created.isoformat(), "prefixes": named}).encode()
    )


def version(store, grpo, judge=None, status="passed"):
    uri = store.uri(f"grpo/{grpo.key}/{grpo.folder}")
    tags = {
        "gate.status": status,
        "ratchet.key": "0" * 64,
        "ratchet.grpo.uri": uri,
        "ratchet.model_uri": f"{uri}/model",
    }
    if judge:
        tags["ratchet.verdict.uri"] = store.uri(f"judge/{judge.key}/{judge.folder}")
    return Version(name="m", version=1, stage="None", aliases=[], tags=tags, source=f"{uri}/model")


def planned(store, states=None, versions=(), now=LATER, keep=None):
    refs = inventory.references(
        store, lambda runs: {r: s for r, s in (states or {}).items() if r in runs}, lambda: list(versions)
    )
    return plan.plan(store.root, inventory.scan(store), refs, now, keep)


def found(store, *args, **kwargs):
    return [(i.stage, i.key[0], i.what) for i in planned(store, *args, **kwargs).items]


UNUSED = [("data", "9", "artifact")]
ALL = [
    ("data", "9", "artifact"),
    ("data", "a", "artifact"),
    ("base", "b", "artifact"),
    ("sft", "c", "artifact"),
    ("grpo", "d", "artifact"),
    ("evaluate_grpo", "e", "artifact"),
    ("judge", "f", "artifact"),
    ("register", "0", "artifact"),
]


def test_the_stages_are_the_pipelines():
    assert sorted(inventory.STAGES) == sorted(
        [*STAGES, "evaluate_champion"]
    )  # the last one only where there is a champion


def test_what_nothing_refers_to_is_garbage(store, chain):
    assert found(store) == ALL


@pytest.mark.parametrize("status", ["passed", "rejected"])
def test_a_version_keeps_all_that_led_to_it(store, chain, status):
    assert found(store, versions=[version(store, chain["grpo"], chain["judge"], status)]) == UNUSED


def test_a_version_that_has_a_source_alone_keeps_its_model_and_what_led_to_that(store, chain):
    expected = [
        ("data", "9", "artifact"),
        ("evaluate_grpo", "e", "artifact"),
        ("judge", "f", "artifact"),
        ("register", "0", "artifact"),
    ]
    assert found(store, versions=[version(store, chain["grpo"]).model_copy(update={"tags": {}})]) == expected


def test_a_version_in_another_root_keeps_nothing_here(store, chain, tmp_path):
    assert (
        found(store, versions=[version(open_store(f"file://{tmp_path}/other"), chain["grpo"], chain["judge"])]) == ALL
    )


def test_a_version_keeps_its_artifacts_however_the_root_is_spelt(store, chain, tmp_path):
    (tmp_path / "link").symlink_to(store.folder)
    assert (
        found(open_store(f"file://{tmp_path}/link/"), versions=[version(store, chain["grpo"], chain["judge"])])
        == UNUSED
    )


def test_a_version_keeps_an_attempt_that_is_no_longer_the_manifests(store, make):
    first = make(store, "grpo", "d", text="first")
    make(store, "grpo", "d", text="second")
    assert found(store) == [("grpo", "d", "artifact"), ("grpo", "d", "attempt")]
    assert found(store, versions=[version(store, first)]) == []


@pytest.mark.parametrize("state", ["SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING"])
def test_a_live_run_keeps_what_it_uses_and_what_led_to_that(store, chain, state):
    record(store, ("sft", "c"))
    rest = [("data", "9"), ("grpo", "d"), ("evaluate_grpo", "e"), ("judge", "f"), ("register", "0")]
    assert found(store, {RUN: state}) == [(*name, "artifact") for name in rest]


def test_a_live_run_keeps_everything_of_a_stage_that_is_not_done(store, make):
    half(store, "sft", "c")
    make(store, "sft", "c", where="/checkpoints/step-4")
    record(store, ("sft", "c"))
    assert found(store, LIVE, keep=timedelta(0)) == []


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "CRASHED"])
def test_a_run_that_is_over_keeps_nothing_and_its_record_goes(store, chain, state):
    record(store, ("sft", "c"))
    assert found(store, {RUN: state}) == [*ALL, ("runs", "1", "record")]


def test_a_run_that_prefect_does_not_know_lives_for_a_week_and_is_named(store, make):
    make(store, "sft", "c")
    record(store, ("sft", "c"))
    plan = planned(store)
    until = (NOW + timedelta(days=7)).isoformat(timespec="minutes")
    assert (plan.items, plan.notes) == (
        [],
        [f"flow run {RUN} is not known to this Prefect server and counts as live until {until}"],
    )
    assert found(store, now=LONG_AFTER) == [("sft", "c", "artifact"), ("runs", "1", "record")]


def test_a_live_owner_keeps_what_it_writes_its_checkpoints_and_its_inputs(store, make):
    data = make(store, "data", "a")
    half(store, "sft", "c")
    make(store, "sft", "c", where="/checkpoints/step-4")
    own(store, "sft", "c", data)
    assert found(store, LIVE, keep=timedelta(0)) == []


@pytest.mark.parametrize("run", [RUN, None])
def test_an_owner_that_prefect_does_not_know_lives_for_a_week(store, make, run):
    data = make(store, "data", "a")
    half(store, "sft", "c")
    own(store, "sft", "c", data, run=run)
    assert found(store) == []
    assert found(store, now=LONG_AFTER) == [("data", "a", "artifact"), ("sft", "c", "attempt"), ("sft", "c", "record")]


def test_an_owner_whose_run_is_over_keeps_nothing(store, make):
    data = make(store, "data", "a")
    half(store, "sft", "c")
    own(store, "sft", "c", data)
    assert found(store, {RUN: "CRASHED"}) == [
        ("data", "a", "artifact"),
        ("sft", "c", "attempt"),
        ("sft", "c", "record"),
    ]


def test_what_is_half_written_stays_for_an_hour(store):
    half(store, "sft", "c")
    assert found(store, now=NOW + timedelta(minutes=50)) == []
    assert found(store, now=LATER) == [("sft", "c", "attempt")]


def test_what_was_begun_within_the_hour_stays_however_old_its_files_are(store):
    half(store, "sft", "c")
    own(store, "sft", "c", created=LATER)
    assert found(store, {RUN: "CRASHED"}, now=LATER + timedelta(minutes=30)) == []


def test_checkpoints_of_an_unfinished_key_stay_with_what_led_to_them(store, make):
    data = make(store, "data", "a")
    make(store, "base", "b")
    make(store, "sft", "c", where="/checkpoints/step-4")
    own(store, "sft", "c", data)
    assert found(store, {RUN: "CRASHED"}) == [("base", "b", "artifact")]


def test_checkpoints_without_owner_are_kept_and_named(store, make):
    make(store, "sft", "c", where="/checkpoints/step-4")
    plan = planned(store)
    assert plan.items == []
    assert plan.notes == [
        "sft/cccccccccccc has checkpoints and no owner.json: what it was trained from is not known and may be listed"
    ]


def test_checkpoints_older_than_asked_for_are_garbage_with_what_led_to_them(store, make):
    data = make(store, "data", "a")
    make(store, "sft", "c", where="/checkpoints/step-4")
    own(store, "sft", "c", data)
    assert found(store, {RUN: "CRASHED"}, now=LONG_AFTER, keep=timedelta(days=9)) == []
    expected = [("data", "a", "artifact"), ("sft", "c", "checkpoints"), ("sft", "c", "record")]
    assert found(store, {RUN: "CRASHED"}, now=LONG_AFTER, keep=timedelta(days=7)) == expected


def test_checkpoints_of_a_key_that_is_done_are_garbage(store, make):
    grpo = make(store, "grpo", "d")
    make(store, "grpo", "d", where="/checkpoints/step-4")
    assert found(store, versions=[version(store, grpo)]) == [("grpo", "d", "checkpoints")]


def test_checkpoints_of_which_none_is_whole_are_garbage_after_an_hour(store):
    half(store, "sft", "c", "checkpoints/step-4/attempt-aaaaaaaaaaaa")
    assert found(store, now=NOW + timedelta(minutes=50)) == []
    assert found(store) == [("sft", "c", "checkpoints")]


def damage(store, stage, manifest):
    store.put_bytes(f"{stage}/{manifest.key}/{manifest.folder}/model/MLmodel", b"of another size")


def test_a_damaged_artifact_is_named_and_garbage_when_nothing_refers_to_it(store, make):
    damage(store, "grpo", make(store, "grpo", "d"))
    plan = planned(store)
    assert plan.damaged == ["grpo/" + "d" * 64]
    assert [i.reason for i in plan.items] == [
        "its manifest is damaged, and no run, version or checkpoint refers to it",
        "no manifest or version names it, and no live run works on it",
    ]


def test_a_damaged_artifact_that_is_referred_to_stays_with_what_led_to_it(store, chain):
    damage(store, "sft", chain["sft"])
    plan = planned(store, versions=[version(store, chain["grpo"], chain["judge"])])
    assert plan.damaged == ["sft/" + "c" * 64]
    assert [(i.stage, i.key[0], i.what) for i in plan.items] == UNUSED


def test_a_manifest_that_cannot_be_read_keeps_every_attempt_of_a_key_that_is_referred_to(store, make):
    grpo = make(store, "grpo", "d")
    half(store, "grpo", "d")
    store.put_bytes(f"grpo/{'d' * 64}/manifest.json", b"{")
    assert found(store, versions=[version(store, grpo)]) == []


FOREIGN = [
    "data/train.jsonl",
    "sft/notes/manifest.json",
    f"sft/{'c' * 64}/README",
    f"base/{'b' * 64}/attempt-1/x",
    "other/file",
    "runs/a/b.json",
    "x.json",
]


def test_what_ratchet_did_not_write_is_not_touched(store):
    for key in FOREIGN:
        store.put_bytes(key, b"x")
    assert found(store, now=LONG_AFTER) == []


@pytest.mark.parametrize("key", [f"sft/{'c' * 64}/owner.json", f"runs/{RUN}.json"])
def test_a_record_that_cannot_be_read_stops_everything(store, key):
    store.put_bytes(key, b"{")
    with pytest.raises(
        IntegrityError, match=f"{key} cannot be read, so what its run needs is not known and nothing is deleted"
    ):
        found(store, LIVE)


def test_a_record_that_cannot_be_read_goes_when_its_run_is_over(store):
    store.put_bytes(f"runs/{RUN}.json", b"{")
    assert found(store, {RUN: "FAILED"}) == [("runs", "1", "record")]


def test_sizes_and_times_are_the_artifacts(store, make):
    manifest = make(store, "data", "a")
    (item,) = planned(store).items
    total = sum(store.list(f"data/{'a' * 64}/").values())
    assert (item.size, item.created, len(item.keys)) == (total, manifest.created, 4)


def deleted(store, listed, *answers):
    """The items that went of those listed, when the two questions afterwards have these answers; the same plan where there are none."""
    asked = itertools.chain(answers, itertools.repeat(answers[-1] if answers else listed))
    return [(i.stage, i.key[0], i.what) for i in delete(store, listed, lambda: next(asked))]


def test_deleting_removes_what_was_listed_and_nothing_else(store, chain):
    kept = version(store, chain["grpo"], chain["judge"])
    half(store, "sft", "c")
    for key in FOREIGN:
        store.put_bytes(key, b"x")
    record(store, ("data", "9"))
    plan = planned(store, {RUN: "COMPLETED"}, [kept])
    doomed = {key for item in plan.items for key in item.keys}
    before = set(store.list())
    assert deleted(store, plan) == [("data", "9", "artifact"), ("sft", "c", "attempt"), ("runs", "1", "record")]
    assert before - set(store.list()) == doomed and len(doomed) == 6
    assert found(store, versions=[kept]) == []


def test_a_run_that_began_after_the_listing_keeps_what_it_uses(store, chain):
    listed = planned(store)
    record(store, ("grpo", "d"))
    rest = [("data", "9"), ("evaluate_grpo", "e"), ("judge", "f"), ("register", "0")]
    assert deleted(store, listed, planned(store, LIVE)) == [(*name, "artifact") for name in rest]
    assert find(store, "sft/" + "c" * 64) == chain["sft"]


def test_a_run_that_found_a_manifest_as_it_went_gets_it_back(store, chain):
    listed = planned(store)
    record(store, ("grpo", "d"))
    rest = [("data", "9"), ("evaluate_grpo", "e"), ("judge", "f"), ("register", "0")]
    assert deleted(store, listed, listed, planned(store, LIVE)) == [(*name, "artifact") for name in rest]
    assert {stage: find(store, f"{stage}/{chain[stage].key}") for stage in ("data", "base", "sft", "grpo")} == {
        s: chain[s] for s in ("data", "base", "sft", "grpo")
    }


def test_nothing_is_lost_when_a_server_goes_away_in_the_middle(store, chain):
    before = {key: store.get_bytes(key) for key in store.list()}
    plans = iter([planned(store)])

    def again():
        try:
            return next(plans)
        except StopIteration:
            raise TrackingUnavailable("away") from None

    with pytest.raises(TrackingUnavailable):
        list(delete(store, planned(store), again))
    assert {key: store.get_bytes(key) for key in store.list()} == before


@pytest.mark.parametrize("done", range(4))
def test_another_gc_finishes_what_one_that_was_killed_has_begun(store, make, done):
    for letter in "ab":
        make(store, "data", letter)
        make(store, "sft", letter, where="/checkpoints/step-4")
    doomed = planned(store, now=LONG_AFTER, keep=timedelta(days=1))
    # What SIGKILL leaves: all manifests are gone, some items too, and half of the next.
    store.delete([key for item in doomed.items for key in item.keys if key.endswith("/manifest.json")])
    store.delete([key for item in doomed.items[:done] for key in item.keys] + doomed.items[done].keys[:2])
    deleted(store, planned(store, now=LONG_AFTER, keep=timedelta(days=1)))
    assert store.list() == {}


def test_a_record_that_was_written_again_stays(store):
    record(store)
    plan = planned(store, {RUN: "FAILED"})
    record(store, ("data", "a"))
    assert deleted(store, plan) == [] and list(store.list()) == [f"runs/{RUN}.json"]


def test_an_attempt_that_was_published_since_stays(store, make):
    manifest = make(store, "data", "a")
    said = store.get_bytes(f"data/{manifest.key}/manifest.json")
    store.delete([f"data/{manifest.key}/manifest.json"])
    plan = planned(store)
    store.put_bytes(f"data/{manifest.key}/manifest.json", said)
    assert deleted(store, plan) == [] and find(store, f"data/{manifest.key}") == manifest


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (999_960, "1.0 MB"), (2_340_000_000, "2.3 GB")]
)
def test_sizes_are_shown_in_powers_of_1000(count, text):
    assert size(count) == text


@pytest.mark.parametrize("root", ["dir_root", "s3_root"])
def test_the_newest_object_under_a_prefix_has_its_time(request, root):
    store = open_store(request.getfixturevalue(root))
    store.check()
    before = datetime.now(UTC) - timedelta(seconds=2)
    store.put_bytes("a/b", b"x")
    assert before < store.newest("a/") < datetime.now(UTC) + timedelta(seconds=2)
    assert store.newest("a/c") is None


@pytest.fixture
def gc(stack, s3_root, monkeypatch, capsys, tmp_path):
    """Calls `ratchet gc` on the stack's S3; gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    open_store(s3_root).check()

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ratchet", "gc", "--root", s3_root, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return call


def listed(gc, *arguments):
    code, out, err = gc("--json", *arguments)
    assert code == 0, err
    return [(i["stage"], i["key"][0], i["what"]) for i in json.loads(out)["items"]]


@flow
def nothing():
    """A flow for runs that are never started."""


def test_a_registered_version_keeps_its_artifact(gc, s3_root, make):
    store = open_store(s3_root)
    data = make(store, "data", "a")
    grpo = make(store, "grpo", "d", data)
    make(store, "register", "0", grpo)
    make(store, "data", "9")
    tracking = connect(TrackingSection())
    uri = store.uri(f"grpo/{grpo.key}/{grpo.folder}")
    registry.register(
        RegistrySection(name=f"gc-{uuid.uuid4().hex[:8]}"),
        tracking,
        f"{uri}/model",
        None,
        {"ratchet.grpo.uri": uri},
        "0" * 64,
    )
    assert listed(gc, "--delete") == UNUSED
    assert listed(gc) == []
    assert find(store, f"grpo/{grpo.key}") == grpo and find(store, f"data/{data.key}") == data


def test_a_flow_run_keeps_what_it_uses_until_it_is_over(gc, s3_root, make):
    store = open_store(s3_root)
    make(store, "sft", "c")
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(nothing, state=Running()).id
        record(store, ("sft", "c"), run=str(run))
        assert listed(gc, "--delete") == []
        client.set_flow_run_state(run, Completed(), force=True)
    assert listed(gc, "--delete") == [("sft", "c", "artifact"), ("runs", str(run)[0], "record")]
    assert store.list() == {}


def test_an_unknown_run_is_named_on_stderr(gc, s3_root):
    record(open_store(s3_root), run=RUN)
    code, out, err = gc()
    assert (code, out.splitlines()[-1]) == (0, "0 items, 0 B: there is nothing to delete")
    assert (
        err.startswith(f"ratchet: flow run {RUN} is not known to this Prefect server and counts as live until ")
        and err.count("\n") == 1
    )


def test_the_table_has_a_row_per_item_and_the_sum(gc, s3_root, make):
    manifest = make(open_store(s3_root), "data", "a")
    total = size(sum(open_store(s3_root).list().values()))
    code, out, _ = gc()
    head, row, end = out.splitlines()
    assert (code, head.split()) == (0, ["stage", "key", "what", "size", "created", "reason"])
    assert row.split(None, 6) == [
        "data",
        "a" * 12,
        "artifact",
        *total.split(),
        manifest.created,
        "no run, version or checkpoint refers to it",
    ]
    assert end == f"1 item, {total}: nothing was deleted: repeat with --delete"
    assert gc("--delete")[1].splitlines() == [head, row, f"1 item, {total}: deleted"]
    assert open_store(s3_root).list() == {}


def test_without_a_prefect_server_nothing_is_deleted(gc, s3_root, make):
    make(open_store(s3_root), "data", "a")
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code, out, err = gc("--delete")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ratchet: the Prefect server at http://127.0.0.1:9/api does not say which runs are live ")
    assert listed(gc) == [("data", "a", "artifact")]


def test_without_an_mlflow_server_nothing_is_deleted(gc, s3_root, make, monkeypatch):
    make(open_store(s3_root), "data", "a")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        code, out, err = gc("--delete")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("ratchet: the MLflow server at http://127.0.0.1:9 does not answer ")
    assert listed(gc) == [("data", "a", "artifact")]
