"""Three rounds of tests/support/chaos.py, one per kind of process; `make chaos` does thirty random ones."""

import pytest
from chaos import TARGETS, Chaos
from small_run import SAVE_STEPS, STEPS, copy_store, digests
from tiny import STAGES


@pytest.fixture(scope="module")
def chaos(first, stack, root):
    """Chaos on a copy of the store of an undisturbed run."""
    copied = "s3://ratchet/chaos"
    copy_store(root, copied, *STAGES)
    return Chaos(stack["home"], stack["project"], copied)


@pytest.fixture(scope="module", params=zip(TARGETS, ("grpo", "sft", "grpo"), strict=True), ids="-".join)
def killed(chaos, request):
    """(stage, round): a round that trains one stage, in the middle of which the target was killed."""
    target, stage = request.param
    return stage, chaos.round(target, at=(stage, 2 * SAVE_STEPS + 2), redo=(stage,))


def test_run_ends_with_the_bytes_of_an_undisturbed_one(killed, first, root):
    stage, done = killed
    assert (done.state, done.digests[stage]) == ("Completed", digests(root, first)[stage])


def test_training_was_killed_and_resumed_from_a_checkpoint(killed):
    assert len(killed[1].resumed_after) == 1


def test_no_more_than_save_steps_are_redone(killed):
    stage, done = killed
    assert done.redone[stage] <= SAVE_STEPS


def test_curve_has_every_step_once(killed):
    stage, done = killed
    assert done.curves == {stage: list(range(1, STEPS[stage] + 1))}


def test_no_process_no_lock_and_no_checkpoint_is_left(killed):
    done = killed[1]
    assert (done.orphans, done.locks, done.left) == ([], [], [])
