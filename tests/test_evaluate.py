import json

import pytest
import tiny

from configs.errors import DataError
from configs.schema import EvaluationSection, RewardConfig
from tasks.core import evaluate, generate, metrics, models, trainer

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """(data, policy folder, reference folder): two models of different seeds with one tokenizer."""
    import torch

    torch.set_num_threads(2)
    folder = tmp_path_factory.mktemp("evaluate")
    data, first = tiny.build(folder / "one", seed=1)
    _, second = tiny.build(folder / "two", seed=2)
    return data, first / "model", second / "model"


@pytest.fixture(scope="module")
def pair(artifacts):
    """The two models themselves."""
    return tuple(models.load_policy(folder, tiny.MODEL, tiny.CPU, for_training=False) for folder in artifacts[1:])


def measure(artifacts, out, reference=True, emit=lambda **event: None, seed=1, **changed):
    data, policy, other = artifacts
    out.mkdir(exist_ok=True)
    section = EvaluationSection(**{"max_new_tokens": 6, "batch_size": 5, "kl_samples": 8} | changed)
    chosen = other if reference else None
    return evaluate.measure(section, "accuracy", RewardConfig(), tiny.MODEL, tiny.CPU, seed, policy, chosen, data, out, emit)


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


def test_every_token_that_the_model_declares_ends_a_completion(pair, artifacts):
    from transformers import GenerationConfig

    tokenizer = models.load_tokenizer(artifacts[1], tiny.MODEL)
    pair[0].generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert models.eos_ids(pair[0], tokenizer) == [tokenizer.eos_token_id, 7, 9]
    pair[0].generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    assert models.eos_ids(pair[0], tokenizer) == [tokenizer.eos_token_id]


# ---------------------------------------------------------------- the artifact


def test_metrics_and_their_file(artifacts, tmp_path):
    metrics = measure(artifacts, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    names = {"accuracy", "mean_reward", "format_rate", "mean_length", "truncated_rate", "num_prompts", "rewards/accuracy", "kl", "kl_sequence"}
    names |= {"errors", "intervals"}
    assert metrics.keys() == names
    assert metrics["num_prompts"] == 24
    assert metrics["kl"] > 0


def test_without_a_reference_there_is_no_kl(artifacts, tmp_path):
    assert not {"kl", "kl_sequence"} & measure(artifacts, tmp_path / "out", reference=False).keys()


def test_completions_are_in_the_order_of_the_held_out_file(artifacts, tmp_path):
    measure(artifacts, tmp_path / "out")
    rows = trainer.read_rows(tmp_path / "out" / "completions.jsonl")
    assert [row["id"] for row in rows] == [row["id"] for row in trainer.read_rows(artifacts[0] / "test.jsonl")]
    assert rows[0]["prompt"] == "<|user|>1 + 1 = ?<|assistant|>"
    assert rows[0].keys() == {"id", "prompt", "gold", "completion", "answer", "correct", "formatted", "reward", "length", "truncated", "error"}


def test_the_same_arguments_give_the_same_bytes(artifacts, tmp_path):
    measure(artifacts, tmp_path / "one")
    measure(artifacts, tmp_path / "two")
    for name in ("metrics.json", "completions.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_kl_temperature_and_seed_change_what_is_sampled(artifacts, tmp_path):
    values = [measure(artifacts, tmp_path / "out", **changed)["kl"] for changed in ({}, {"kl_temperature": 0.2}, {"seed": 2})]
    assert len(set(values)) == 3


def test_max_samples_chooses_the_same_prompts_for_every_model(artifacts, tmp_path):
    data, one, two = artifacts
    ids = []
    for name, models_ in {"one": (data, one, two), "two": (data, two, one)}.items():
        assert measure(models_, tmp_path / name, max_samples=7)["num_prompts"] == 7
        ids.append([row["id"] for row in trainer.read_rows(tmp_path / name / "completions.jsonl")])
    order = [row["id"] for row in trainer.read_rows(data / "test.jsonl")]
    assert ids[0] == ids[1] == sorted(ids[0], key=order.index)


def test_progress_is_told(artifacts, tmp_path):
    events = []
    measure(artifacts, tmp_path / "out", reference=False, batch_size=10, emit=lambda **event: events.append(event))
    assert events == [{"event": "progress", "done": done, "total": 24} for done in (10, 20, 24)]


def test_a_split_without_rows_is_one_sentence(artifacts, tmp_path):
    (tmp_path / "validation.jsonl").write_text("")
    with pytest.raises(DataError, match=r"^evaluation\.split is validation, which holds no prompts: raise data\.validation_size or choose the other split$"):
        evaluate.held_out(EvaluationSection(split="validation"), tmp_path, seed=1)


def test_scores_and_their_means(artifacts):
    from tasks.core import rewards

    tokenizer = models.load_tokenizer(artifacts[1], tiny.MODEL)
    texts = ["1 + 1 = 2. Final Answer: 2<|eos|>", "Final Answer: 9<|eos|>", "I am not", "#### 4<|eos|>"]
    rows = [{"id": str(i), "gold": gold, "question": "?"} for i, gold in enumerate(["2", "3", "4", "4"])]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    scored = evaluate.score(rows, ["?"] * 4, ids, [tokenizer.eos_token_id], tokenizer, rewards.build("accuracy", RewardConfig()))
    assert [row["answer"] for row in scored] == ["2", "9", None, "4"]
    assert [row["correct"] for row in scored] == [True, False, False, True]
    assert [row["formatted"] for row in scored] == [True, True, False, False]
    assert [row["truncated"] for row in scored] == [False, False, True, False]
    assert scored[0]["completion"] == "1 + 1 = 2. Final Answer: 2"
    columns = metrics.Columns()
    columns.add(scored)
    found = metrics.summary(columns)
    assert found.pop("intervals").keys() == {"accuracy", "mean_reward", "format_rate", "mean_length", "truncated_rate", "rewards/accuracy"}
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
