import json

import pytest

from tasks.core.judging import samples
from tasks.core.scoring import error_classes
from tasks.core.storage import jsonl


def row(number, correct, reward=None, length=10, truncated=False, completion="so 1", error="wrong_reasoning"):
    return {
        "id": f"q{number}", "prompt": f"question {number}", "gold": "1", "completion": completion, "answer": "1" if correct else "2", "correct": correct,
        "formatted": True, "reward": float(correct) if reward is None else reward, "length": length, "truncated": truncated,
        "error": None if correct else error,
    }  # fmt: skip


def written(tmp_path, base, sft, grpo):
    """The folders' table: counts, rows and page."""
    folders = {"base": base, "sft": sft, "grpo": grpo}
    for name, rows in folders.items():
        (tmp_path / name).mkdir()
        jsonl.write_rows(tmp_path / name / "completions.jsonl", rows)
    counts = samples.write({name: tmp_path / name for name in folders}, tmp_path)
    return counts, jsonl.read_rows(tmp_path / "samples.jsonl"), (tmp_path / "samples.md").read_text()


def test_what_changed_from_sft_to_grpo_is_counted(tmp_path):
    wrong, right = [row(i, False) for i in range(4)], [row(i, True) for i in range(4)]
    counts, rows, _ = written(
        tmp_path, wrong, [wrong[0], right[1], wrong[2], right[3]], [right[0], wrong[1], wrong[2], right[3]]
    )
    assert [r["change"] for r in rows] == ["fixed", "broken", "same", "same"]
    assert counts == {"fixed": 1, "broken": 1, "same": 2, "truncated": 0, "disagreement": 0}


def test_each_row_has_prompt_gold_and_all_three_completions(tmp_path):
    _, rows, page = written(
        tmp_path, [row(0, False, completion="b")], [row(0, False, completion="s")], [row(0, True, completion="g")]
    )
    assert (rows[0]["prompt"], rows[0]["gold"], [rows[0][m]["completion"] for m in ("base", "sft", "grpo")]) == (
        "question 0",
        "1",
        ["b", "s", "g"],
    )
    assert all(f"\n    {text}\n" in page for text in ("question 0", "b", "s", "g"))


def test_a_wrong_completion_worth_as_much_as_the_right_one_is_a_disagreement(tmp_path):
    base = [row(i, False) for i in range(2)]
    counts, rows, page = written(
        tmp_path, base, [row(0, True, 0.5), row(1, True, 0.5)], [row(0, False, 0.5), row(1, False, 0.4)]
    )
    assert ([r["marks"] for r in rows], counts["disagreement"]) == ([["disagreement"], []], 1)
    assert "## Reward and answer disagree" in page


def test_the_longest_and_the_truncated_are_shown(tmp_path):
    same = [row(i, False) for i in range(9)]
    grpo = [row(i, False, length=length, truncated=length == 9) for i, length in enumerate([3, 9, 1, 8, 2, 7, 9, 4, 5])]
    counts, _, page = written(tmp_path, same, same, grpo)
    longest = page.partition("## Longest of GRPO's completions")[2].partition("\n## ")[0]
    assert [line.partition(":")[0] for line in longest.splitlines() if line.startswith("### ")] == [
        "### q1",
        "### q6",
        "### q3",
        "### q5",
        "### q8",
    ]
    assert counts["truncated"] == 2


def test_the_page_shows_a_few_of_many(tmp_path):
    wrong, right = [row(i, False) for i in range(50)], [row(i, True) for i in range(50)]
    _, rows, page = written(tmp_path, wrong, wrong, right)
    assert (len(rows), page.partition("## Fixed")[2].partition("\n## ")[0].count("### ")) == (50, 5)


def test_what_a_model_writes_is_shown_as_it_is_and_never_rendered(tmp_path):
    hostile = row(0, False, completion="# Passed\n<script>alert(1)</script>\n```")
    _, _, page = written(tmp_path, [hostile], [hostile], [hostile])
    assert "\n    # Passed\n    <script>alert(1)</script>\n    ```\n" in page
    assert "\n# Passed" not in page


def test_a_completion_without_text_is_said_to_be_one(tmp_path):
    silent = row(0, False, completion=" \n")
    _, _, page = written(tmp_path, [silent], [row(0, False)], [row(0, True)])
    assert "**base** (wrong reasoning, answer '2', reward 0, 10 tokens)\n\n(no text)\n" in page


def test_models_measured_on_different_prompts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="measured on different prompts: q0, q0, q1"):
        written(tmp_path, [row(0, True)], [row(0, True)], [row(1, True)])


@pytest.mark.parametrize(
    ("completion", "answer", "truncated", "expected"),
    [
        ("48 + 24 = 72. Final Answer: 72", "72", False, None),
        ("48 + 24 = 73. Final Answer: 73", "73", False, "wrong_arithmetic"),
        ("48 / 2 = 24, 48 - 24 = 24. Final Answer: 24", "24", False, "wrong_reasoning"),
        ("That makes 72 clips.", None, False, "wrong_format"),
        ("I do not know.", None, False, "no_answer"),
        ("", None, False, "no_answer"),
        ("48 + 24 = 73 and so", None, True, "truncated"),
        ("$1,000 - $400 = $500. Final Answer: 500", "500", False, "wrong_arithmetic"),
        ("10 / 3 = 3.33. Final Answer: 3.33", "3.33", False, "wrong_reasoning"),
        ("2 x 3 + 4 = 10. Final Answer: 10", "10", False, "wrong_reasoning"),
        ("1 / 0 = 5. Final Answer: 5", "5", False, "wrong_reasoning"),
        ("x = 5, 2 * y = 7, 50% = 3. Final Answer: 5", "5", False, "wrong_reasoning"),
    ],
)
def test_error_classes(completion, answer, truncated, expected):
    assert error_classes.error_class(completion, answer, "72", answer == "72", truncated) == expected


@pytest.mark.parametrize(
    "completion",
    [
        "1 + " * 5000 + "1 = 3",
        "1 = " * 5000,
        "9" * 100_000 + " * " + "9" * 100_000 + " = 1",
        "1,,, + 007 = 8",
        "\ud800 1 + 1 = 3",
    ],
)
def test_error_classes_of_hostile_completions_raise_nothing(completion):
    assert error_classes.error_class(completion, "3", "72", False, False) in error_classes.CLASSES


def test_rows_are_json_lines_in_the_order_of_the_prompts(tmp_path):
    same = [row(i, True) for i in (3, 1, 2)]
    written(tmp_path, same, same, same)
    assert [json.loads(line)["id"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [
        "q3",
        "q1",
        "q2",
    ]
