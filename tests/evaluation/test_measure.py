import json
import sys

import pytest
import tiny

from configs.errors import ConfigError, DataError
from configs.schema import DataSection, EvaluationSection, EvaluationSet, RewardConfig
from tasks.core.evaluation import generate, harness, metrics, sets
from tasks.core.evaluation import measure as measuring
from tasks.core.model import loading
from tasks.core.storage import jsonl

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


def measure(two_models, out, reference=True, emit=lambda **event: None, seed=1, **changed):
    data, policy, other = two_models
    out.mkdir(exist_ok=True)
    section = EvaluationSection(**{"max_new_tokens": 6, "batch_size": 5, "kl_samples": 8} | changed)
    chosen = other if reference else None
    return measuring.measure(
        section, "accuracy", RewardConfig(), tiny.MODEL, tiny.CPU, seed, policy, chosen, data, out, emit
    )


# ---------------------------------------------------------------- completions


def test_completions_end_with_the_first_end_of_text():
    assert generate.until_stop([5, 6, 1, 0, 0], [1]) == [5, 6, 1]
    assert generate.until_stop([5, 6, 7], [1, 2]) == [5, 6, 7]
    assert generate.until_stop([2, 6, 1], [1, 2]) == [2]


def test_greedy_completions_are_the_likeliest_token_each_time(pair):
    import torch

    found = generate.generate(pair[0], PROMPTS, stops=[1], pad_id=0, max_new_tokens=4, batch_size=3)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = list(prompt)
        for token in completion:
            with torch.no_grad():
                assert pair[0](torch.tensor([ids])).logits[0, -1].argmax().item() == token
            ids.append(token)


def test_completions_come_in_the_order_of_their_prompts(pair):
    alone = [generate.generate(pair[0], [prompt], [1], 0, 4, 1)[0] for prompt in PROMPTS]
    assert generate.generate(pair[0], PROMPTS, [1], 0, 4, 2) == alone


def test_sampling_takes_no_settings_from_the_models_own(pair):
    """A model that says top_k 1 would always write the same."""
    from transformers import GenerationConfig

    pair[0].generation_config = GenerationConfig(top_k=1, temperature=0.01, do_sample=True)
    found = generate.generate(pair[0], [[5, 6, 7]] * 30, [1], 0, 3, 30, temperature=1.0, seeds=list(range(30)))
    assert len({tuple(completion) for completion in found}) > 20


def test_every_token_that_the_model_declares_ends_a_completion(pair, two_models):
    from transformers import GenerationConfig

    tokenizer = loading.load_tokenizer(two_models[1], tiny.MODEL)
    pair[0].generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert loading.eos_ids(pair[0], tokenizer) == [tokenizer.eos_token_id, 7, 9]
    pair[0].generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    assert loading.eos_ids(pair[0], tokenizer) == [tokenizer.eos_token_id]


def test_rows_that_leave_the_batch_change_no_other_row(pair):
    """Stops are the tokens that come second in some completions: these rows leave early, and all are what they are alone."""
    prompts = [[i, i + 1, i + 2][: 1 + i % 3] for i in range(5, 45)]
    free = generate.generate(pair[0], prompts, [1], 0, 6, 40)
    stops = [1, *{c[1] for c in free[::3] if len(c) > 1}]
    together = generate.generate(pair[0], prompts, stops, 0, 6, 40)
    assert together == [generate.generate(pair[0], [p], stops, 0, 6, 1)[0] for p in prompts]
    assert len({len(c) for c in together}) > 1


def test_prompts_that_share_their_beginning_complete_as_they_do_alone(pair, monkeypatch):
    monkeypatch.setattr(generate, "AT_ONCE", 8)
    prompts = [[5, 6, 7, 8, *tail] for tail in ([9], [10, 11, 12], [13, 14], [15, 16, 17, 18, 19], [20])]
    alone = [generate.generate(pair[0], [p], [1], 0, 5, 1)[0] for p in prompts]
    assert generate.generate(pair[0], prompts, [1], 0, 5, 5) == alone


def test_a_prompt_that_begins_all_others_keeps_a_token_of_its_own(pair):
    prompts = [[5, 6], [5, 6, 7], [5, 6]]
    assert generate.generate(pair[0], prompts, [1], 0, 4, 3) == [
        generate.generate(pair[0], [p], [1], 0, 4, 1)[0] for p in prompts
    ]


def test_close_calls_are_made_once_more_alone(pair, monkeypatch):
    counts = generate.Counts()
    monkeypatch.setattr(generate, "CLOSE", float("inf"))
    found = generate.generate(pair[0], PROMPTS, [1], 0, 4, 4, counts=counts)
    assert (counts.alone, counts.tokens) == (4, sum(map(len, found)))
    monkeypatch.setattr(generate, "CLOSE", 0.0)
    generate.generate(pair[0], PROMPTS, [1], 0, 4, 4, counts=(none := generate.Counts()))
    assert none.alone == 0


def test_batched_completions_are_those_of_transformers_one_at_a_time(pair):
    import torch
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=5, eos_token_id=[1], pad_token_id=0, do_sample=False)
    for prompt, ours in zip(PROMPTS, generate.generate(pair[0], PROMPTS, [1], 0, 5, 4), strict=True):
        theirs = pair[0].generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            generation_config=config,
        )
        assert generate.until_stop(theirs[0, len(prompt) :].tolist(), [1]) == ours


def test_what_is_sampled_for_a_prompt_does_not_depend_on_its_batch(pair):
    seeds = [11, 12, 13, 14]
    together = generate.generate(pair[0], PROMPTS, [1], 0, 4, 4, temperature=1.0, seeds=seeds)
    assert together == [
        generate.generate(pair[0], [p], [1], 0, 4, 1, temperature=1.0, seeds=[s])[0]
        for p, s in zip(PROMPTS, seeds, strict=True)
    ]


# ---------------------------------------------------------------- samples and sets


def test_votes_are_counted_by_equality_of_answers():
    row = {"id": "a", "gold": "72"}
    found = measuring.tally(row, ["72", "72.0", "$72", "71", None, "71.0", "about 9"])
    assert (found["samples"], found["correct"], found["silent"]) == (7, 3, 1)
    assert found["answers"] == [
        {"answer": "72", "votes": 3, "correct": True},
        {"answer": "71", "votes": 2, "correct": False},
        {"answer": "about 9", "votes": 1, "correct": False},
    ]


def test_samples_give_pass_at_k_and_maj_at_k_and_their_rows(two_models, tmp_path):
    found = measure(two_models, tmp_path / "out", reference=False, max_samples=5, samples=4, k=[1, 4])
    assert {"pass_at_1", "pass_at_4", "maj_at_1", "maj_at_4"} <= found.keys()
    rows = jsonl.read_rows(tmp_path / "out" / "sampled.jsonl")
    assert [row["samples"] for row in rows] == [4] * 5
    assert all(row["silent"] + sum(a["votes"] for a in row["answers"]) == 4 for row in rows)


def test_samples_do_not_change_what_is_greedy(two_models, tmp_path):
    measure(two_models, tmp_path / "one", reference=False, max_samples=5)
    measure(two_models, tmp_path / "two", reference=False, max_samples=5, samples=2)
    assert (tmp_path / "one" / "completions.jsonl").read_bytes() == (
        tmp_path / "two" / "completions.jsonl"
    ).read_bytes()


def test_further_sets_have_metrics_and_completions_of_their_own(two_models, tmp_path):
    path = tmp_path / "hard.jsonl"
    path.write_text(
        '{"question": "1 + 1 = ?", "answer": "so #### 2", "category": "sums"}\n{"question": "2 + 2 = ?", "answer": "4", "category": "other"}\n'
    )
    sets = {"hard": {"path": str(path)}, "seen": {"split": "validation", "max_samples": 3}}
    found = measure(two_models, tmp_path / "out", reference=False, max_samples=4, sets=sets)
    assert (found["num_prompts"], found["hard/num_prompts"], found["seen/num_prompts"]) == (4, 2, 3)
    assert found["intervals"].keys() >= {"accuracy", "hard/accuracy", "seen/accuracy"}
    assert {name: one["num_prompts"] for name, one in found["sets"]["hard"]["categories"].items()} == {
        "other": 1,
        "sums": 1,
    }
    rows = jsonl.read_rows(tmp_path / "out" / "sets" / "hard" / "completions.jsonl")
    assert [(row["id"], row["gold"], row["prompt"]) for row in rows] == [
        ("hard-1", "2", "<|user|>1 + 1 = ?<|assistant|>"),
        ("hard-2", "4", "<|user|>2 + 2 = ?<|assistant|>"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"evaluation\.sets\.hard holds no prompts"),
        ("{", r"line 1 of evaluation\.sets\.hard is not valid JSON"),
        ('\n{"question": "?"}', r"line 2 of evaluation\.sets\.hard has no column answer \(data\.answer_column\)"),
        ('{"question": "?", "answer": "3 or 4"}', r"line 1 of evaluation\.sets\.hard has the gold answer '3 or 4'"),
        (
            '{"question": "?", "answer": "#### 3 or 4"}',
            r"line 1 of evaluation\.sets\.hard has the gold answer '3 or 4'",
        ),
    ],
)
def test_a_set_that_cannot_be_used_is_one_sentence(tmp_path, text, message):
    (tmp_path / "hard.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        sets.rows("hard", EvaluationSet(path=str(tmp_path / "hard.jsonl")), DataSection(), tmp_path, seed=1)


def test_a_set_is_asked_as_the_data_section_says(tmp_path):
    (tmp_path / "hard.jsonl").write_text('{"problem": "1 + 1", "final": 2, "topic": "sums", "level": 3}\n')
    columns = {"question_column": "problem", "gold_column": "final", "category_column": "topic", "columns": ["level"]}
    source = DataSection(**columns, prompt_template="Level {{ level }}: {{ question }}")
    assert sets.rows("hard", EvaluationSet(path=str(tmp_path / "hard.jsonl")), source, tmp_path, seed=1) == [
        {
            "id": "hard-1",
            "prompt": [{"role": "user", "content": "Level 3: 1 + 1"}],
            "question": "1 + 1",
            "gold": "2",
            "category": "sums",
            "level": 3,
        }
    ]


def test_a_sets_file_may_begin_with_the_mark_of_its_encoding(tmp_path):
    (tmp_path / "hard.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "7"}\r\n')
    (row,) = sets.rows("hard", EvaluationSet(path=str(tmp_path / "hard.jsonl")), DataSection(), tmp_path, seed=1)
    assert (row["question"], row["gold"]) == ("q", "7")


def test_a_sets_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^evaluation\.sets\.hard\.path is /no/where, and there is no such file: name a JSON Lines file",
    ):
        sets.digests({"hard": EvaluationSet(path="/no/where")})


def test_another_content_is_another_digest(tmp_path):
    file, seen = tmp_path / "hard.jsonl", []
    for text in ("a", "b"):
        file.write_text(text)
        seen.append(sets.digests({"hard": EvaluationSet(path=str(file)), "seen": EvaluationSet(split="test")}))
    assert seen[0].keys() == {"hard"} and seen[0] != seen[1]


def test_a_task_of_the_harness_without_the_harness_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        ConfigError,
        match=r"has the task arc_easy, which needs lm-evaluation-harness .*: pip install 'ratchet\[lm-eval\]'$",
    ):
        harness.evaluate(EvaluationSet(task="arc_easy"), None, None, 1, 1, tmp_path)


# ---------------------------------------------------------------- the artifact


def test_metrics_and_their_file(two_models, tmp_path):
    metrics = measure(two_models, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    names = {
        "accuracy",
        "mean_reward",
        "format_rate",
        "mean_length",
        "truncated_rate",
        "num_prompts",
        "rewards/accuracy",
        "kl",
        "kl_sequence",
    }
    names |= {"errors", "intervals"}
    assert metrics.keys() == names
    assert metrics["num_prompts"] == 24
    assert metrics["kl"] > 0


def test_without_a_reference_there_is_no_kl(two_models, tmp_path):
    assert not {"kl", "kl_sequence"} & measure(two_models, tmp_path / "out", reference=False).keys()


def test_completions_are_in_the_order_of_the_held_out_file(two_models, tmp_path):
    measure(two_models, tmp_path / "out")
    rows = jsonl.read_rows(tmp_path / "out" / "completions.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in jsonl.read_rows(two_models[0] / "test.jsonl")]
    assert rows[0]["prompt"] == "<|user|>1 + 1 = ?<|assistant|>"
    assert rows[0].keys() == {
        "id",
        "prompt",
        "gold",
        "completion",
        "answer",
        "correct",
        "formatted",
        "reward",
        "length",
        "truncated",
        "error",
    }


def test_the_same_arguments_give_the_same_bytes(two_models, tmp_path):
    measure(two_models, tmp_path / "one")
    measure(two_models, tmp_path / "two")
    for name in ("metrics.json", "completions.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_kl_temperature_and_seed_change_what_is_sampled(two_models, tmp_path):
    values = [
        measure(two_models, tmp_path / "out", **changed)["kl"] for changed in ({}, {"kl_temperature": 0.2}, {"seed": 2})
    ]
    assert len(set(values)) == 3


def test_max_samples_chooses_the_same_prompts_for_every_model(two_models, tmp_path):
    data, one, two = two_models
    ids = []
    for name, models_ in {"one": (data, one, two), "two": (data, two, one)}.items():
        assert measure(models_, tmp_path / name, max_samples=7)["num_prompts"] == 7
        ids.append([row["id"] for row in jsonl.read_rows(tmp_path / name / "completions.jsonl")])
    order = [row["id"] for row in jsonl.read_rows(data / "test.jsonl")]
    assert ids[0] == ids[1] == sorted(ids[0], key=order.index)


def test_progress_is_told(two_models, tmp_path):
    events = []
    measure(two_models, tmp_path / "out", reference=False, batch_size=10, emit=lambda **event: events.append(event))
    assert events == [{"event": "progress", "done": done, "total": 24} for done in (10, 20, 24)]


def test_held_out_prompts_that_leave_no_room_are_refused(two_models, tmp_path):
    takes = two_models_take(two_models)
    message = rf"more than 1 tokens, .*; the model takes {takes}, completions included: lower evaluation\.max_new_tokens \(or grpo\.max_new_tokens\), which"
    with pytest.raises(DataError, match=message):
        measure(two_models, tmp_path / "out", reference=False, max_new_tokens=takes - 1)


def two_models_take(two_models):
    return json.loads((two_models[1] / "config.json").read_text())["max_position_embeddings"]


def test_a_split_without_rows_is_one_sentence(two_models, tmp_path):
    (tmp_path / "validation.jsonl").write_text("")
    with pytest.raises(
        DataError,
        match=r"^evaluation\.split is validation, which holds no prompts: raise data\.validation_size or choose the other split$",
    ):
        measuring.held_out(EvaluationSection(split="validation"), tmp_path, seed=1)


def test_scores_and_their_means(two_models):
    from tasks.core.scoring import rewards

    tokenizer = loading.load_tokenizer(two_models[1], tiny.MODEL)
    texts = ["1 + 1 = 2. Final Answer: 2<|eos|>", "Final Answer: 9<|eos|>", "I am not", "#### 4<|eos|>"]
    rows = [{"id": str(i), "gold": gold, "question": "?"} for i, gold in enumerate(["2", "3", "4", "4"])]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    scored = measuring.score(
        rows, ["?"] * 4, ids, [tokenizer.eos_token_id], tokenizer, rewards.build("accuracy", RewardConfig())
    )
    assert [row["answer"] for row in scored] == ["2", "9", None, "4"]
    assert [row["correct"] for row in scored] == [True, False, False, True]
    assert [row["formatted"] for row in scored] == [True, True, False, False]
    assert [row["truncated"] for row in scored] == [False, False, True, False]
    assert scored[0]["completion"] == "1 + 1 = 2. Final Answer: 2"
    columns = metrics.Columns()
    columns.add(scored)
    found = metrics.summary(columns)
    assert found.pop("intervals").keys() == {
        "accuracy",
        "mean_reward",
        "format_rate",
        "mean_length",
        "truncated_rate",
        "rewards/accuracy",
    }
    assert found == {
        "accuracy": 0.5,
        "mean_reward": 0.5,
        "format_rate": 0.5,
        "mean_length": sum(map(len, ids)) / 4,
        "truncated_rate": 0.25,
        "num_prompts": 4,
        "rewards/accuracy": 0.5,
        "errors": {"truncated": 1, "wrong_format": 0, "no_answer": 0, "wrong_arithmetic": 0, "wrong_reasoning": 1},
    }
