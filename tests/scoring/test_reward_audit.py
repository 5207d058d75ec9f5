import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loading import load
from configs.schema import DataSection, RewardComponent, RewardConfig
from tasks.core.data import prepare
from tasks.core.execution.preflight import check
from tasks.core.scoring import reward_audit, rewards
from tasks.core.scoring.reward_audit import Sample

ROWS = [
    Sample(
        f"What is {n} + {n}?",
        str(2 * n),
        f"{n} + {n} = {2 * n}. Final Answer: {2 * n}",
        {"id": f"train-{n}", "question": "?"},
    )
    for n in range(1, 5)
]


def combined(*types: str, **settings) -> rewards.Reward:
    components = [RewardComponent(type=t, **(settings if t == types[-1] else {})) for t in types]
    return rewards.build("combined", RewardConfig(components=components))


def test_accuracy_passes_with_its_means():
    assert reward_audit.audit(rewards.build("accuracy", RewardConfig()), ROWS) == {
        "the gold demonstration": 1.0,
        "an empty completion": 0.0,
        "the prompt repeated": 0.0,
        "another row's answer": 0.0,
        "a completion of 2,000 newlines": 0.0,
    }


@pytest.mark.parametrize("reward_type", ["length_penalty", "step", "format"])
def test_each_term_passes_beside_accuracy(reward_type):
    assert (
        reward_audit.audit(rewards.build(reward_type, RewardConfig(target_length=5)), ROWS)["the gold demonstration"]
        > 0
    )


def test_the_shipped_presets_pass(tmp_path):
    prepare.prepare(DataSection(arithmetic={"demonstrations": 200}), 1, tmp_path)
    for preset in ("tiny", "gsm8k-smollm2", "gsm8k-qwen3-0.6b"):
        grpo = load(preset, {"data.path": "x"} if preset != "tiny" else {}).grpo
        assert (
            reward_audit.audit(rewards.build(grpo.reward_type, grpo.reward_config), reward_audit.samples(tmp_path))[
                "the gold demonstration"
            ]
            > 0
        )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "[1 / (1 + len(c)) for c in completions]",
            "ranks an empty completion above the gold demonstration: 1 against 0.0",
        ),
        (
            "[c.count(chr(10)) / 100 for c in completions]",
            "ranks a completion of 2,000 newlines above the gold demonstration: 20 against 0 ",
        ),
        (
            "[float(c.endswith('?')) for c in completions]",
            "ranks the prompt repeated above the gold demonstration: 1 against 0 ",
        ),
        (
            "[float('Final' in c and g not in c) for c, g in zip(completions, gold)]",
            "ranks another row's answer above the gold demonstration: 1 against 0 ",
        ),
        ("[1.0 for c in completions]", "is 1 for every completion of the reward audit"),
        ("[None for c in completions]", "is 0 for every completion of the reward audit"),
    ],
)
def test_a_reward_that_ranks_something_above_the_gold_one_is_refused(user_module, code, message):
    user_module(f"def score(completions, gold, prompts):\n    return {code}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        reward_audit.audit(rewards.build("my_rewards:score", RewardConfig()), ROWS)
    assert str(caught.value).startswith("the reward (1 score) ")


def test_a_single_row_that_is_ranked_wrongly_is_enough_and_named(user_module):
    user_module(
        "def score(completions, gold):\n    return [float(g in c) if g != '6' else float(c == '') for c, g in zip(completions, gold)]\n"
    )
    with pytest.raises(ConfigError, match=r"for 'What is 3 \+ 3\?' with the gold answer 6, and so in 1 of 4 rows"):
        reward_audit.audit(rewards.build("my_rewards:score", RewardConfig()), ROWS)


def test_a_length_penalty_alone_is_refused_where_demonstrations_are_longer_than_its_target():
    with pytest.raises(ConfigError, match="ranks an empty completion above the gold demonstration: 0 against -1"):
        reward_audit.audit(combined("length_penalty", target_length=2), ROWS)


def test_rows_of_one_answer_have_no_other_rows_answer():
    same = [Sample(s.prompt, "2", "Final Answer: 2", s.columns) for s in ROWS]
    assert "another row's answer" not in reward_audit.audit(rewards.build("accuracy", RewardConfig()), same)


def test_a_function_gets_the_prompts_and_columns_of_its_rows(user_module):
    user_module(
        "def score(completions, prompts, id, question):\n    return [float(c != '' and i[6:] in p) for c, p, i in zip(completions, prompts, id)]\n"
    )
    assert reward_audit.audit(rewards.build("my_rewards:score", RewardConfig()), ROWS)["an empty completion"] == 0.0


def prepared(tmp_path: Path, rows: list[dict], **section) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare.prepare(
        DataSection(path=str(tmp_path / "rows.jsonl"), validation_size=1, test_size=1, **section), 1, tmp_path / "out"
    )
    return tmp_path / "out"


def test_samples_are_the_same_every_time_and_demonstrations_are_right(tmp_path):
    prepare.prepare(DataSection(), 1, tmp_path)
    found = reward_audit.samples(tmp_path)
    assert (len(found), found) == (16, reward_audit.samples(tmp_path))
    accuracy = rewards.build("accuracy", RewardConfig())
    assert [
        row["accuracy"] for row in accuracy.score([s.demonstration for s in found], [s.gold for s in found], [9] * 16)
    ] == [1.0] * 16


def test_a_worked_demonstration_is_taken_and_one_is_made_where_there_is_none(tmp_path):
    folder = prepared(
        tmp_path, [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(5)]
    )
    (folder / "sft.jsonl").write_text((folder / "sft.jsonl").read_text().splitlines(keepends=True)[0])
    texts = sorted(len(s.demonstration.splitlines()) for s in reward_audit.samples(folder))
    assert texts == [1, 1, 2]
    assert {s.prompt[1:] for s in reward_audit.samples(folder)} == {" + 1?"}


def test_check_refuses_what_the_audit_refuses_and_prints_its_means(user_module):
    user_module("def score(completions):\n    return [-float(len(c)) for c in completions]\n")
    config = {"data.arithmetic.demonstrations": 100, "compute.device": "cpu"}
    with pytest.raises(ConfigError, match="ranks an empty completion above the gold demonstration"):
        check(load("tiny", {**config, "grpo.reward_type": "my_rewards:score"}))
    (line,) = [line for line in check(load("tiny", config)) if line.startswith("reward: ")]
    assert line.startswith(
        "reward: on average the gold demonstration is worth 1; an empty completion is worth 0; "
        "the prompt repeated is worth 0; another row's answer is worth 0; "
    )
