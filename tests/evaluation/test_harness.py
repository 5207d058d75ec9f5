import json

import pytest
import tiny

from configs.errors import ConfigError
from configs.schema import ComputeSection, EvaluationSet
from tasks.core.evaluation import harness, sets
from tasks.core.model import loading

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/sums.jsonl"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["1", "2"]
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task of one's own: a YAML file, and its data beside it."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "sums.jsonl").write_text(
        "".join(json.dumps({"question": f"1 + {i % 2} =", "label": i % 2}) + "\n" for i in range(8))
    )
    (folder / "sums.yaml").write_text(TASK.format(folder=folder))
    return folder / "sums.yaml"


def test_a_task_of_ones_own_is_measured_by_the_harness(task, two_models, tmp_path):
    _, policy, _ = two_models
    model, tokenizer = (
        loading.load_policy(policy, tiny.MODEL, ComputeSection(device="cpu"), for_training=False),
        loading.load_tokenizer(policy, tiny.MODEL),
    )
    found = harness.evaluate(EvaluationSet(task=str(task), max_samples=6), model, tokenizer, 2, 1, tmp_path / "out")
    assert (found["num_prompts"], found["acc"] * 6 % 1) == (6, 0)
    assert found["intervals"]["acc"][0] <= found["acc"] <= found["intervals"]["acc"][1]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["sums"]["acc,none"] == found["acc"]


def test_a_task_is_found_by_the_name_of_its_file_or_of_the_harness(task):
    assert [harness.find(name)[0] for name in (str(task), "arc_easy")] == ["sums", "arc_easy"]


@pytest.mark.parametrize("part", ["sums.yaml", "sums.jsonl"])
def test_another_content_of_a_tasks_files_is_another_digest(task, part):
    before = sets.digests({"sums": EvaluationSet(task=str(task))})
    with (task.parent / part).open("a") as file:
        file.write("\n")
    assert sets.digests({"sums": EvaluationSet(task=str(task))}) != before


def test_a_file_that_is_no_task_is_one_sentence(task):
    (task.parent / "broken.yaml").write_text("task: [")
    with pytest.raises(ConfigError, match=r"does not know as broken: the file must be YAML and say `task: broken`$"):
        harness.find(str(task.parent / "broken.yaml"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "arc_hard",
            "has the task arc_hard, which lm-evaluation-harness does not know as arc_hard: see `lm_eval ls tasks`$",
        ),
        ("no/where.yaml", "has the task no/where.yaml, and there is no such file: correct the path"),
    ],
)
def test_a_task_that_is_not_there_is_one_sentence(name, message):
    with pytest.raises(ConfigError, match=message):
        harness.find(name)
