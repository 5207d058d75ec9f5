"""Three rounds of tests/support/chaos.py, one per kind of process; `make chaos` does thirty, at random."""

import pytest
from chaos import SAVE_STEPS, STEPS, TARGETS, Chaos


@pytest.fixture(scope="module")
def quiet(stack):
    """(chaos, an undisturbed round of it)."""
    chaos = Chaos(stack["home"], stack["project"], "s3://ratchet/chaos")
    return chaos, chaos.undisturbed()


@pytest.fixture(scope="module", params=zip(TARGETS, ("grpo", "sft", "grpo"), strict=True), ids="-".join)
def killed(quiet, request):
    """A round in which the target was killed in the middle of a stage's training."""
    target, stage = request.param
    return quiet[0].round(target, at=(stage, 2 * SAVE_STEPS + 2)), quiet[1]


def test_run_ends_with_the_bytes_of_an_undisturbed_one(killed):
    done, undisturbed = killed
    assert (done.state, done.digests) == ("Completed", undisturbed.digests)


def test_training_was_cut_off_and_went_on_from_a_checkpoint(killed):
    assert len(killed[0].resumed_after) == 1


def test_no_more_than_save_steps_are_redone(killed):
    assert max(killed[0].redone.values()) <= SAVE_STEPS


def test_curves_have_every_step_once(killed):
    assert killed[0].curves == {stage: list(range(1, steps + 1)) for stage, steps in STEPS.items()}


def test_no_process_no_lock_and_no_checkpoint_is_left(killed):
    done = killed[0]
    assert (done.orphans, done.locks, done.left) == ([], [], [])
