from tasks.core import report
from tasks.core.gates import GateResult, Verdict
from tasks.progress import line

METRICS = {
    "base": {"accuracy": 0.0, "num_prompts": 256},
    "sft": {"accuracy": 0.25, "kl": 1.5, "num_prompts": 256},
    "grpo": {"accuracy": 0.755, "kl": 0.0123, "num_prompts": 256},
}
PASSED = GateResult(name="kl", metric="kl", outcome="pass", observed=0.0123, limit="at most 0.5", sentence="kl is 0.0123, at most 0.5.")
UNKNOWN = GateResult(name="reward", metric="mean_reward", outcome="inconclusive", observed=None, limit="at least 0", sentence="not measured.")


def test_table_shows_each_model_and_a_dash_where_nothing_was_measured():
    rows = {row[0]: row[1:] for row in report.table(METRICS)}
    assert (rows["greedy accuracy"], rows["KL per token, nats (to base / to SFT)"]) == (["0.0%", "25.0%", "75.5%"], ["–", "1.5000", "0.0123"])


def test_gate_rows_show_outcome_value_and_limit():
    verdict = Verdict(passed=False, gates=[PASSED, UNKNOWN])
    assert report.gate_rows(verdict) == [["kl", "passed", "0.0123", "at most 0.5"], ["reward", "inconclusive", "–", "at least 0"]]


def test_markdown_says_the_verdict_first_and_each_sentence():
    text = report.markdown(METRICS, Verdict(passed=False, gates=[UNKNOWN]))
    assert (text.splitlines()[0], "- not measured." in text) == ("## Rejected: not every gate says yes", True)


def test_log_line_is_the_texts():
    event = {"step": 100, "max_steps": 500, "epoch": 0.4, "num_epochs": 2, "reward": 0.45, "kl_k3": 0.023, "loss": 1.234}
    assert line(event) == "epoch 1/2 | step 100/500 | reward 0.45 | kl 0.023 | loss 1.234"


def test_log_line_of_sft_has_the_loss_alone():
    assert line({"step": 7, "max_steps": 7, "epoch": 2.0, "num_epochs": 2, "loss": 0.5}) == "epoch 2/2 | step 7/7 | loss 0.5"
