"""The whole pipeline on a model that learns nothing: what is done, what is cached, what is shown. Real servers, real training."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
import tiny
from faults import KINDS, faulty
from paths import ROOT
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter, FlowRunFilterId
from prefect.states import AwaitingRetry

from configs.schema import TrackingSection
from tasks.core.storage.artifacts import find
from tasks.core.storage.store import open_store
from tasks.core.tracking import promotion, runs
from tasks.runtime.stage_lock import lock_name

SMALL = {
    **tiny.RUN,
    "sft": {"max_steps": 4, "batch_size": 8, "logging_steps": 1},
    "grpo": {"max_steps": 2, "batch_size": 8, "num_generations": 4, "max_new_tokens": 8, "logging_steps": 1},
    "evaluation": {"batch_size": 16, "kl_samples": 4},
    "registry.name": "pipeline",
}
PASSING = {"gates": {"accuracy": None, "kl": None, "reward": {"min": -100}}}
# A user's reward that fails while GRPO trains, until a file says that it was mended; evaluation, which has no trainer, never fails.
FLAKY = """
import os, pathlib
def score(completions, gold, trainer_state=None):
    if trainer_state is not None and not (pathlib.Path(os.environ["RATCHET_HOME"]) / "mended").exists():
        raise RuntimeError("the reward model is away")
    return [float(g in c) for c, g in zip(completions, gold)]
"""


def ratchet(root, *more, env=None):
    """Runs the command in a process of its own and gives its exit code, the object on stdout and its log."""
    sets = [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "storage.root": root, **dict(more)}.items()]
    watch = "import sys; from flows.cli import app; app(standalone_mode=False); print(sorted({'torch', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    command = [sys.executable, "-c", watch, "run", "tiny", "--json", *(part for s in sets for part in ("--set", s))]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=500, env={**os.environ, **(env or {})}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def root(stack):
    return "s3://ratchet/pipeline"


@pytest.fixture(scope="module")
def first(root):
    """A run from nothing that passes."""
    code, out, err = ratchet(root, *PASSING.items())
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def second(first, root):
    """The same run again: its object and its log."""
    code, out, err = ratchet(root, *PASSING.items())
    assert code == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def rejected(first, root):
    """The same run with the preset's gates, which a model that learnt nothing does not pass."""
    code, out, err = ratchet(root)
    assert code == 0, err
    return json.loads(out)


def test_every_stage_is_done_and_none_cached(first):
    assert {name: stage["cached"] for name, stage in first["stages"].items()} == dict.fromkeys(tiny.STAGES, False)


def test_each_model_has_its_metrics(first):
    common = {"accuracy", "mean_reward", "format_rate", "mean_length", "truncated_rate", "num_prompts"}
    expected = {"base": common, "sft": common | {"kl", "kl_sequence"}, "grpo": common | {"kl", "kl_sequence"}}
    assert all(names <= set(first["metrics"][role]) for role, names in expected.items())


def test_all_models_are_measured_on_the_same_prompts(first):
    assert [first["metrics"][role]["num_prompts"] for role in ("base", "sft", "grpo")] == [16, 16, 16]


def test_version_that_passed_is_in_staging_as_challenger(first):
    assert (first["state"], first["model"]["stage"], first["model"]["aliases"]) == (
        "Completed",
        "Staging",
        ["challenger"],
    )


def test_second_run_finds_every_stage_cached(first, second):
    again, _ = second
    assert {name: (stage["key"], stage["cached"]) for name, stage in again["stages"].items()} == {
        n: (s["key"], True) for n, s in first["stages"].items()
    }


def test_second_run_starts_no_child_process(second):
    assert "started as process" not in second[1]


def test_orchestrating_process_imports_neither_torch_nor_transformers(second):
    assert second[1].rstrip().endswith("[]")


def test_second_run_makes_no_second_version(first, second):
    assert second[0]["model"] == first["model"]


def test_not_passing_is_a_result(rejected):
    assert (rejected["state"], rejected["verdict"]["passed"], rejected["model"]["stage"]) == ("Rejected", False, "None")


def test_other_gates_redo_the_verdict_alone(rejected):
    assert [name for name, stage in rejected["stages"].items() if not stage["cached"]] == ["judge", "register"]


def test_artifact_with_a_flipped_byte_is_named_and_its_stage_alone_is_redone(rejected, root):
    store, prefix = open_store(root), f"evaluate_sft/{rejected['stages']['evaluate_sft']['key']}"
    file = next(key for key in store.list(prefix) if key.endswith("/completions.jsonl"))
    data = bytearray(store.get_bytes(file))
    data[10] ^= 1
    store.put_bytes(file, bytes(data))
    code, out, err = ratchet(root, ("gates", {"reward": {"min": -50}}))
    assert code == 0, err
    assert [name for name, stage in json.loads(out)["stages"].items() if not stage["cached"]] == [
        "evaluate_sft",
        "judge",
        "register",
    ]
    assert f"{store.uri(file)} differs from its manifest: its stage is redone, all others are kept" in err


def test_a_store_that_fails_in_every_way_gives_the_same_digests(first, root, s3_root, stack):
    # Every tenth request fails. RATCHET_FAULT names one kind that does so alone.
    kinds = [os.environ["RATCHET_FAULT"]] if "RATCHET_FAULT" in os.environ else KINDS
    with faulty(stack["s3"], dict.fromkeys(kinds, 0.1 / len(kinds)), seed=1) as proxy:
        code, out, err = ratchet(
            s3_root, *PASSING.items(), ("storage.timeout_seconds", 1), env={"AWS_ENDPOINT_URL_S3": proxy.url}
        )
        counts = dict(proxy.counts)
    assert code == 0, err
    assert min(counts.get(kind, 0) for kind in kinds) > 0
    assert digests(s3_root, json.loads(out)) == digests(root, first)


def test_nothing_is_left_of_work_that_is_done(first, second, root):
    locks = {lock_name(open_store(root), f"{name}/{stage['key']}") for name, stage in first["stages"].items()}
    assert [key for key in open_store(root).list("") if "/checkpoints/" in key or key.endswith("/owner.json")] == []
    kept = Path(os.environ["RATCHET_HOME"]) / "work" / "kept"
    assert [name for name, stage in first["stages"].items() if (kept / name / stage["key"]).exists()] == []
    with get_client(sync_client=True) as client:
        assert locks & {limit.name for limit in client.read_global_concurrency_limits(limit=200, offset=0)} == set()


def test_rejected_version_carries_its_verdict(rejected):
    found = mlflow.MlflowClient().get_model_version("pipeline", str(rejected["model"]["version"]))
    assert (found.tags["gate.status"], found.tags["gate.kl"].startswith("fail: kl is ")) == ("rejected", True)


def test_registered_model_loads_from_the_store(first):
    loaded = mlflow.transformers.load_model(f"models:/pipeline/{first['model']['version']}", return_type="components")
    assert loaded["model"].config.hidden_size == 32


def test_weights_are_stored_once(first, root):
    weights = [key for key in open_store(root).list("grpo/") if key.endswith("/model.safetensors")]
    assert (len(weights), [k for k in open_store("s3://mlflow").list("") if k.endswith(".safetensors")]) == (1, [])


def test_mlflow_shows_a_child_per_stage_with_its_curve(first):
    client = mlflow.MlflowClient()
    parent = first["urls"]["mlflow_run"].partition("?")[0].rpartition("/")[2]
    experiment = client.get_run(parent).info.experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    grpo = next(run for run in children if run.data.tags["ratchet.stage"] == "grpo")
    assert len(children) == len(tiny.STAGES)
    assert [point.step for point in client.get_metric_history(grpo.info.run_id, "reward")] == [1, 2]


def test_report_is_a_markdown_artifact_of_the_run(first):
    with get_client(sync_client=True) as client:
        here = FlowRunFilter(id=FlowRunFilterId(any_=[first["flow_run_id"]]))
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[first["flow_run_id"]])),
            flow_run_filter=here,
        )
    by_key = {artifact.key: artifact for artifact in found}
    assert by_key["report"].data.startswith("## Passed: every gate says yes")
    assert by_key["samples"].data.startswith("# Samples")
    assert by_key["grpo"].data == 100.0


def test_card_of_the_data_is_a_markdown_artifact_of_the_run_also_where_it_is_cached(first, second):
    for summary in (first, second[0]):
        with get_client(sync_client=True) as client:
            artifacts = client.read_artifacts(
                artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[summary["flow_run_id"]]))
            )
        assert [a.data.partition("\n")[0] for a in artifacts if a.key == "data-card"] == ["# Data set"]


def test_bad_data_ends_a_run_with_one_sentence_and_no_artifact(stack, s3_root, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n')
    done = subprocess.run(
        [Path(sys.executable).with_name("ratchet"), "run", "tiny", "--set", f"data.path={path}", "--set", f"storage.root={s3_root}"],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    last = done.stderr.rstrip().splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr, done.stdout) == (2, False, "")
    assert last.startswith("ratchet: ") and "answer" in last and "line 2" in last
    assert [
        key for key in open_store(s3_root).list("") if not key.endswith("/owner.json") and not key.startswith("runs/")
    ] == []


def test_retry_of_a_failed_run_redoes_only_what_was_not_finished(stack, s3_root):
    (stack["project"] / "flaky_reward.py").write_text(FLAKY)
    reward = {"grpo": {**SMALL["grpo"], "reward_type": "flaky_reward:score"}}
    overrides = {**SMALL, **PASSING, **reward, "storage.root": s3_root, "registry.name": "retried"}
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("post-train/post-train")
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"preset": "tiny", "overrides": overrides}
        )
        assert ended(client, run.id) == "Failed"
        (Path(os.environ["RATCHET_HOME"]) / "mended").touch()
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        assert ended(client, run.id, after=1) == "Completed"
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
    states = {task.name: task.state.name for task in sorted(tasks, key=lambda task: task.state.timestamp)}
    assert [name for name, state in states.items() if state == "Cached"] == [
        "data",
        "base",
        "evaluate base",
        "sft",
        "evaluate sft",
    ]
    assert [name for name, state in states.items() if state == "Completed"] == [
        "begin",
        "champion",
        "grpo",
        "evaluate grpo",
        "judge",
        "register",
    ]


def test_the_champion_is_measured_too_and_may_be_a_rival(first, root):
    promotion.promote("pipeline", first["model"]["version"], runs.connect(TrackingSection()))
    gates = {
        "reward": {"min": -100},
        "accuracy": None,
        "kl": None,
        "champion": {"metric": "accuracy", "rival": "champion"},
    }
    code, out, err = ratchet(root, ("gates", gates))
    assert code == 0, err
    found = json.loads(out)
    assert [name for name, stage in found["stages"].items() if not stage["cached"]] == [
        "evaluate_champion",
        "judge",
        "register",
    ]
    assert found["metrics"]["champion"]["accuracy"] == found["metrics"]["grpo"]["accuracy"]
    verdict = {gate["name"]: gate for gate in found["verdict"]["gates"]}
    assert (verdict["champion"]["outcome"], verdict["champion"]["limit"]) == (
        "inconclusive",
        "above champion by more than 0",
    )


def digests(root, summary):
    """Digest of each stage's artifact; a registration names the version that it made, which is another each time."""
    keys = {name: stage["key"] for name, stage in summary["stages"].items() if name != "register"}
    return {name: find(open_store(root), f"{name}/{key}").digest for name, key in keys.items()}


def ended(client, flow_run_id, after=0, seconds=300):
    """Name of the run's final state, once it has run more than `after` times."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run = client.read_flow_run(flow_run_id)
        if run.state.is_final() and run.run_count > after:
            return run.state.name
        time.sleep(0.5)
    raise AssertionError(f"still {run.state.name} after {seconds} s")
