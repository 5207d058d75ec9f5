from tasks.core.judging import report
from tasks.core.judging.gates import Comparison, GateResult, Verdict
from tasks.runtime.progress import line

METRICS = {
    "base": {"accuracy": 0.0, "num_prompts": 256},
    "sft": {"accuracy": 0.25, "kl": 1.5, "num_prompts": 256},
    "grpo": {"accuracy": 0.755, "kl": 0.0123, "num_prompts": 256},
}
PASSED = GateResult(
    name="kl", metric="kl", outcome="pass", observed=0.0123, limit="at most 0.5", sentence="kl is 0.0123, at most 0.5."
)
UNKNOWN = GateResult(
    name="reward",
    metric="mean_reward",
    outcome="inconclusive",
    observed=None,
    limit="at least 0",
    sentence="not measured.",
)


def test_table_shows_each_model_and_a_dash_where_nothing_was_measured():
    rows = {row[0]: row[1:] for row in report.table(METRICS)}
    assert (rows["greedy accuracy"], rows["KL per token, nats (to base / to SFT)"]) == (
        ["0.0%", "25.0%", "75.5%"],
        ["–", "1.5000", "0.0123"],
    )


def test_gate_rows_show_outcome_value_and_limit():
    verdict = Verdict(passed=False, gates=[PASSED, UNKNOWN])
    assert report.gate_rows(verdict) == [
        ["kl", "passed", "0.0123", "at most 0.5"],
        ["reward", "inconclusive", "–", "at least 0"],
    ]


def test_markdown_says_the_verdict_first_and_each_sentence():
    text = report.markdown(METRICS, Verdict(passed=False, gates=[UNKNOWN]))
    assert (text.splitlines()[0], "- not measured." in text) == ("## Rejected: not every gate says yes", True)


def test_log_line_is_the_texts():
    event = {
        "step": 100,
        "max_steps": 500,
        "epoch": 0.4,
        "num_epochs": 2,
        "reward": 0.45,
        "kl_k3": 0.023,
        "loss": 1.234,
    }
    assert line(event) == "epoch 1/2 | step 100/500 | reward 0.45 | kl 0.023 | loss 1.234"


def test_log_line_of_sft_has_the_loss_alone():
    assert (
        line({"step": 7, "max_steps": 7, "epoch": 2.0, "num_epochs": 2, "loss": 0.5})
        == "epoch 2/2 | step 7/7 | loss 0.5"
    )


def test_intervals_stand_behind_their_values():
    found = {"grpo": {"accuracy": 0.755, "intervals": {"accuracy": [0.7, 0.8]}}}
    assert {row[0]: row[3] for row in report.table(found)}["greedy accuracy"] == "75.5% (70.0% to 80.0%)"


def test_the_champion_has_a_column_where_it_was_measured():
    assert report.columns(METRICS) == ["base", "SFT", "GRPO"]
    with_champion = {**METRICS, "champion": {"accuracy": 0.5}}
    assert report.columns(with_champion) == ["base", "SFT", "GRPO", "champion"]
    assert report.table(with_champion)[0] == ["greedy accuracy", "0.0%", "25.0%", "75.5%", "50.0%"]


def test_samples_components_and_further_sets_have_rows_of_their_own():
    found = {
        "grpo": {
            "pass_at_10": 0.9,
            "pass_at_2": 0.5,
            "rewards/step": 0.25,
            "hard/accuracy": 0.125,
            "hard/rewards/step": 0.5,
            "arc/acc_norm": 0.3,
        }
    }
    assert [(row[0], row[3]) for row in report.table(found)[8:]] == [
        ("pass@2", "50.0%"),
        ("pass@10", "90.0%"),
        ("reward component step", "0.250"),
        ("arc: acc_norm", "0.3"),
        ("hard: greedy accuracy", "12.5%"),
        ("hard: reward component step", "0.500"),
    ]


def test_errors_are_counted_per_model():
    found = {"sft": {"errors": {"truncated": 3, "no_answer": 1}}, "grpo": {"errors": {"truncated": 0, "no_answer": 2}}}
    assert report.error_rows(found)[0] == ["cut off at max_new_tokens", "–", "3", "0"]
    assert report.error_rows(found)[2] == ["no answer", "–", "1", "2"]


def test_categories_are_shown_where_the_data_has_them():
    found = {"grpo": {"categories": {"algebra": {"accuracy": 0.5, "interval": [0.25, 0.75], "num_prompts": 8}}}}
    assert report.category_rows(found) == [["algebra", "8", "–", "–", "50.0% (25.0% to 75.0%)"]]
    assert report.category_rows(METRICS) == []


def test_comparisons_say_what_was_fixed_and_how_sure_that_is():
    compared = Comparison(rival="sft", differences={"accuracy": (0.2, 0.1, 0.3)}, fixed=25, broken=5, p_value=0.000325)
    text = report.markdown(METRICS, Verdict(passed=True, gates=[PASSED]), [compared])
    assert "### GRPO against SFT, on the same prompts" in text
    assert "| greedy accuracy | +0.2 | +0.1 to +0.3 |" in text
    assert "25 fixed, 5 broken; McNemar's exact test of accuracy: p = 0.000325." in text
