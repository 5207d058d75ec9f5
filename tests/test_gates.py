import pytest

from configs.schema import Gate
from tasks.core.gates import Evaluation, bootstrap_interval, evaluation, judge, matched_interval


def measured(correct, **metrics):
    scores = [float(c) for c in correct]
    return Evaluation(metrics={"accuracy": sum(scores) / len(scores), **metrics}, ids=[str(i) for i in range(len(scores))], per_prompt={"accuracy": scores})


def one(gate, candidate, sft=None):
    verdict = judge(candidate, {"sft": sft}, {"g": gate})
    return verdict.gates[0]


def test_clear_gain_over_sft_passes():
    assert one(Gate(metric="accuracy", rival="sft"), measured([1] * 90 + [0] * 10), measured([0] * 100)).outcome == "pass"


def test_tie_does_not_pass():
    same = [1, 0] * 50
    assert one(Gate(metric="accuracy", rival="sft"), measured(same), measured(same)).outcome == "inconclusive"


def test_two_prompts_do_not_decide_even_where_both_got_better():
    assert one(Gate(metric="accuracy", rival="sft"), measured([1, 1]), measured([0, 0])).outcome == "inconclusive"


def test_gain_within_noise_is_inconclusive():
    better_by_one = measured([1, 0, 1] + [1, 0] * 20)
    assert one(Gate(metric="accuracy", rival="sft"), better_by_one, measured([0, 1, 0] + [1, 0] * 20)).outcome == "inconclusive"


def test_loss_against_sft_fails():
    assert one(Gate(metric="accuracy", rival="sft"), measured([0] * 100), measured([1] * 90 + [0] * 10)).outcome == "fail"


def test_margin_must_be_exceeded():
    gain = measured([1] * 30 + [0] * 70)
    assert one(Gate(metric="accuracy", rival="sft", margin=0.4), gain, measured([0] * 100)).outcome == "fail"


def test_one_prompt_says_nothing():
    assert one(Gate(metric="accuracy", rival="sft"), measured([1]), measured([0])).outcome == "inconclusive"


def test_different_prompts_are_refused():
    with pytest.raises(ValueError, match="measured on different prompts"):
        one(Gate(metric="accuracy", rival="sft"), measured([1, 1]), measured([1, 1, 1]))


@pytest.mark.parametrize(("kl", "outcome"), [(0.0009, "fail"), (0.001, "pass"), (0.5, "pass"), (0.5001, "fail"), (float("nan"), "inconclusive")])
def test_kl_limits_hold_at_their_edges(kl, outcome):
    assert one(Gate(metric="kl", min=0.001, max=0.5), measured([1], kl=kl)).outcome == outcome


def test_metric_that_was_not_measured_is_inconclusive():
    assert one(Gate(metric="kl", max=0.5), measured([1])).outcome == "inconclusive"


def test_sentence_names_value_and_limit():
    assert one(Gate(metric="kl", max=0.5), measured([1], kl=0.75)).sentence == "kl is 0.75 and must be at most 0.5."


def test_one_gate_that_does_not_pass_rejects():
    verdict = judge(measured([1], kl=0.1, mean_reward=0.2), {}, {"kl": Gate(metric="kl", max=0.5), "reward": Gate(metric="mean_reward", min=0.3)})
    assert (verdict.passed, [g.outcome for g in verdict.gates]) == (False, ["pass", "fail"])


def test_bootstrap_interval_is_the_same_every_time():
    assert bootstrap_interval([1.0, 0.0, 0.0, 1.0], 0.95) == bootstrap_interval([1.0, 0.0, 0.0, 1.0], 0.95) == (0.0, 1.0)


def test_matched_interval_is_agresti_and_mins():
    # 30 better, 10 worse of 100: (30.5 - 10.5) / 102 = 0.19608, and 1.95996 * sqrt(41 - 20^2 / 102) / 102 = 0.11700
    low, high = matched_interval([1.0] * 30 + [-1.0] * 10 + [0.0] * 60, 0.95)
    assert (round(low, 4), round(high, 4)) == (0.0791, 0.3131)


def test_evaluation_takes_columns_from_completions():
    row = {"id": "a", "correct": True, "reward": 0.5, "formatted": False, "length": 7, "truncated": True}
    found = evaluation({"accuracy": 1.0}, [row])
    assert (found.ids, found.per_prompt["accuracy"], found.per_prompt["mean_length"]) == (["a"], [1.0], [7.0])
