import json
import logging
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import tiny

from configs.errors import DataError, DiskFull, StageFailed, StageKilled
from configs.schema import ComputeSection, DataSection, RewardConfig, SFTSection
from tasks.core.execution import child
from tasks.core.execution.launch import _last_lines, run_child
from tasks.core.execution.protocol import emit
from tasks.core.training.context import Context

ACCURACY = {"reward_type": "accuracy", "reward_config": RewardConfig().model_dump(mode="json")}


def request(**section):
    return {
        "stage": "data",
        "section": DataSection(**section).model_dump(mode="json"),
        "seed": 1,
        "inputs": {},
        "reward": ACCURACY,
    }


SMALL = {"arithmetic": {"demonstrations": 20}}


def test_child_does_the_work_and_returns_metrics(tmp_path):
    assert run_child(request(**SMALL), tmp_path / "w", print)["num_demonstrations"] == 20


def test_childs_output_lies_in_the_work_folder(tmp_path):
    run_child(request(**SMALL), tmp_path / "w", print)
    assert len((tmp_path / "w/out/sft.jsonl").read_text().splitlines()) == 20


def test_bad_data_in_the_child_is_the_same_error_here(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        run_child(request(path=str(tmp_path / "nowhere.jsonl")), tmp_path / "w", print)


def test_base_stage_of_a_local_folder_needs_no_data(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    run_child(
        {"stage": "base", "section": {"name": str(model)}, "seed": 1, "inputs": {}, "reward": ACCURACY},
        tmp_path / "w",
        print,
    )
    assert list(json.loads((tmp_path / "w/out/source.json").read_text())) == ["sha256"]


def test_unexpected_error_shows_the_childs_last_lines(tmp_path):
    with pytest.raises(StageFailed, match="KeyError: 'section'"):
        run_child({"stage": "data"}, tmp_path / "w", print)


def test_killed_child_is_seen_for_what_it_is(tmp_path):
    def kill(event):
        if "pid" in event:  # its first one; others may follow before it is dead
            os.kill(event["pid"], signal.SIGKILL)

    with pytest.raises(StageKilled, match="was ended by SIGKILL"):
        run_child(slow(), tmp_path / "w", kill)


def test_interrupted_parent_ends_the_child(tmp_path):
    pids = []

    def interrupt(event):
        pids.append(event["pid"])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(slow(), tmp_path / "w", interrupt)
    assert not psutil.pid_exists(pids[0])


def test_child_dies_with_a_parent_that_was_killed(tmp_path):
    work = tmp_path / "w"
    code = f"from pathlib import Path; from tasks.core.execution.launch import run_child; run_child({slow()!r}, Path({str(work)!r}), print)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    child = wait_for(lambda: psutil.Process(parent.pid).children())[0]
    wait_for(lambda: (work / "events.jsonl").exists() and (work / "events.jsonl").read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: not child.is_running())


def test_two_processes_train_one_model(tmp_path):
    data, base = tiny.build(tmp_path / "inputs")
    section = SFTSection(batch_size=2, max_steps=2, lora_rank=2, logging_steps=1, max_length=64)
    compute = ComputeSection(device="cpu", num_processes=2)
    sections = {
        "section": section.model_dump(mode="json"),
        "model": tiny.MODEL.model_dump(mode="json"),
        "compute": compute.model_dump(),
        "seed": 1,
    }
    inputs = {"inputs": {"data": str(data), "base": str(base)}}
    events = []
    assert (
        run_child({"stage": "sft", "grpo": {}, **sections, **inputs}, tmp_path / "w", events.append, processes=2)[
            "steps"
        ]
        == 2
    )
    # 24 demonstrations, 2 for each of 2 processes a step: after 2 steps a third of an epoch, with one process it would be a sixth.
    assert [(event["step"], round(event["epoch"], 3)) for event in events if event["event"] == "log"] == [
        (1, 0.167),
        (2, 0.333),
    ]
    assert (tmp_path / "w/out/model/model.safetensors").exists()


def test_a_full_disk_is_one_sentence_whatever_the_child_was_writing(small_disk):
    with pytest.raises(
        DiskFull,
        match=rf"^the disk of {small_disk}/w is full .* free space there, then press Retry: what was finished is kept$",
    ):
        run_child(request(arithmetic={"demonstrations": 20_000}), small_disk / "w", print)


def test_warnings_of_a_child_reach_the_parent():
    events = []
    context = Context(emit=lambda **event: events.append(event))
    logger = logging.getLogger("ratchet")
    logger.addHandler(handler := child._Reported(context))
    try:
        logger.warning("half of it")
    finally:
        logger.removeHandler(handler)
    assert events == [{"event": "message", "message": "half of it", "level": "warning"}]


def test_progress_bars_are_not_among_the_last_lines(tmp_path):
    (tmp_path / "log").write_text("Loading:   0%|   | 0/2\rLoading: 100%|###| 2/2\n\nout of memory\n")
    assert _last_lines(tmp_path / "log") == ["out of memory"]


def test_events_arrive_in_order(tmp_path):
    path = tmp_path / "events.jsonl"
    for step in (1, 2):
        emit(path, event="log", step=step)
    assert path.read_text() == '{"event": "log", "step": 1}\n{"event": "log", "step": 2}\n'


def wait_for(condition, seconds=30):
    """What the condition gives, once it gives something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def slow():
    """A request that takes far longer than the test."""
    return request(arithmetic={"demonstrations": 20_000_000})
