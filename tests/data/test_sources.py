import csv
import json
import sys
from decimal import Decimal

import pytest

from configs.errors import ConfigError, DataError
from configs.loading import load
from configs.schema import DataSection
from tasks.core.data import prepare
from tasks.core.storage import store

ROWS = [{"question": f"How much is {n} and 1?", "answer": f"#### {n + 1}", "level": n % 3} for n in range(20)]


def prepared(out, seed=1, **section):
    prepare.prepare(DataSection(**{"validation_size": 2, "test_size": 3, **section}), seed, out)
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in out.glob("*.jsonl")}


def write_json(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_csv(file, rows):
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file, rows):
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


# --- formats ---


@pytest.mark.parametrize(("write", "ending"), [(write_csv, "csv"), (write_parquet, "parquet")])
def test_all_formats_give_the_same_rows(tmp_path, write, ending):
    expected = prepared(tmp_path / "1", path=str(write_json(tmp_path / "all.jsonl", ROWS)))
    assert prepared(tmp_path / "2", path=str(write(tmp_path / f"all.{ending}", ROWS))) == expected
    assert len(expected["sft"]) == 15


def test_parts_of_a_split_are_read_in_their_order(tmp_path):
    write_parquet(tmp_path / "d/train-00001-of-00002.parquet", ROWS[5:10])
    write_parquet(tmp_path / "d/train-00000-of-00002.parquet", ROWS[:5])
    write_parquet(tmp_path / "d/test/part.parquet", ROWS[10:12])
    files = prepared(tmp_path / "out", path=str(tmp_path / "d"), validation_size=0)
    assert [row["question"] for row in files["grpo"]] == [row["question"] for row in ROWS[:10]]
    assert [row["id"] for row in files["grpo"]][4:6] == ["train-5", "train-6"]
    assert [row["question"] for row in files["test"]] == [row["question"] for row in ROWS[10:12]]


def test_prefix_on_s3_with_parts_and_formats(tmp_path, s3_root):
    write_json(tmp_path / "d/train-00000.jsonl", ROWS[:5])
    write_json(tmp_path / "d/train-00001.jsonl", ROWS[5:10])
    write_parquet(tmp_path / "d/test.parquet", ROWS[10:12])
    for file in (tmp_path / "d").iterdir():
        store.open_store(s3_root).put_file(file, f"sets/{file.name}")
    section = {"path": f"{s3_root}/sets", "validation_size": 0}
    assert prepared(tmp_path / "1", **section) == prepared(tmp_path / "2", path=str(tmp_path / "d"), validation_size=0)
    assert prepare.source_digest(DataSection(**section)) == prepare.source_digest(DataSection(path=str(tmp_path / "d")))


def test_lines_of_csv_are_counted_where_texts_have_several(tmp_path):
    (tmp_path / "all.csv").write_text('question,answer\n"one\nand two?",#### 3\n\nthree?,none\n')
    with pytest.raises(DataError, match=r"^all.csv line 5 has no #### in answer"):
        prepared(tmp_path / "out", path=str(tmp_path / "all.csv"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("all.csv", b"question,answer\na,b,c\n", "^all.csv line 2 has 3 values for 2 columns"),
        (
            "all.csv",
            b"question,question\na,b\n",
            "^all.csv line 1 has the columns question, question: each must have a name",
        ),
        ("all.csv", b'question,answer\n"a,b\n', "^all.csv line 2 is not valid CSV"),
        ("all.csv", b"question,answer\n\xff,b\n", "^all.csv line 2 is not UTF-8"),
        ("all.csv", b"question,answer\n", "^all.csv has no rows"),
        ("all.csv", b"", "^all.csv line 1 has the columns :|^all.csv has no rows"),
        ("all.parquet", b"PAR1 and no more", "^all.parquet cannot be read as Parquet after row 0"),
        ("all.txt", b"", "^data.path names all.txt, and its ending says neither .jsonl nor .parquet nor .csv"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "out", path=str(tmp_path / name))
    assert not (tmp_path / "out").exists()


def test_hidden_files_are_no_data_and_an_ending_may_be_in_capitals(tmp_path):
    write_json(tmp_path / "d/train.JSONL", ROWS[:5])
    write_json(tmp_path / "d/train/.ipynb_checkpoints/rows.jsonl", ROWS[5:7])
    (tmp_path / "d/test").mkdir()
    (tmp_path / "d/test/._0.jsonl").write_bytes(b"\x00\x05\x16\x07")
    write_json(tmp_path / "d/test/0.jsonl", ROWS[10:12])
    files = prepared(tmp_path / "out", path=str(tmp_path / "d"), validation_size=0)
    assert [row["question"] for row in files["grpo"]] == [row["question"] for row in ROWS[:5]]
    assert [row["question"] for row in files["test"]] == [row["question"] for row in ROWS[10:12]]


def test_a_category_column_that_was_named_must_be_there(tmp_path):
    path = write_json(tmp_path / "all.jsonl", ROWS)
    message = r"^all.jsonl line 1 has no column topik \(data.category_column\), it has .*: add the column or change .*, or set data.checks.missing to drop$"
    with pytest.raises(DataError, match=message):
        prepare.prepare(DataSection(path=str(path), category_column="topik"), 1, tmp_path / "out")


def test_a_split_of_another_name_is_refused_rather_than_passed_over(tmp_path):
    for name in ("train", "test", "dev"):
        write_json(tmp_path / f"d/{name}.jsonl", ROWS[:5])
    with pytest.raises(
        DataError,
        match=r"has dev\.jsonl, which is none of train, validation, test and would not be read: name it validation",
    ):
        prepare.prepare(DataSection(path=str(tmp_path / "d")), 1, tmp_path / "out")


def test_a_date_of_parquet_that_python_has_not_is_one_sentence(tmp_path):
    import pyarrow
    import pyarrow.parquet

    made = pyarrow.array([2**62], pyarrow.timestamp("ms"))
    pyarrow.parquet.write_table(
        pyarrow.table({"question": ["1 + 1?"], "answer": ["#### 2"], "made": made}), tmp_path / "all.parquet"
    )
    with pytest.raises(DataError, match=r"^all.parquet cannot be read as Parquet after row 0"):
        prepared(tmp_path / "out", path=str(tmp_path / "all.parquet"))


def test_two_formats_of_one_split_are_refused(tmp_path):
    write_json(tmp_path / "d/train.jsonl", ROWS)
    write_parquet(tmp_path / "d/train.parquet", ROWS)
    write_json(tmp_path / "d/test.jsonl", ROWS)
    with pytest.raises(
        DataError, match=r"has train.jsonl and train.parquet: keep the train files in one of the two forms"
    ):
        prepared(tmp_path / "out", path=str(tmp_path / "d"))


# --- columns ---


def one(tmp_path, record, **section):
    """The rows that a single training row becomes."""
    write_json(tmp_path / "d/train.jsonl", [record])
    write_json(
        tmp_path / "d/test.jsonl",
        [
            {
                **record,
                "question": "?",
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "#### 1"}],
            }
        ],
    )
    files = prepared(tmp_path / "out", path=str(tmp_path / "d"), validation_size=0, **section)
    return files["sft"][0], files["grpo"][0]


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 3?"},
]


def test_conversations(tmp_path):
    record = {"messages": [*TURNS, {"role": "assistant", "content": "It is <<2+3=5>>5.\n#### 5"}]}
    sft, grpo = one(
        tmp_path, record, messages_column="messages", system_prompt="Be exact.", instruction="End with the answer."
    )
    asked = [*TURNS[:3], {"role": "user", "content": "And 2 + 3?\nEnd with the answer."}]
    assert sft == {"id": "train-1", "prompt": asked, "completion": "It is 5.\nFinal Answer: 5"}
    assert grpo == {"id": "train-1", "prompt": asked, "question": "And 2 + 3?", "gold": "5"}


def test_conversations_that_end_with_the_question(tmp_path):
    sft, grpo = one(tmp_path, {"messages": TURNS, "gold": 5}, messages_column="messages", gold_column="gold")
    assert (sft["prompt"], sft["completion"], grpo["gold"]) == (TURNS, "Final Answer: 5", "5")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "has no messages in column messages"),
        (
            [{"role": "tool", "content": "x"}],
            "has no messages in column messages .*: each must have a role \\(system, user, assistant\\)",
        ),
        ([{"role": "user", "content": None}], "has no messages in column messages"),
        (
            [{"role": "user", "content": "x"}],
            "has no answer in column messages .*: the last message must be the assistant's",
        ),
        ([{"role": "assistant", "content": "#### 1"}], "has no question in column messages"),
        ([], "has no answer in column messages"),
    ],
)
def test_conversations_that_are_none(tmp_path, messages, message):
    with pytest.raises(DataError, match=f"^train.jsonl line 1 {message}"):
        one(tmp_path, {"messages": messages}, messages_column="messages")


def test_gold_answers_of_a_column_of_their_own(tmp_path):
    sft, grpo = one(tmp_path, {"question": "1 + 1?", "answer": "One and one make two.", "gold": 2}, gold_column="gold")
    assert (sft["completion"], grpo["gold"]) == ("One and one make two.\nFinal Answer: 2", "2")


def test_gold_answers_that_are_decimals_of_parquet(tmp_path):
    rows = [{"question": f"{n} + 1/2?", "gold": Decimal(f"{n}.5")} for n in range(20)]
    files = prepared(tmp_path / "out", path=str(write_parquet(tmp_path / "all.parquet", rows)), gold_column="gold")
    assert {r["question"]: r["gold"] for r in files["grpo"] + files["test"] + files["validation"]}["4 + 1/2?"] == "4.5"


def test_an_answer_that_is_the_gold_answer_alone(tmp_path):
    sft, grpo = one(tmp_path, {"question": "1 + 1?", "answer": "2"}, gold_column="answer")
    assert (sft["completion"], grpo["gold"]) == ("Final Answer: 2", "2")


def test_an_answer_that_is_stated_in_a_box(tmp_path):
    sft, grpo = one(tmp_path, {"question": "1 + 1?", "answer": r"So it is \boxed{2}."})
    assert (sft["completion"], grpo["gold"]) == (r"So it is \boxed{2}.", "2")


def test_category_and_further_columns_are_in_the_prompts(tmp_path):
    record = {"question": "1 + 1?", "answer": "#### 2", "topic": 7, "level": 3, "tags": ["a"]}
    _, grpo = one(tmp_path, record, category_column="topic", columns=["level", "tags"])
    assert {name: grpo[name] for name in ("category", "level", "tags")} == {"category": "7", "level": 3, "tags": ["a"]}


def test_a_further_column_that_a_row_has_not(tmp_path):
    with pytest.raises(
        DataError, match=r"^train.jsonl line 1 has no column level \(data.columns\), it has answer, question"
    ):
        one(tmp_path, {"question": "1 + 1?", "answer": "#### 2"}, columns=["level"])


def test_a_further_column_of_two_types(tmp_path):
    path = write_json(tmp_path / "all.jsonl", [*ROWS, {**ROWS[0], "level": "high"}])
    with pytest.raises(
        DataError,
        match=r"^all.jsonl line 21 has str in column level \(data.columns\) and all.jsonl line 1 has a number: give it one type",
    ):
        prepared(tmp_path / "out", path=str(path), columns=["level"])


@pytest.mark.parametrize(
    ("section", "column"),
    [
        ({}, r"category \(data.category_column\)"),
        ({"category_column": "topic", "columns": ["tags"]}, r"tags \(data.columns\)"),
        (
            {"category_column": "topic", "prompt_template": "{{ question }} {{ tags[0] }}"},
            r"of those in the template \(data.prompt_template\)",
        ),
    ],
)
def test_half_a_surrogate_pair_is_found_in_every_column_that_is_used(tmp_path, section, column):
    record = {"question": "1 + 1?", "answer": "#### 2", "category": "\ud800", "topic": "a", "tags": ["\ud800"]}
    path = write_json(
        tmp_path / "all.jsonl", [record, *({**row, "tags": ["a"], "category": "b", "topic": "b"} for row in ROWS)]
    )
    with pytest.raises(
        DataError, match=f"^all.jsonl line 1 has half a surrogate pair in column {column}, which is no text"
    ):
        prepared(tmp_path / "1", path=str(path), **section)
    prepared(tmp_path / "2", path=str(path), checks={"unreadable": "drop"}, **section)
    assert json.loads((tmp_path / "2/report.json").read_text())["num_unreadable"] == 1


def test_prompt_template(tmp_path):
    template = "{% if level > 2 %}Think hard.\n{% endif %}{{ question }}"
    _, grpo = one(
        tmp_path,
        {"question": "1 + 1?", "answer": "#### 2", "level": 3},
        prompt_template=template,
        system_prompt="Be exact.",
    )
    assert grpo["prompt"] == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Think hard.\n1 + 1?"},
    ]
    assert grpo["question"] == "1 + 1?"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ questoin }}",
            r"does not fit data.prompt_template \(UndefinedError: 'questoin' is undefined\): it has question and the columns answer, question",
        ),
        ("{{ question / 2 }}", "does not fit data.prompt_template \\(TypeError"),
        ("{{ ''.__class__.__mro__ }}", "does not fit data.prompt_template \\(SecurityError"),
        ("{# nothing #}", "gives an empty prompt with data.prompt_template"),
    ],
)
def test_templates_that_cannot_be_rendered(tmp_path, template, message):
    with pytest.raises(DataError, match=f"^train.jsonl line 1 {message}"):
        one(tmp_path, {"question": "1 + 1?", "answer": "#### 2"}, prompt_template=template)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"prompt_template": "{{ question"}, "^data.prompt_template is no Jinja template"),
        (
            {"prompt_template": "{{ question | uper }}"},
            "^data.prompt_template is no Jinja template .line 1: No filter named 'uper'.*: correct it",
        ),
        (
            {"prompt_template": "{{ question }}", "instruction": "Go."},
            "^data.instruction and data.prompt_template are both given",
        ),
        ({"columns": ["gold"]}, "^data.columns names gold, which every row has for its own"),
        ({"columns": ["level", "level"]}, "^data.columns names level twice"),
        ({"source": "files"}, "^data.path is missing"),
        ({"source": "reasoning_gym"}, "^data.reasoning_gym.tasks is empty"),
    ],
)
def test_sections_that_cannot_be_honoured(section, message):
    with pytest.raises(ConfigError, match=message):
        load({"data": section})


def test_a_record_of_another_file_becomes_a_held_out_row():
    section = DataSection(question_column="q", gold_column="g", instruction="Go.")
    expected = {
        "id": "extra-1",
        "prompt": [{"role": "user", "content": "1 + 1?\nGo."}],
        "question": "1 + 1?",
        "gold": "2",
        "category": "sums",
    }
    assert (
        prepare.held_out(section, "extra-1", "extra.jsonl line 1", {"q": "1 + 1?", "g": 2, "category": "sums"})
        == expected
    )
    with pytest.raises(DataError, match=r"^extra.jsonl line 1 has nothing in column g") as caught:
        prepare.held_out(section, "extra-1", "extra.jsonl line 1", {"q": "1 + 1?", "g": None})
    assert type(caught.value) is DataError


# --- sizes ---


def test_max_samples_are_chosen_by_the_seed_with_all_their_rows(tmp_path):
    path = str(write_json(tmp_path / "all.jsonl", ROWS + ROWS))
    first, again = (prepared(tmp_path / name, path=path, max_samples=4) for name in "ab")
    other = prepared(tmp_path / "c", seed=2, path=path, max_samples=4)
    assert [len(first[name]) for name in ("sft", "grpo", "validation", "test")] == [8, 4, 2, 3]
    assert first == again and first["grpo"] != other["grpo"]


# --- reasoning-gym ---


def test_tasks_of_reasoning_gym(tmp_path):
    pytest.importorskip("reasoning_gym")
    settings = {
        "tasks": ["chain_sum", "letter_counting"],
        "size": 20,
        "settings": {"chain_sum": {"min_terms": 3, "max_terms": 3}},
    }
    first, again = (prepared(tmp_path / name, source="reasoning_gym", reasoning_gym=settings) for name in "ab")
    assert first == again
    rows = first["grpo"] + first["validation"] + first["test"]
    assert {row["category"] for row in rows} == {"chain_sum", "letter_counting"}
    chain = next(row for row in rows if row["category"] == "chain_sum")
    assert eval(chain["question"].rpartition(":")[2].replace("=", "").strip(" .?")) == int(chain["gold"])
    assert first["sft"][0]["completion"] == f"Final Answer: {first['grpo'][0]['gold']}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tasks": ["no_such_task"]},
            "^data.reasoning_gym names the task no_such_task, which reasoning-gym does not have: its tasks are ab, ",
        ),
        (
            {"tasks": ["chain_sum"], "settings": {"chain_sum": {"colour": 1}}},
            "^data.reasoning_gym.settings of chain_sum are refused .*colour",
        ),
        (
            {"tasks": ["chain_sum"], "settings": {"chain_sum": {"min_terms": -1}}},
            "^data.reasoning_gym.settings of chain_sum are refused",
        ),
    ],
)
def test_tasks_that_reasoning_gym_has_not(tmp_path, settings, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path / "out", source="reasoning_gym", reasoning_gym=settings)


def test_reasoning_gym_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    section = DataSection(source="reasoning_gym", reasoning_gym={"tasks": ["chain_sum"]})
    with pytest.raises(
        ConfigError,
        match=r"^data.source is reasoning_gym, which is not installed: pip install 'ratchet\[reasoning-gym\]'$",
    ):
        prepare.source_digest(section)
