import sys
from fractions import Fraction

import pytest

from configs.errors import ConfigError, StageFailed
from configs.schema import RewardComponent, RewardConfig
from tasks.core import answers, rewards


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module of the user's that can be imported as my_rewards."""

    def write(code: str) -> None:
        (tmp_path / "my_rewards.py").write_text(code)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    yield write
    sys.modules.pop("my_rewards", None)


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
    ("text", "answer"),
    [
        ("48 + 24 = 72. Final Answer: 72", "72"),
        ("Final Answer: 71\nNo, wait.\nFinal Answer: 72", "72"),
        ("**Final Answer:** 72", "72"),
        ("Final answer:\n\n72\nbecause", "72"),
        ("Final Answer: $\\boxed{72}$", "72"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{a{b{c}}d}", "a{b{c}}d"),
        ("worked\n#### 72", "72"),
        ("#### 71 \\boxed{72}", "72"),
        ("\\boxed{71} Final Answer: 72", "72"),
        ("the result is 72", None),
        ("", None),
        ("Final Answer:", None),
        ("Final Answer: 72\nFinal Answer:", None),
        ("\\boxed{72", None),
        ("####", None),
    ],
)
def test_extracted_answer(text, answer):
    assert answers.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 72. ", 72),
        ("1,080", 1080),
        ("109,200,000", 109200000),
        ("$18.50", Fraction(37, 2)),
        ("\\$18", 18),
        ("$72$", 72),
        ("-5", -5),
        ("−5", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("+5", 5),
        (".5", Fraction(1, 2)),
        ("50%", 50),
        ("50\\%", 50),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("72 clips", 72),
        ("72 clips altogether in April and May.", 72),
        ("5 km/h", 5),
        ("12 m²", 12),
        ("72\\text{ clips}", 72),
        ("72 or 73", None),
        ("72 apples or maybe more", None),
        ("72 not", None),
        ("72, 73", None),
        ("72 million", None),
        ("72k", None),
        ("7²", None),
        ("1,08", None),
        ("10,80", None),
        ("1/0", None),
        ("--5", None),
        ("1e5", None),
        ("seventy-two", None),
        ("48 + 24", None),
        ("nan", None),
        ("٧٢", None),
        ("", None),
        ("9" * 10_000, None),
    ],
)
def test_parsed_number(text, value):
    assert answers.parse_number(text) == value


@pytest.mark.parametrize(("text", "normal"), [("$1,080.", "1080"), ("-2.50", "-2.50"), ("+3/4", "3/4"), ("72 clips", "72"), ("50 %", "50"), ("many", None)])
def test_normal_number(text, normal):
    assert answers.normal_number(text) == normal


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("72", "72.0", True),
        ("0.75", "3/4", True),
        ("1,080", "$1080", True),
        ("72", "-72", False),
        ("72", "seventy-two", False),
        ("0.3333", "1/3", False),
        ("Blue  Whale.", "blue whale", True),
        ("blue", "whale", False),
        ("", "", False),
        (None, "72", False),
        (None, None, False),
    ],
)
def test_same_answer(a, b, same):
    assert answers.same_answer(a, b) is same
    assert answers.same_answer(b, a) is same


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 100_000,
        "\\boxed{" + "{" * 100_000,
        "Final Answer: " + "9" * 100_000,
        "Final Answer: " * 20_000,
        "final answer" + " " * 100_000,
        "Final Answer: 1/0",
        "Final Answer: " + "1," * 50_000,
        "Final Answer: " + "(" * 150,
        "=" * 100_000,
        "1 = " * 50_000,
        "# * > " * 20_000,
        "Step 1 " * 20_000,
        "." * 50_000 + " " * 50_000,
        "\x00\ud800 Final Answer: \ud800",
        "Final Answer: \u202e72",
    ],
)
def test_no_text_breaks_the_rewards(text):
    config = RewardConfig(components=[RewardComponent(type=t) for t in ("accuracy", "length_penalty", "step", "format")])
    row = rewards.build("combined", config).score([text], ["72"], [10])[0]
    assert row["accuracy"] == 0.0
    assert row["step"] == 0.0


@pytest.mark.parametrize(
    ("text", "formatted"), [("Final Answer: 72", True), ("final answer: 72", True), ("Final Answer:  ", False), ("\\boxed{72}", False), ("72", False)]
)
def test_is_formatted(text, formatted):
    assert answers.is_formatted(text) is formatted


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
    values = [f(prompts=["p"], completions=["Final Answer: 72"], completion_ids=[[1, 2, 3]], **columns) for f in reward.functions]
    assert values == [[1.0], [-0.5]]


def test_two_components_of_one_name_are_refused():
    config = RewardConfig(components=[RewardComponent(type="step"), RewardComponent(type="step", step_bonus=0.5)])
    with pytest.raises(ConfigError, match="has 2 components named step"):
        rewards.build("combined", config)


def test_combined_without_components_is_refused():
    with pytest.raises(ConfigError, match="components is empty"):
        rewards.build("combined", RewardConfig())


def test_a_function_of_the_users_gets_the_columns_it_names(user_module):
    user_module(
        "def shorter(completions, gold, question):\n    return [len(q) - len(c) if g == '72' else None for c, g, q in zip(completions, gold, question)]\n"
    )
    reward = rewards.build("my_rewards:shorter", RewardConfig())
    assert reward.weights == {"shorter": 1.0}
    scores = reward.score(["ab", "ab"], ["72", "73"], [1, 1], {"question": ["abc", "abc"], "id": ["1", "2"]})
    assert scores == [{"total": 1.0, "shorter": 1.0}, {"total": 0.0, "shorter": None}]


def test_a_function_of_the_users_in_a_combined_reward(user_module):
    user_module("def polite(prompts, completions, **columns):\n    return [float('please' in p) for p in prompts]\n")
    config = RewardConfig(components=[RewardComponent(type="accuracy"), RewardComponent(type="my_rewards:polite", weight=2)])
    scores = rewards.build("combined", config).score(["Final Answer: 72"], ["72"], [3], {"prompts": ["please add"]})
    assert scores == [{"total": 3.0, "accuracy": 1.0, "polite": 1.0}]


@pytest.mark.parametrize(
    ("code", "spec", "message"),
    [
        ("", "no_such_module_here:f", "cannot be imported"),
        ("1 / 0", "my_rewards:f", "cannot be imported \\(ZeroDivisionError"),
        ("raise SystemExit(3)", "my_rewards:f", "cannot be imported \\(SystemExit: 3\\)"),
        ("", "my_rewards:f", "my_rewards has no f"),
        ("f = 3", "my_rewards:f", "is no plain function"),
        ("f = lambda completions: [1.0]", "my_rewards:f", "is no plain function"),
        ("async def f(completions): return [1.0]", "my_rewards:f", "is no plain function"),
        ("def total(completions): return [1.0]", "my_rewards:total", "other than total"),
    ],
)
def test_what_is_no_reward_function_is_refused_when_built(user_module, code, spec, message):
    user_module(code)
    with pytest.raises(ConfigError, match=message) as caught:
        rewards.build(spec, RewardConfig())
    assert spec in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("1.0", "returned float"),
        ("[1.0]", "returned 1 values for 2 completions"),
        ("[1.0, 'good']", "returned 'good' for completion 1"),
        ("[1.0, float('nan')]", "returned nan for completion 1"),
        ("[float('inf'), 1.0]", "returned inf for completion 0"),
    ],
)
def test_what_a_function_returns_is_checked(user_module, returned, message):
    user_module(f"def f(completions):\n    return {returned}\n")
    reward = rewards.build("my_rewards:f", RewardConfig())
    with pytest.raises(ConfigError, match=message):
        reward.score(["a", "b"], ["1", "2"], [1, 1])


def test_digest_follows_the_code_of_the_users_rewards(user_module):
    component = RewardConfig(components=[RewardComponent(type="my_rewards:f")])
    user_module("raise RuntimeError('finding the file must not run it')\n")
    alone, combined = rewards.source_digest("my_rewards:f", RewardConfig()), rewards.source_digest("combined", component)
    assert alone == combined
    user_module("def f(completions): return [1.0]\n")
    assert rewards.source_digest("combined", component) != combined
    assert rewards.source_digest("accuracy", RewardConfig()) == ""


def test_digest_follows_the_modules_that_the_users_module_imports(user_module, tmp_path):
    user_module("import my_help\nimport torch\ndef f(completions): return [my_help.BAD]\n")
    (tmp_path / "my_help.py").write_text("BAD = 0.1\n")
    before = rewards.source_digest("my_rewards:f", RewardConfig())
    (tmp_path / "my_help.py").write_text("BAD = 0.3\n")
    assert rewards.source_digest("my_rewards:f", RewardConfig()) != before


def test_digest_of_a_function_in_an_installed_package_covers_the_package():
    assert rewards.source_digest("trl.rewards:think_format_reward", RewardConfig()) != ""


def test_arguments_that_nobody_gives_are_refused(user_module):
    user_module("def f(completion, answer): return 1.0\n")
    with pytest.raises(ConfigError, match=r"^the reward my_rewards:f asks for completion, answer, and what there is are prompts, completions, .*: name these"):
        rewards.build("my_rewards:f", RewardConfig())


def test_what_a_function_raises_is_one_sentence_with_its_place(user_module):
    user_module("def f(completions):\n    return [1 / 0]\n")
    with pytest.raises(StageFailed, match=r"^the reward my_rewards:f raised ZeroDivisionError: division by zero \(my_rewards.py line 2\)$"):
        rewards.build("my_rewards:f", RewardConfig()).score(["a"], ["1"], [1])


def test_a_function_that_exits_is_one_sentence_with_its_place(user_module):
    user_module("def f(completions):\n    raise SystemExit(3)\n")
    with pytest.raises(StageFailed, match=r"^the reward my_rewards:f raised SystemExit: 3 \(my_rewards.py line 2\)$"):
        rewards.build("my_rewards:f", RewardConfig()).score(["a"], ["1"], [1])


def test_a_function_that_empties_its_lists_leaves_the_callers_alone(user_module):
    user_module(
        "def f(completions, completion_ids, gold, id):\n    n = len(completions)\n    completion_ids[0].clear()\n"
        "    for given in (completions, completion_ids, gold, id):\n        given.clear()\n    return [1.0] * n\n"
    )
    given = {"completions": ["a", "b"], "completion_ids": [[1, 2], [3]], "gold": ["1", "2"], "id": ["x", "y"]}
    assert rewards.build("my_rewards:f", RewardConfig()).functions[0](prompts=["p", "q"], **given) == [1.0, 1.0]
    assert given == {"completions": ["a", "b"], "completion_ids": [[1, 2], [3]], "gold": ["1", "2"], "id": ["x", "y"]}


def test_digest_of_a_module_that_is_not_there():
    with pytest.raises(ConfigError, match="the reward no_such_module_here:f cannot be imported"):
        rewards.source_digest("no_such_module_here:f", RewardConfig())
