import re

import pytest
from paths import ROOT

from configs.errors import ConfigError
from configs.loading import load
from configs.rules import rewards as rules_rewards
from configs.schema import GRPOSection, RewardComponent, RewardConfig
from tasks.core.scoring import rewards

# The worked example of the text: one question, four answers.
ANSWERS = [
    "48 + 24 = 72. Final Answer: 72",
    "48 + 24 = 72. Final Answer: 72",
    "48 + 24 = 70. Final Answer: 70",
    "Let me think... 72. Final Answer: 72",
]


def test_worked_example_verdicts():
    scores = rewards.build("accuracy", RewardConfig()).score(ANSWERS, ["72"] * 4, [10, 10, 10, 10])
    assert [row["accuracy"] == 1.0 for row in scores] == [True, True, False, True]


def test_worked_example_with_length_penalty():
    # The fourth is 40 % over the target: 1 - 0.5 * 0.4 = 0.8, as in the text.
    reward = rewards.build("length_penalty", RewardConfig(target_length=10, weight=0.5))
    scores = reward.score(ANSWERS, ["72"] * 4, [10, 10, 10, 14])
    assert [row["total"] for row in scores] == [1.0, 1.0, 0.0, 0.8]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("48 + 24 = 72. Final Answer: 72", 1),
        ("She sold 48/2 = 24. Then 48 + 24 = 72.", 2),
        ("1. Halve the clips\n2. Add them", 2),
        ("Step 1: halve. Step 2: add.", 2),
        ("Step 1:\nStep 2:\n\n", 0),
        ("48 + 24 = 72\n48 + 24 = 72\n48  + 24 = 72.", 1),
        ("1. Add\n2. Add\n3. add.", 1),
        ("5 = 5. x = y. = 3", 0),
        ("1 = 2. 3 = 4. x = 5", 0),
        ("1. 1\n2. 2\n3. 3", 0),
        ("1. ...\n2. --\n3. !", 0),
        ("**Step 1:** Halve the clips.\n**Step 2**: Add them.", 2),
        ("- 1) Halve\n- 2) Add", 2),
        ("12 x 3 = 36\n\\frac{36}{2} = 18", 2),
        ("\n" * 2000, 0),
        ("Let me think about it.", 0),
        ("", 0),
    ],
)
def test_counted_steps(text, steps):
    assert rewards.count_steps(text) == steps


def test_steps_are_paid_up_to_the_limit_and_only_with_the_right_answer():
    right = "1 + 1 = 2. 2 + 2 = 4. 4 + 4 = 8. Final Answer: 8"
    reward = rewards.build("step", RewardConfig(step_bonus=0.1, max_steps=2, weight=0.5))
    scores = reward.score([right, right], ["8", "9"], [20, 20])
    assert [row["step"] for row in scores] == [0.2, 0.0]
    assert [row["total"] for row in scores] == [1.1, 0.0]


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (200, 0.0), (250, -0.25), (400, -1.0), (5000, -1.0)])
def test_length_penalty(length, value):
    config = RewardConfig(components=[RewardComponent(type="length_penalty", target_length=200)])
    assert rewards.build("combined", config).score(["text"], ["72"], [length])[0]["length_penalty"] == value


@pytest.mark.parametrize(
    ("reward_type", "weights"),
    [
        ("accuracy", {"accuracy": 1.0}),
        ("length_penalty", {"accuracy": 1.0, "length_penalty": 0.25}),
        ("step", {"accuracy": 1.0, "step": 0.25}),
        ("format", {"accuracy": 1.0, "format": 0.25}),
    ],
)
def test_weights_of_the_simple_types(reward_type, weights):
    reward = rewards.build(reward_type, RewardConfig(weight=0.25))
    assert reward.weights == weights
    assert [f.__name__ for f in reward.functions] == list(weights)
    # What gates may name, without the functions at hand.
    assert rules_rewards.reward_names(GRPOSection(reward_type=reward_type)) == list(weights)


def test_the_combined_reward_of_the_text():
    components = [
        RewardComponent(type="accuracy", weight=1.0),
        RewardComponent(type="length_penalty", weight=0.5, target_length=200),
        RewardComponent(type="step", weight=0.3, step_bonus=0.1),
    ]
    reward = rewards.build("combined", RewardConfig(components=components))
    row = reward.score(["48/2 = 24. 48 + 24 = 72. Final Answer: 72"], ["72"], [300])[0]
    assert row == {"total": pytest.approx(1.0 - 0.25 + 0.06), "accuracy": 1.0, "length_penalty": -0.5, "step": 0.2}


def test_functions_take_what_trl_gives():
    reward = rewards.build("length_penalty", RewardConfig(target_length=2))
    columns = {"gold": ["72"], "id": ["a"], "question": ["?"], "trainer_state": object()}
    values = [
        f(prompts=["p"], completions=["Final Answer: 72"], completion_ids=[[1, 2, 3]], **columns)
        for f in reward.functions
    ]
    assert values == [[1.0], [-0.5]]


def test_two_components_of_one_name_are_refused():
    config = RewardConfig(components=[RewardComponent(type="step"), RewardComponent(type="step", step_bonus=0.5)])
    with pytest.raises(ConfigError, match="has 2 components named step"):
        rewards.build("combined", config)


def test_combined_without_components_is_refused():
    with pytest.raises(ConfigError, match="components is empty"):
        rewards.build("combined", RewardConfig())


def test_steps_are_paid_with_a_wrong_answer_where_the_config_says_so():
    config = RewardConfig(
        components=[RewardComponent(type="accuracy"), RewardComponent(type="step", only_right=False, weight=0.5)]
    )
    assert rewards.build("combined", config).score(["1 + 1 = 2. Final Answer: 3"], ["2"], [9]) == [
        {"total": 0.05, "accuracy": 0.0, "step": 0.1}
    ]


def test_repeated_and_blank_lines_earn_no_steps():
    reward = rewards.build("step", RewardConfig(weight=1))
    once, often = "48 + 24 = 72\nFinal Answer: 72", "48 + 24 = 72\n\n" * 500 + "\n" * 500 + "Final Answer: 72"
    assert [row["step"] for row in reward.score([once, often], ["72", "72"], [9, 9])] == [0.1, 0.1]


@pytest.mark.parametrize(("unit", "value"), [("tokens", 0.0), ("characters", -0.5)])
def test_length_is_counted_in_tokens_unless_told_characters(unit, value):
    config = RewardConfig(components=[RewardComponent(type="length_penalty", target_length=20, length_unit=unit)])
    assert rewards.build("combined", config).score(["x" * 30], ["72"], [3])[0]["length_penalty"] == value


def test_the_last_number_counts_where_the_config_allows_it():
    text = "48 + 24 makes 72"
    assert [
        rewards.build("accuracy", RewardConfig(last_number=on)).score([text], ["72"], [5])[0]["accuracy"]
        for on in (False, True)
    ] == [0.0, 1.0]
    assert [rewards.build("accuracy", RewardConfig(last_number=on)).answer(text) for on in (False, True)] == [
        None,
        "72",
    ]


def test_weights_are_applied_once_and_components_stay_unweighted():
    components = [
        RewardComponent(type="accuracy", weight=2.0),
        RewardComponent(type="format", weight=0.25),
        RewardComponent(type="step", weight=0.0),
    ]
    row = rewards.build("combined", RewardConfig(components=components)).score(
        ["1 + 1 = 2. Final Answer: 2"], ["2"], [9]
    )[0]
    assert row == {"total": 2.25, "accuracy": 1.0, "format": 1.0, "step": 0.1}


def terms(*given: dict) -> dict:
    return {"grpo": {"reward_type": "combined", "reward_config": {"components": list(given)}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"grpo": {"reward_type": "length_penalty", "reward_config": {"weight": 1.0}}},
            r"lets length_penalty \(1\) move a completion by 1, and accuracy is worth 1",
        ),
        (
            {"grpo": {"reward_type": "format", "reward_config": {"weight": 2}}},
            r"lets format \(2\) move a completion by 2",
        ),
        (
            terms({"type": "accuracy"}, {"type": "length_penalty", "weight": 0.6}, {"type": "format", "weight": 0.5}),
            r"lets length_penalty \(0.6\) and format \(0.5\) move a completion by 1.1",
        ),
        (
            terms({"type": "accuracy"}, {"type": "step", "only_right": False, "step_bonus": 0.5}),
            r"lets step \(2.5\) move a completion by 2.5",
        ),
        (terms({"type": "accuracy", "weight": -1}), "gives accuracy the weight -1"),
        (
            terms({"type": "accuracy"}, {"type": "length_penalty", "weight": -0.1}),
            "gives length_penalty the weight -0.1",
        ),
    ],
)
def test_terms_that_could_drown_accuracy_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        load(config)


@pytest.mark.parametrize(
    "config",
    [
        {"grpo": {"reward_type": "step", "reward_config": {"weight": 5}}},
        terms({"type": "accuracy"}, {"type": "length_penalty", "weight": 0.99}),
        terms({"type": "accuracy", "weight": 0}, {"type": "format"}, {"type": "my_rewards:score", "weight": -3}),
        terms(
            {"type": "accuracy"},
            {"type": "length_penalty", "weight": 0.5, "target_length": 200},
            {"type": "step", "weight": 0.3, "step_bonus": 0.1},
        ),
    ],
)
def test_terms_that_cannot_drown_accuracy_are_not(config):
    assert load(config).grpo.reward_type == config["grpo"]["reward_type"]


# docs/rewards.md: four answers of the text, 10, 10, 10 and 14 tokens long, with every component's value.
TABLE = RewardConfig(
    components=[
        RewardComponent(type="accuracy", weight=1.0),
        RewardComponent(type="length_penalty", weight=0.5, target_length=10),
        RewardComponent(type="step", weight=0.3, step_bonus=0.1),
        RewardComponent(type="format", weight=0.0),
    ]
)


def test_the_table_of_the_docs_is_what_the_rewards_say():
    page = (ROOT / "docs/rewards.md").read_text()
    rows = [
        re.findall(r"`([^`]*)`|(-?[0-9.]+)", line)
        for line in page.splitlines()
        if line.startswith("| `") and "Final Answer" in line and line.count("|") == 8
    ]
    told = [[text or float(number) for text, number in row] for row in rows]
    scores = rewards.build("combined", TABLE).score(ANSWERS, ["72"] * 4, [10, 10, 10, 14])
    computed = [[text, n, *(pytest.approx(row[name]) for name in ("accuracy", "length_penalty", "step", "format", "total"))]
                for text, n, row in zip(ANSWERS, [10, 10, 10, 14], scores, strict=True)]  # fmt: skip
    assert told == computed
