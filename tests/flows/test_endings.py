"""After any kill, a run ends in the right state and leaves no process behind. A real stack, real kills."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny
import yaml
from paths import ROOT
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.events.schemas.automations import AutomationCore
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Completed, Crashed, Pending, Running, Scheduled

from deployments.local import control, health, serving, settings
from deployments.local import stack as embedded
from flows import run_watchdog
from tasks.core.storage.store import open_store

# Such a run never finishes; each test ends its run.
ENDLESS = {
    **tiny.RUN,
    "sft": {"max_steps": 100_000, "batch_size": 8, "logging_steps": 1, "save_steps": 10},
}
SILENT = "Crash runs that went silent"


@pytest.fixture(scope="module")
def client(stack):
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def cancelled(stack, client):
    """A training under the worker, cancelled as the UI does it, then retried until it trains again."""
    root = "s3://ratchet/endings"
    deployment = client.read_deployment_by_name("post-train/post-train")
    run = client.create_flow_run_from_deployment(
        deployment.id, parameters={"preset": "tiny", "overrides": {**ENDLESS, "storage.root": root}}
    )
    before = eventually(lambda: newest_checkpoint(root))
    engine = engine_of(run.id)
    children = engine.children(recursive=True)
    client.set_flow_run_state(run.id, Cancelling())
    state = ended(client, run.id)
    left, after = alive([engine, *children]), newest_checkpoint(root)
    client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
    steps = eventually(lambda: first_step(client, run.id, attempt=2))
    return SimpleNamespace(
        id=run.id, state=state, children=children, left=left, before=before, after=after, first_step_of_retry=steps
    )


@pytest.fixture(scope="module")
def worker_lost(stack, client, cancelled):
    """The retried training, after its worker was killed."""
    server = control.rpc(settings.load(stack["home"])["socket"])
    engine = engine_of(cancelled.id)
    children = engine.children(recursive=True)
    worker = server.getProcessInfo("worker")["pid"]
    os.kill(worker, signal.SIGKILL)
    state = ended(client, cancelled.id, after=1)
    psutil.wait_procs([engine, *children], timeout=40)
    # Later tests need a worker.
    eventually(
        lambda: (
            (info := server.getProcessInfo("worker"))["pid"] not in (0, worker)
            and serving.worker_online(f"{stack['prefect']}/api", info["start"])
        )
    )
    return SimpleNamespace(state=state, children=children, left=alive([engine, *children]))


@pytest.fixture
def here(stack, client, s3_root):
    """A `ratchet run` whose child process is working: the process, its child, and the id of its flow run."""
    sets = [f"{key}={json.dumps(value)}" for key, value in {**ENDLESS, "storage.root": s3_root}.items()]
    command = [Path(sys.executable).with_name("ratchet"), "run", "tiny", *(part for s in sets for part in ("--set", s))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            child = eventually(
                lambda: next(
                    (
                        p
                        for p in psutil.Process(process.pid).children()
                        if "tasks.core.execution.child" in command_of(p)
                    ),
                    None,
                )
            )
            watchdogs = [
                p.cmdline() for p in psutil.Process(process.pid).children() if "flows.run_watchdog" in command_of(p)
            ]
            yield SimpleNamespace(process=process, child=child, flow_run=watchdogs[0][-1])
        finally:
            process.kill()


def test_a_run_cancelled_in_the_ui_is_cancelled(cancelled):
    assert cancelled.state == "Cancelled"


def test_cancelling_ends_the_engine_and_its_child(cancelled):
    assert (len(cancelled.children) > 0, cancelled.left) == (True, [])


def test_checkpoints_of_a_cancelled_run_stay(cancelled):
    assert cancelled.after >= cancelled.before > 0


def test_retry_of_a_cancelled_run_goes_on_from_its_last_checkpoint(cancelled):
    assert cancelled.first_step_of_retry == cancelled.after + 1


def test_a_run_whose_worker_was_killed_is_crashed(worker_lost):
    assert worker_lost.state == "Crashed"


def test_a_killed_worker_leaves_neither_engine_nor_child(worker_lost):
    assert (len(worker_lost.children) > 0, worker_lost.left) == (True, [])


def test_ratchet_run_that_was_killed_is_crashed_and_leaves_no_child(client, here):
    here.process.kill()
    assert ended(client, here.flow_run) == "Crashed"
    assert client.read_flow_run(here.flow_run).state.message == (
        "The process of `ratchet run` ended without a result (it was killed, or ran out of memory): "
        "finished stages and checkpoints are kept, and Retry or the same command continues from them."
    )
    assert psutil.wait_procs([here.child], timeout=30)[1] == []


def test_ratchet_run_that_is_cancelled_in_the_ui_says_so_and_ends(client, here):
    client.set_flow_run_state(here.flow_run, Cancelling())
    errors = here.process.communicate(timeout=120)[1].splitlines()
    assert errors[-1] == (
        "ratchet: the run was cancelled: finished stages and checkpoints are kept, "
        "and Retry or the same command continues from them"
    )
    assert (here.process.returncode, client.read_flow_run(here.flow_run).state.name, here.child.is_running()) == (
        1,
        "Cancelled",
        False,
    )


@pytest.mark.parametrize(
    ("state", "run_count", "terminated", "expected"),
    [
        (Pending(), 0, False, "Crashed"),
        (Running(), 1, False, "Crashed"),
        (Cancelling(), 1, False, "Cancelled"),
        (Crashed(), 1, True, "Cancelled"),
        (Crashed(), 1, False, None),
        (Completed(name="Rejected"), 1, True, None),
        (Cancelled(), 1, True, None),
        (Scheduled(), 1, False, None),
        (Pending(), 1, False, None),
        (Running(), 2, False, None),
        (Cancelling(), 2, True, None),
        (Crashed(), 2, True, None),
    ],
)
def test_the_watchdog_ends_its_own_run_and_leaves_a_retried_one_alone(state, run_count, terminated, expected):
    final = run_watchdog.outcome(SimpleNamespace(state=state, run_count=run_count), terminated)
    assert (final and final.name) == expected


def test_the_automation_is_there_once_after_a_second_up(stack, stack_options):
    embedded.up(stack["home"], **stack_options)
    assert [a["name"] for a in automations(stack)] == [SILENT]


def test_an_automation_that_differs_is_brought_up_to_date_and_stays_paused(stack):
    api = f"{stack['prefect']}/api"
    before = automations(stack)[0]
    changed = {
        "name": SILENT,
        "enabled": False,
        "trigger": {**before["trigger"], "within": 30},
        "actions": before["actions"],
    }
    health.ask(f"{api}/automations/{before['id']}", changed, method="PUT")
    serving.automations(api)
    after = automations(stack)
    health.ask(
        f"{api}/automations/{before['id']}", {**changed, "enabled": True, "trigger": before["trigger"]}, method="PUT"
    )
    assert [(a["id"], a["enabled"], a["trigger"]["within"]) for a in after] == [(before["id"], False, 180.0)]


def test_prefect_reads_the_file_of_automations():
    [defined] = yaml.safe_load(serving.AUTOMATIONS.read_text())["automations"]
    assert AutomationCore.model_validate(defined).name == SILENT


def test_one_training_runs_at_a_time_and_promotions_do_not_wait_for_it(stack):
    api = f"{stack['prefect']}/api"
    queues = {q["name"]: q["concurrency_limit"] for q in health.ask(f"{api}/work_pools/ratchet/queues/filter", {})}
    deployments = {d["name"]: d["work_queue_name"] for d in health.ask(f"{api}/deployments/filter", {})}
    assert queues == {"default": None, "training": 1}
    assert deployments == {
        "post-train": "training",
        "nightly-retrain": "training",
        "promote": "default",
        "rollback": "default",
    }


def automations(stack):
    return health.ask(f"{stack['prefect']}/api/automations/filter", {})


def engine_of(flow_run):
    """The process of a flow run that a worker started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "prefect.engine" in command_of(process) and process.environ().get("PREFECT__FLOW_RUN_ID") == str(
                flow_run
            ):
                return process
    raise AssertionError(f"no engine of {flow_run}")


def command_of(process):
    return " ".join(process.cmdline())


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def newest_checkpoint(root):
    """Step of the newest whole SFT checkpoint; 0 without one."""
    found = [re.search(r"/checkpoints/step-(\d+)/manifest\.json$", key) for key in open_store(root).list("sft/")]
    return max((int(match[1]) for match in found if match), default=0)


def first_step(client, flow_run, attempt):
    """The first training step in the run's log since it started the `attempt`-th time; None before that step."""
    starts = [state.timestamp for state in client.read_flow_run_states(flow_run) if state.name == "Running"]
    if len(starts) < attempt:
        return None
    logs = client.read_logs(
        LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run])), limit=200, sort="TIMESTAMP_DESC"
    )
    found = [re.search(r"sft: .*step (\d+)/", log.message) for log in logs if log.timestamp > max(starts)]
    steps = [int(match[1]) for match in found if match]
    return min(steps, default=None)


def ended(client, flow_run, after=0):
    """Name of the run's final state, once it has run more than `after` times."""
    return eventually(
        lambda: (run := client.read_flow_run(flow_run)).state.is_final() and run.run_count > after and run.state.name
    )


def eventually(found, seconds=280):
    """The first true value that `found` returns."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.2)
    return value
