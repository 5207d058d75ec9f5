"""The whole pipeline with damage, faults and failures: only what is affected is redone, and the result is the same."""

import json
import os
from pathlib import Path

import pytest
from faults import KINDS, faulty
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.states import AwaitingRetry
from small_run import CONFIG, PASSING, copy_store, digests, ratchet, wait_for_end

from tasks.core.storage.store import open_store
from tasks.runtime.stage_lock import lock_name

# Fails while GRPO trains, until a file says that it is repaired. In evaluation there is no trainer, and it never fails.
FLAKY_REWARD = """
import os, pathlib
def score(completions, gold, trainer_state=None):
    repaired = pathlib.Path(os.environ["RATCHET_HOME"]) / "repaired"
    if trainer_state is not None and not repaired.exists():
        raise RuntimeError("the reward model is away")
    return [float(g in c) for c, g in zip(completions, gold)]
"""


def test_finished_stages_leave_no_checkpoint_no_owner_no_copy_and_no_lock(first, root):
    store = open_store(root)
    keys = {name: stage["key"] for name, stage in first["stages"].items()}
    assert [key for key in store.list("") if "/checkpoints/" in key or key.endswith("/owner.json")] == []
    kept = Path(os.environ["RATCHET_HOME"]) / "work" / "kept"
    assert [name for name, key in keys.items() if (kept / name / key).exists()] == []
    locks = {lock_name(store, f"{name}/{key}") for name, key in keys.items()}
    with get_client(sync_client=True) as client:
        limits = {limit.name for limit in client.read_global_concurrency_limits(limit=200, offset=0)}
    assert locks & limits == set()


def test_artifact_with_a_flipped_byte_is_named_and_its_stage_alone_is_redone(first, stack, root):
    store, prefix = open_store(root), f"evaluate_sft/{first['stages']['evaluate_sft']['key']}"
    file = next(key for key in store.list(prefix) if key.endswith("/completions.jsonl"))
    data = bytearray(store.get_bytes(file))
    data[10] ^= 1
    store.put_bytes(file, bytes(data))
    gates = {**PASSING["gates"], "any": {"metric": "mean_reward", "min": -50}}
    code, out, err = ratchet(stack["project"], root, ("gates", gates))
    assert code == 0, err
    done = [name for name, stage in json.loads(out)["stages"].items() if not stage["cached"]]
    assert done == ["evaluate_sft", "judge", "register"]
    assert f"{store.uri(file)} differs from its manifest: its stage is redone, all others are kept" in err


def test_a_store_that_fails_in_every_way_gives_the_same_digests(first, stack, root, s3_root):
    # Every tenth request fails. RATCHET_FAULT names one kind that then does so alone.
    kinds = [os.environ["RATCHET_FAULT"]] if "RATCHET_FAULT" in os.environ else KINDS
    with faulty(stack["s3"], dict.fromkeys(kinds, 0.1 / len(kinds)), seed=1) as proxy:
        env = {"AWS_ENDPOINT_URL_S3": proxy.url}
        more = (*PASSING.items(), ("storage.timeout_seconds", 1))
        code, out, err = ratchet(stack["project"], s3_root, *more, env=env)
        counts = dict(proxy.counts)
    assert code == 0, err
    assert min(counts.get(kind, 0) for kind in kinds) > 0
    assert digests(s3_root, json.loads(out)) == digests(root, first)


def test_bad_data_ends_a_run_with_one_sentence_and_no_artifact(stack, s3_root, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b"}\n')
    code, out, err = ratchet(stack["project"], s3_root, ("data.path", str(path)))
    sentence = err.splitlines()[-2]
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert sentence.startswith("ratchet: ") and "answer" in sentence and "line 2" in sentence
    left = [key for key in open_store(s3_root).list("") if not key.endswith("/owner.json")]
    assert [key for key in left if not key.startswith("runs/")] == []


@pytest.fixture(scope="module")
def retried(first, stack, root):
    """A run under the worker whose reward fails while GRPO trains, and its Retry: (states, task states by name)."""
    copied = "s3://ratchet/retried"
    copy_store(root, copied, "data", "base", "sft")
    (stack["project"] / "flaky_reward.py").write_text(FLAKY_REWARD)
    reward = {"grpo": {**CONFIG["grpo"], "reward_type": "flaky_reward:score"}}
    overrides = {**CONFIG, **PASSING, **reward, "storage.root": copied, "registry.name": "retried"}
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("post-train/post-train")
        parameters = {"preset": "tiny", "overrides": overrides}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        failed = wait_for_end(client, run.id)
        (Path(os.environ["RATCHET_HOME"]) / "repaired").touch()
        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        completed = wait_for_end(client, run.id, after=1)
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
    ordered = sorted(tasks, key=lambda task: task.state.timestamp)
    return (failed, completed), {task.name: task.state.name for task in ordered}


def test_retry_completes_a_failed_run(retried):
    assert retried[0] == ("Failed", "Completed")


def test_retry_redoes_only_unfinished_stages(retried):
    names = {state: [name for name, found in retried[1].items() if found == state] for state in ("Cached", "Completed")}
    assert names == {
        "Cached": ["data", "base", "evaluate base", "sft", "evaluate sft"],
        "Completed": ["begin", "champion", "grpo", "evaluate grpo", "judge", "register"],
    }
