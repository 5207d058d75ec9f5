import pytest

from configs.errors import ConfigError
from configs.loading import load
from configs.schema import Gate
from tasks.core.judging.gates import Evaluation, compare, evaluation, judge


def measured(correct, **metrics):
    scores = [float(c) for c in correct]
    return Evaluation(
        metrics={"accuracy": sum(scores) / len(scores), **metrics},
        ids=[str(i) for i in range(len(scores))],
        per_prompt={"accuracy": scores},
    )


def one(gate, candidate, sft=None):
    verdict = judge(candidate, {"sft": sft}, {"g": gate})
    return verdict.gates[0]


def test_clear_gain_over_sft_passes():
    assert (
        one(Gate(metric="accuracy", rival="sft"), measured([1] * 90 + [0] * 10), measured([0] * 100)).outcome == "pass"
    )


def test_tie_does_not_pass():
    same = [1, 0] * 50
    assert one(Gate(metric="accuracy", rival="sft"), measured(same), measured(same)).outcome == "inconclusive"


def test_two_prompts_do_not_decide_even_where_both_got_better():
    assert one(Gate(metric="accuracy", rival="sft"), measured([1, 1]), measured([0, 0])).outcome == "inconclusive"


def test_gain_within_noise_is_inconclusive():
    better_by_one = measured([1, 0, 1] + [1, 0] * 20)
    assert (
        one(Gate(metric="accuracy", rival="sft"), better_by_one, measured([0, 1, 0] + [1, 0] * 20)).outcome
        == "inconclusive"
    )


def test_loss_against_sft_fails():
    assert (
        one(Gate(metric="accuracy", rival="sft"), measured([0] * 100), measured([1] * 90 + [0] * 10)).outcome == "fail"
    )


def test_margin_must_be_exceeded():
    gain = measured([1] * 30 + [0] * 70)
    assert one(Gate(metric="accuracy", rival="sft", margin=0.4), gain, measured([0] * 100)).outcome == "fail"


def test_one_prompt_says_nothing():
    assert one(Gate(metric="accuracy", rival="sft"), measured([1]), measured([0])).outcome == "inconclusive"


def test_different_prompts_are_refused():
    with pytest.raises(ValueError, match="measured on different prompts"):
        one(Gate(metric="accuracy", rival="sft"), measured([1, 1]), measured([1, 1, 1]))


def test_a_champion_that_had_no_room_for_a_prompt_is_compared_on_the_others():
    champion = Evaluation(metrics={}, ids=["1", "2"], per_prompt={"accuracy": [0.0, 0.0]})
    assert (
        "+1 (95% interval"
        in judge(measured([0, 1, 1]), {"champion": champion}, {"g": Gate(metric="accuracy", rival="champion")})
        .gates[0]
        .sentence
    )
    assert compare(measured([0, 1, 1]), champion, "champion").fixed == 2


@pytest.mark.parametrize(
    ("kl", "outcome"),
    [(0.0009, "fail"), (0.001, "pass"), (0.5, "pass"), (0.5001, "fail"), (float("nan"), "inconclusive")],
)
def test_kl_limits_hold_at_their_edges(kl, outcome):
    assert one(Gate(metric="kl", min=0.001, max=0.5), measured([1], kl=kl)).outcome == outcome


def test_metric_that_was_not_measured_is_inconclusive():
    assert one(Gate(metric="kl", max=0.5), measured([1])).outcome == "inconclusive"


def test_sentence_names_value_and_limit():
    assert one(Gate(metric="kl", max=0.5), measured([1], kl=0.75)).sentence == "kl is 0.75 and must be at most 0.5."


def test_one_gate_that_does_not_pass_rejects():
    verdict = judge(
        measured([1], kl=0.1, mean_reward=0.2),
        {},
        {"kl": Gate(metric="kl", max=0.5), "reward": Gate(metric="mean_reward", min=0.3)},
    )
    assert (verdict.passed, [g.outcome for g in verdict.gates]) == (False, ["pass", "fail"])


def test_evaluation_takes_columns_from_completions():
    row = {"id": "a", "correct": True, "reward": 0.5, "formatted": False, "length": 7, "truncated": True}
    found = evaluation({"accuracy": 1.0}, [row])
    assert (found.ids, found.per_prompt["accuracy"], found.per_prompt["mean_length"]) == (["a"], [1.0], [7.0])


def test_without_a_champion_its_gate_passes_and_says_so():
    found = judge(measured([1]), {}, {"g": Gate(metric="accuracy", rival="champion")}).gates[0]
    assert (found.outcome, found.observed) == ("pass", None)
    assert found.sentence == "accuracy has no rival, for no version is the champion yet."


def test_a_champion_must_be_beaten():
    gate = {"g": Gate(metric="accuracy", rival="champion")}
    good, bad = measured([1] * 90 + [0] * 10), measured([0] * 100)
    assert [
        judge(*pair, gate).gates[0].outcome
        for pair in ((good, {"champion": bad}), (bad, {"champion": good}), (good, {"champion": good}))
    ] == [
        "pass",
        "fail",
        "inconclusive",
    ]


def test_a_gate_on_a_further_set_compares_the_prompts_of_that_set():
    candidate, rival = measured([0] * 40), measured([1] * 40)
    candidate.sets["hard"], rival.sets["hard"] = measured([1] * 40), measured([0] * 40)
    found = one(Gate(metric="hard/accuracy", rival="sft"), candidate, rival)
    assert (found.outcome, found.observed, found.metric) == ("pass", 1.0, "hard/accuracy")


def test_a_limit_on_a_further_set_and_on_pass_at_k():
    candidate = measured([1], **{"hard/accuracy": 0.2, "pass_at_8": 0.9})
    outcomes = [
        one(gate, candidate).outcome
        for gate in (Gate(metric="hard/accuracy", min=0.3), Gate(metric="pass_at_8", min=0.9))
    ]
    assert outcomes == ["fail", "pass"]


def test_a_comparison_counts_what_was_fixed_and_broken():
    found = compare(measured([1, 1, 1, 0, 0]), measured([0, 0, 1, 0, 1]), "sft")
    assert (found.rival, found.fixed, found.broken, found.p_value) == ("sft", 2, 1, 1.0)
    mean, low, high = found.differences["accuracy"]
    assert (round(mean, 6), low < mean < high) == (0.2, True)


def test_models_measured_on_different_prompts_are_not_compared():
    with pytest.raises(ValueError, match="measured on different prompts, so that they cannot be compared with sft"):
        compare(measured([1, 1]), measured([1, 1, 1]), "sft")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"gates": {"a": {"metric": "hard/accuracy", "min": 0.5}}},
            "names the set hard, which evaluation.sets does not have",
        ),
        (
            {"gates": {"a": {"metric": "hard/kl", "min": 0.5}}, "evaluation": {"sets": {"hard": {"split": "test"}}}},
            "names no metric of a set",
        ),
        (
            {"gates": {"a": {"metric": "pass_at_8", "min": 0.5}}},
            "needs evaluation.samples of at least 8, and 8 in evaluation.k: set both",
        ),
        (
            {"gates": {"a": {"metric": "pass_at_1", "rival": "sft"}}},
            "has a rival, which needs a value for every prompt",
        ),
        ({"gates": {"a": {"metric": "arc/acc", "rival": "sft"}}}, "has a rival, which needs a value for every prompt"),
        (
            {"evaluation": {"samples": 4, "k": [1, 8]}},
            "evaluation.k has 8 and evaluation.samples is 4: raise samples, or lower k",
        ),
        (
            {"evaluation": {"k": [4, 16]}},
            "evaluation.k and evaluation.sample_temperature are for samples, and evaluation.samples is 0",
        ),
        (
            {"gates": {"a": {"metric": "accuracy", "min": 0.2, "confidence": 0.9}}},
            "has confidence 0.9 and no rival, whose interval it is for",
        ),
        ({"evaluation": {"samples": 4, "k": [4, 1, 4]}}, "evaluation.k has 4 twice: take one of them out"),
        (
            {"gates": {"a": {"metric": "accuracy", "min": 90}}},
            "has min 90, and its values are at most 1: no value can pass, lower min",
        ),
        (
            {"gates": {"a": {"metric": "kl", "max": -0.1}}},
            "has max -0.1, and its values are at least 0: no value can pass, raise max",
        ),
        (
            {"gates": {"a": {"metric": "accuracy", "rival": "sft", "margin": 1}}},
            "has margin 1, and two values differ by at most 1: no value can pass",
        ),
        (
            {"gates": {"a": {"metric": "maj_at_1", "min": 1.5}}, "evaluation": {"samples": 1}},
            "has min 1.5, and its values are at most 1",
        ),
        (
            {
                "gates": {"a": {"metric": "hard/accuracy", "min": 2}},
                "evaluation": {"sets": {"hard": {"split": "test"}}},
            },
            "the gate on hard/accuracy has min 2",
        ),
        (
            {"gates": {"a": {"metric": "rewards/near", "min": 0.2}}},
            "the gate on rewards/near names no component of the reward: these are accuracy",
        ),
        (
            {
                "gates": {"a": {"metric": "arc/rewards/accuracy", "min": 0.2}},
                "evaluation": {"sets": {"arc": {"task": "arc_easy"}}},
            },
            "is on a component of the reward, and a harness's task has none",
        ),
        (
            {"gates": {"a": {"metric": "hard/acuracy", "rival": "sft"}}},
            "needs a value for every prompt, and acuracy has none",
        ),
        (
            {"gates": {"a": {"metric": "accuracy", "min": 0.2, "margin": 0.1}}},
            "has margin 0.1 and no rival, whose difference it is for",
        ),
        ({"evaluation": {"sets": {"a": {}}}}, "has neither split, path nor task and needs exactly one"),
        ({"evaluation": {"sets": {"a": {"split": "test", "path": "x"}}}}, "has split and path and needs exactly one"),
        ({"evaluation": {"sets": {"rewards": {"split": "test"}}}}, "evaluation.sets has a set named rewards"),
    ],
)
def test_a_gate_on_what_is_not_measured_and_a_set_of_nothing_are_refused(values, message):
    with pytest.raises(ConfigError) as error:
        load(values)
    assert message in str(error.value)


def test_gates_on_further_sets_and_on_samples_are_taken():
    sets = {"hard": {"path": "hard.jsonl"}, "arc": {"task": "arc_easy"}}
    gates = {
        "a": {"metric": "hard/accuracy", "rival": "sft"},
        "b": {"metric": "arc/acc", "min": 0.2},
        "c": {"metric": "hard/pass_at_4", "min": 0.1},
    }
    assert load({"gates": gates, "evaluation": {"samples": 4, "k": [4], "sets": sets}}).gates.keys() == {
        "accuracy",
        "kl",
        "reward",
        "a",
        "b",
        "c",
    }


def test_a_gate_may_be_on_a_component_of_the_reward():
    terms = [{"type": "accuracy"}, {"type": "format", "weight": 0.2}]
    grpo = {"reward_type": "combined", "reward_config": {"components": terms}}
    found = load({"grpo": grpo, "evaluation": {"sets": {"seen": {"split": "validation"}}}, "gates": {
        "format": {"metric": "rewards/format", "min": 0.9}, "seen": {"metric": "seen/rewards/format", "min": 0.9},
    }})  # fmt: skip
    candidate = Evaluation(metrics={"rewards/format": 0.95, "seen/rewards/format": 0.85})
    gates = {name: found.gates[name] for name in ("format", "seen")}
    assert [gate.outcome for gate in judge(candidate, {}, gates).gates] == ["pass", "fail"]
