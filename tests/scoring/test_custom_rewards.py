import asyncio
import sys

import pytest

from configs.errors import ConfigError, StageFailed
from configs.schema import RewardComponent, RewardConfig
from tasks.core.scoring import rewards


def test_a_function_of_the_users_gets_the_columns_it_names(user_module):
    user_module(
        "def shorter(completions, gold, question):\n    return [len(q) - len(c) if g == '72' else None for c, g, q in zip(completions, gold, question)]\n"
    )
    reward = rewards.build("my_rewards:shorter", RewardConfig())
    assert reward.weights == {"shorter": 1.0}
    scores = reward.score(["ab", "ab"], ["72", "73"], [1, 1], {"question": ["abc", "abc"], "id": ["1", "2"]})
    assert scores == [{"total": 1.0, "shorter": 1.0}, {"total": 0.0, "shorter": None}]


def test_a_function_with_two_names_is_known_by_the_one_it_was_asked_for(user_module):
    user_module("def score(completions):\n    return [1.0] * len(completions)\nagain = score\n")
    assert rewards.build("my_rewards:again", RewardConfig()).weights == {"again": 1.0}


def test_a_function_of_the_users_in_a_combined_reward(user_module):
    user_module("def polite(prompts, completions, **columns):\n    return [float('please' in p) for p in prompts]\n")
    config = RewardConfig(
        components=[RewardComponent(type="accuracy"), RewardComponent(type="my_rewards:polite", weight=2)]
    )
    scores = rewards.build("combined", config).score(["Final Answer: 72"], ["72"], [3], {"prompts": ["please add"]})
    assert scores == [{"total": 3.0, "accuracy": 1.0, "polite": 1.0}]


@pytest.mark.parametrize(
    ("code", "spec", "message"),
    [
        ("", "no_such_module_here:f", "cannot be imported"),
        ("1 / 0", "my_rewards:f", "cannot be imported \\(ZeroDivisionError"),
        ("raise SystemExit(3)", "my_rewards:f", "cannot be imported \\(SystemExit: 3\\)"),
        ("", "my_rewards:f", "my_rewards has no f"),
        ("f = 3", "my_rewards:f", "is int and must be a function: write it as `def f"),
        ("class f: pass", "my_rewards:f", "is type and must be a function"),
        (
            "f = lambda completions: [1.0]",
            "my_rewards:f",
            "is a lambda, whose name <lambda> is none that a metric could have: write it as `def f",
        ),
        ("def total(completions): return [1.0]", "my_rewards:total", "is named total"),
        ("def f(completions): yield 1.0", "my_rewards:f", "yields its values"),
        ("async def f(completions): yield 1.0", "my_rewards:f", "yields its values"),
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
        ("[1.0, 10**400]", "returned 10{99} for completion 1"),
        ("(1.0, 1.0)", "returned tuple"),
        ("None", "returned NoneType"),
        ("[[1.0], 1.0]", r"returned \[1.0\] for completion 0"),
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
    alone, combined = (
        rewards.source_digest("my_rewards:f", RewardConfig()),
        rewards.source_digest("combined", component),
    )
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
    with pytest.raises(
        ConfigError,
        match=r"^the reward my_rewards:f asks for completion, answer, and what there is are prompts, completions, .*: name these",
    ):
        rewards.build("my_rewards:f", RewardConfig()).score(["a"], ["1"], [1])


def test_further_columns_of_the_data_reach_the_function(user_module):
    user_module("def f(completions, level): return [float(n) for n in level]\n")
    scores = rewards.build("my_rewards:f", RewardConfig()).score(["a", "b"], ["1", "2"], [1, 1], {"level": [3, 4]})
    assert [row["total"] for row in scores] == [3.0, 4.0]


def test_what_a_function_raises_is_one_sentence_with_its_place(user_module):
    user_module("def f(completions):\n    return [1 / 0]\n")
    with pytest.raises(
        StageFailed,
        match=r"^the reward my_rewards:f raised ZeroDivisionError: division by zero \(my_rewards.py line 2\)$",
    ):
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


def test_a_function_that_empties_a_mapping_of_its_row_leaves_the_callers_alone(user_module):
    user_module(
        "def f(completions, metadata):\n    metadata[0]['steps'][0].clear()\n    metadata[0].clear()\n    return [1.0]\n"
    )
    columns = {"metadata": [{"steps": [[1, 2]]}]}
    rewards.build("my_rewards:f", RewardConfig()).score(["72"], ["72"], [1], columns)
    assert columns == {"metadata": [{"steps": [[1, 2]]}]}


def test_digest_of_a_module_that_is_not_there():
    with pytest.raises(ConfigError, match="the reward no_such_module_here:f cannot be imported"):
        rewards.source_digest("no_such_module_here:f", RewardConfig())


def test_a_value_that_is_no_reward_is_named_with_its_row(user_module):
    user_module("def f(completions, id):\n    return [1.0, float('nan')]\n")
    reward = rewards.build("my_rewards:f", RewardConfig())
    with pytest.raises(
        ConfigError,
        match=r"^the reward my_rewards:f returned nan for completion 1 \(row train-8\): return a finite number, or None",
    ):
        reward.score(["a", "b"], ["1", "2"], [1, 1], {"id": ["train-7", "train-8"]})


ASYNC = """
import asyncio

async def f(completions, gold, id):
    await asyncio.sleep(0)
    return [float(len(c) + len(g) + len(i)) for c, g, i in zip(completions, gold, id)]
"""


def test_an_async_function_is_awaited(user_module):
    user_module(ASYNC)
    scores = rewards.build("my_rewards:f", RewardConfig()).score(["a", "bb"], ["1", "2"], [1, 1], {"id": ["x", "y"]})
    assert scores == [{"total": 3.0, "f": 3.0}, {"total": 4.0, "f": 4.0}]


def test_an_async_function_is_awaited_where_a_loop_runs_already(user_module):
    user_module(ASYNC)
    reward = rewards.build("my_rewards:f", RewardConfig())

    async def score():
        return reward.score(["a"], ["1"], [1], {"id": ["x"]})

    assert asyncio.run(score()) == [{"total": 3.0, "f": 3.0}]


def test_what_an_async_function_raises_is_one_sentence_with_its_place(user_module):
    user_module("async def f(completions):\n    return [1 / 0]\n")
    with pytest.raises(
        StageFailed,
        match=r"^the reward my_rewards:f raised ZeroDivisionError: division by zero \(my_rewards.py line 2\)$",
    ):
        rewards.build("my_rewards:f", RewardConfig()).score(["a"], ["1"], [1])


def test_a_function_gets_all_columns(user_module):
    user_module("seen = {}\ndef f(completions, **columns):\n    seen.update(columns)\n    return [None]\n")
    row = rewards.build("my_rewards:f", RewardConfig()).score(
        ["a"], ["1"], [2], {"prompts": ["p"], "id": ["x"], "question": ["q"], "category": ["c"]}
    )
    assert row == [{"total": 0.0, "f": None}]
    seen = sys.modules["my_rewards"].seen
    assert {name: list(value) if name != "completion_ids" else [len(v) for v in value] for name, value in seen.items()} == {
        "prompts": ["p"], "gold": ["1"], "completion_ids": [2], "id": ["x"], "question": ["q"], "category": ["c"],
    }  # fmt: skip
