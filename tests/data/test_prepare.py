import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import GSM8K, ROOT

from configs.errors import DataError
from configs.schema import DataSection
from tasks.core.data import prepare
from tasks.core.scoring import answers
from tasks.core.storage import store

SOURCES = [p for p in [GSM8K] if p.is_dir()]

CLEAN = {
    "num_missing": 0, "num_unreadable": 0, "num_encoding": 0, "num_conflicts": 0, "num_leaks": 0, "num_contamination": 0, "num_near_duplicates": 0,
    "num_disagreements": 0, "num_dropped": 0, "num_left_out": 0,
}  # fmt: skip


def row(number: int, answer: str | None = None) -> dict:
    worked = f"It is {number}+1=<<{number}+1={number + 1}>>{number + 1}.\n#### {number + 1}"
    return {"question": f"How much is {number} and 1?", "answer": answer or worked}


def write(file: Path, rows: list) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return file


def folder(path: Path, train: list, test: list, validation: list | None = None) -> Path:
    write(path / "train.jsonl", train)
    write(path / "test.jsonl", test)
    if validation is not None:
        write(path / "validation.jsonl", validation)
    return path


def prepared(out: Path, seed: int = 1, **section) -> dict[str, list[dict]]:
    prepare.prepare(DataSection(**section), seed, out)
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in out.glob("*.jsonl")}


def questions(rows: list[dict]) -> set[str]:
    return {r["question"] for r in rows}


# --- arithmetic ---


def test_arithmetic_counts(tmp_path):
    assert prepare.prepare(DataSection(), 1, tmp_path) == {
        "num_demonstrations": 16_000,
        "num_train_prompts": 3448,
        "num_validation": 256,
        "num_test": 256,
        "num_train_duplicates": 0,
        "num_validation_duplicates": 0,
        "num_test_duplicates": 0,
        **CLEAN,
        "num_disagreements": 2400,  # wrong on purpose, and kept
    }
    names = ["card.json", "card.md", "grpo.jsonl", "report.json", "sft.jsonl", "test.jsonl", "validation.jsonl"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_arithmetic_shares_of_demonstrations(tmp_path):
    files = prepared(tmp_path)
    gold = {r["question"]: r["gold"] for r in files["grpo"]}
    kinds = {"right": 0, "wrong": 0, "never answers": 0}
    for r in files["sft"]:
        question, completion = r["prompt"][0]["content"], r["completion"]
        sum_ = question[len("What is ") : -1]
        if completion == f"{sum_} = {gold[question]}. Final Answer: {gold[question]}":
            kinds["right"] += 1
        elif completion == f"Let me think about {sum_}.":
            kinds["never answers"] += 1
        else:
            assert re.fullmatch("Final Answer: [1-9][0-9]", completion)
            assert not answers.same_answer(answers.extract_answer(completion), gold[question])
            kinds["wrong"] += 1
    assert kinds == {"right": 6400, "wrong": 2400, "never answers": 7200}


def test_arithmetic_has_no_carry_and_no_borrow(tmp_path):
    files = prepared(tmp_path)
    rows = files["grpo"] + files["validation"] + files["test"]
    assert len(questions(rows)) == 3960
    for r in rows:
        a, op, b = re.fullmatch(r"What is ([0-9]{2}) ([+-]) ([0-9]{2})\?", r["question"]).groups()
        by_digit = "".join(str(int(x) + int(y) if op == "+" else int(x) - int(y)) for x, y in zip(a, b, strict=True))
        assert r["gold"] == by_digit


def test_arithmetic_splits_are_disjoint(tmp_path):
    files = prepared(tmp_path)
    train, validation, test = (questions(files[n]) for n in ("grpo", "validation", "test"))
    assert not train & validation and not train & test and not validation & test
    assert {r["prompt"][0]["content"] for r in files["sft"]} <= train


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    # The second in another process: neither hash order nor anything else of a process may show.
    prepare.prepare(DataSection(), 1, tmp_path / "a")
    code = (
        "import sys; from pathlib import Path; from configs.schema import DataSection; from tasks.core.data import prepare; "
        "prepare.prepare(DataSection(), 1, Path(sys.argv[1]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "b")],
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
    )
    prepare.prepare(DataSection(), 2, tmp_path / "c")
    a, b, c = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "abc")
    assert a == b
    assert a["test.jsonl"] != c["test.jsonl"] and a["sft.jsonl"] != c["sft.jsonl"]


def test_arithmetic_without_training_questions_is_refused(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^data.validation_size is 1960 and data.source arithmetic has 1960 different questions left",
    ):
        prepare.prepare(DataSection(test_size=2000, validation_size=1960), 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- JSON Lines ---


def test_rows_of_a_folder(tmp_path):
    path = folder(tmp_path / "d", [row(1), row(2)], [row(3, "#### $1,004.")], [row(5)])
    files = prepared(tmp_path / "out", path=str(path))
    question = "How much is 1 and 1?"
    assert files["sft"][0] == {
        "id": "train-1",
        "prompt": [{"role": "user", "content": question}],
        "completion": "It is 1+1=2.\nFinal Answer: 2",
    }
    assert files["grpo"][0] == {
        "id": "train-1",
        "prompt": [{"role": "user", "content": question}],
        "question": question,
        "gold": "2",
    }
    assert [(r["id"], r["gold"]) for r in files["validation"] + files["test"]] == [
        ("validation-1", "6"),
        ("test-1", "$1004"),
    ]


def test_lines_have_sorted_keys_and_end_in_a_newline(tmp_path):
    path = folder(
        tmp_path / "d", [{"question": "Wie viel\u2028kostet ein Ei?", "answer": "#### 2"}], [row(3)], [row(4)]
    )
    prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")
    text = '"Wie viel\\u2028kostet ein Ei?"'
    expected = (
        f'{{"gold": "2", "id": "train-1", "prompt": [{{"content": {text}, "role": "user"}}], "question": {text}}}\n'
    )
    assert (tmp_path / "out/grpo.jsonl").read_bytes() == expected.encode()


def test_validation_is_taken_out_of_train_where_there_is_none(tmp_path):
    path = folder(tmp_path / "d", [row(n) for n in range(10)], [row(99)])
    files = prepared(tmp_path / "out", path=str(path), validation_size=3)
    assert [len(files[n]) for n in ("sft", "grpo", "validation", "test")] == [7, 7, 3, 1]
    assert questions(files["grpo"]) | questions(files["validation"]) == {row(n)["question"] for n in range(10)}


def test_a_single_file_is_split_by_the_seed(tmp_path):
    path = write(tmp_path / "all.jsonl", [row(n) for n in range(100)])
    first = prepared(tmp_path / "1", path=str(path), validation_size=10, test_size=20)
    again = prepared(tmp_path / "2", path=str(path), validation_size=10, test_size=20)
    other = prepared(tmp_path / "3", seed=2, path=str(path), validation_size=10, test_size=20)
    assert [len(first[n]) for n in ("sft", "grpo", "validation", "test")] == [70, 70, 10, 20]
    assert first == again
    assert questions(first["test"]) != questions(other["test"])


def test_a_repeated_question_of_a_single_file_goes_to_one_split_only(tmp_path):
    path = write(tmp_path / "all.jsonl", [row(n % 10) for n in range(40)])
    report = prepare.prepare(DataSection(path=str(path), validation_size=2, test_size=3), 1, tmp_path / "out")
    assert report == {
        "num_demonstrations": 20,
        "num_train_prompts": 5,
        "num_validation": 2,
        "num_test": 3,
        "num_train_duplicates": 15,
        "num_validation_duplicates": 6,
        "num_test_duplicates": 9,
        **CLEAN,
    }


def test_repeated_questions_stay_as_demonstrations_and_become_one_prompt(tmp_path):
    again = {"question": " how MUCH is 1\nand 1? ", "answer": "Two.\n#### 2"}
    path = folder(tmp_path / "d", [row(1), again], [row(3), row(3)], [row(5)])
    report = prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")
    assert (report["num_demonstrations"], report["num_train_prompts"], report["num_train_duplicates"]) == (2, 1, 1)
    assert (report["num_test"], report["num_test_duplicates"]) == (1, 1)
    assert json.loads((tmp_path / "out/report.json").read_text()) == report


def test_system_prompt_instruction_and_column_names(tmp_path):
    path = folder(
        tmp_path / "d", [{"q": "1+1?", "a": "#### 2"}], [{"q": "1+2?", "a": "#### 3"}], [{"q": "1+3?", "a": "#### 4"}]
    )
    files = prepared(
        tmp_path / "out",
        path=str(path),
        question_column="q",
        answer_column="a",
        system_prompt="Be exact.",
        instruction="End with Final Answer: N",
    )
    chat = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "1+1?\nEnd with Final Answer: N"}]
    assert files["sft"][0]["prompt"] == files["grpo"][0]["prompt"] == chat
    assert files["grpo"][0]["question"] == "1+1?"


def test_demonstrations_agree_with_the_rewards(tmp_path):
    given = [
        "#### 1,000",
        "half.\n#### 1/2",
        "cold.\n#### -5",
        "price.\n#### $2.50",
        "mark <<1+1=2>>2\n#### 3\n#### 4 clips",
    ]
    path = folder(tmp_path / "d", [row(n, a) for n, a in enumerate(given)], [row(98)], [row(99)])
    files = prepared(tmp_path / "out", path=str(path))
    assert [r["gold"] for r in files["grpo"]] == ["1000", "1/2", "-5", "$2.50", "4"]
    assert [answers.extract_answer(r["completion"]) for r in files["sft"]] == ["1000", "1/2", "-5", "$2.50", "4"]


GOOD = [row(1), row(2)]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([row(1), "{'question': 1}"], "^train.jsonl line 2 is not valid JSON"),
        ([row(1), "[" * 100_000], "^train.jsonl line 2 is not valid JSON"),
        ([row(1), "[1]"], "^train.jsonl line 2 holds list"),
        (
            [row(1), "", {"text": "x", "answer": "#### 1"}],
            "^train.jsonl line 3 has no column question \\(data.question_column\\), it has answer, text",
        ),
        ([{"question": "x"}], "^train.jsonl line 1 has no column answer \\(data.answer_column\\), it has question"),
        ([{"question": " ", "answer": "#### 1"}], "^train.jsonl line 1 has nothing in column question"),
        ([{"question": "x", "answer": ""}], "^train.jsonl line 1 has nothing in column answer"),
        ([{"question": "x", "answer": 5}], "^train.jsonl line 1 has int in column answer"),
        ([{"question": "x", "answer": None}], "^train.jsonl line 1 has nothing in column answer"),
        ([{"question": "\ud800", "answer": "#### 1"}], "^train.jsonl line 1 has half a surrogate pair"),
        ([row(1), row(2, "It is 3.")], "^train.jsonl line 2 has no #### in answer"),
        ([row(1), row(2, "#### three")], "^train.jsonl line 2 has the gold answer 'three'"),
        ([row(1), row(2, "#### 3 or 4")], "^train.jsonl line 2 has the gold answer '3 or 4'"),
        ([row(1), row(2, "####")], "^train.jsonl line 2 has the gold answer ''"),
        ([], "^train.jsonl has no rows"),
        ([""], "^train.jsonl has no rows"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path, train, message):
    path = folder(tmp_path / "d", train, [row(8)], [row(9)])
    with pytest.raises(DataError, match=message) as caught:
        prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = folder(tmp_path / "d", GOOD, [row(8)], [row(9)])
    (path / "test.jsonl").write_bytes(b'{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(DataError, match=r"^test.jsonl line 1 is not valid JSON in UTF-8"):
        prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")


@pytest.mark.parametrize(
    ("validation", "test", "message"),
    [
        ([row(9)], [row(8), row(2), row(1)], r"^2 held-out question\(s\) .* test.jsonl line 2 and train.jsonl line 2"),
        (
            [row(9), {"question": "how MUCH is  1 and 1?", "answer": "#### 2"}],
            [row(8)],
            r"^1 held-out .* validation.jsonl line 2 and train.jsonl line 1",
        ),
        ([row(8)], [row(8)], r"^1 held-out .* test.jsonl line 1 and validation.jsonl line 1"),
    ],
)
def test_held_out_questions_that_occur_elsewhere_are_refused(tmp_path, validation, test, message):
    path = folder(tmp_path / "d", GOOD, test, validation)
    with pytest.raises(DataError, match=message):
        prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_few_rows_for_the_splits_are_refused(tmp_path):
    path = write(tmp_path / "all.jsonl", [row(n) for n in range(10)])
    with pytest.raises(
        DataError, match=r"^data.test_size is 256 and data.path .*all.jsonl has 10 different questions left"
    ):
        prepare.prepare(DataSection(path=str(path)), 1, tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "and does not exist"),
        (lambda p: p.mkdir(), "has no train.jsonl and no test.jsonl"),
        (lambda p: write(p / "train.jsonl", GOOD), "has no test.jsonl"),
        (lambda p: write(p / "test.jsonl", GOOD), "has no train.jsonl"),
    ],
)
def test_missing_files_are_named(tmp_path, make, message):
    make(tmp_path / "d")
    section = DataSection(path=str(tmp_path / "d"))
    for act in (lambda: prepare.prepare(section, 1, tmp_path / "out"), lambda: prepare.source_digest(section)):
        with pytest.raises(DataError, match=f"^data.path is {tmp_path}/d .*{message}"):
            act()


INVENTED = {
    "train.jsonl": [
        row(1),
        {
            "question": "Tom has 3 boxes of 400 nails. How many?",
            "answer": "3*400=<<3*400=1200>>1,200 nails.\n#### 1,200",
        },
        {"question": "Ann owes $5. What has she?", "answer": "0-5=<<0-5=-5>>-5\n#### -5"},
    ],
    "test.jsonl": [row(7)],
}


@pytest.mark.parametrize("source", ["invented", *SOURCES], ids=str)
def test_rows_of_the_form_of_gsm8k_are_all_kept_and_agree_with_the_rewards(tmp_path, source):
    if source == "invented":
        source = folder(tmp_path / "d", INVENTED["train.jsonl"], INVENTED["test.jsonl"])
    files = prepared(tmp_path / "out", path=str(source), validation_size=0)
    lines = {name: len((source / f"{name}.jsonl").read_text().strip().split("\n")) for name in ("train", "test")}
    assert [len(files[n]) for n in ("sft", "grpo", "validation", "test")] == [
        lines["train"],
        lines["train"],
        0,
        lines["test"],
    ]
    assert not any("<<" in r["completion"] or "####" in r["completion"] for r in files["sft"])
    pairs = zip(files["sft"], files["grpo"], strict=True)
    assert all(
        answers.same_answer(answers.extract_answer(demonstration["completion"]), prompt["gold"])
        for demonstration, prompt in pairs
    )


# --- S3 and the Hub ---


def put(root, local, key):
    """Uploads a file, or the files of a folder, and gives its address."""
    for file in local.iterdir() if local.is_dir() else [local]:
        store.open_store(root).put_file(file, f"{key}/{file.name}" if local.is_dir() else key)
    return f"{root}/{key}"


def test_folder_on_s3_is_read_as_a_local_one(tmp_path, s3_root):
    local = folder(tmp_path / "d", GOOD, [row(8)], [row(9)])
    there = put(s3_root, local, "sets/mine")
    assert prepared(tmp_path / "1", path=f"{there}/") == prepared(tmp_path / "2", path=str(local))
    assert prepare.source_digest(DataSection(path=there)) == prepare.source_digest(DataSection(path=str(local)))


def test_single_file_on_s3(tmp_path, s3_root):
    there = put(s3_root, write(tmp_path / "all.jsonl", [row(n) for n in range(10)]), "all.jsonl")
    files = prepared(tmp_path / "out", path=there, validation_size=2, test_size=3)
    assert [len(files[n]) for n in ("sft", "grpo", "validation", "test")] == [5, 5, 2, 3]


def test_nothing_on_s3(tmp_path, s3_root):
    with pytest.raises(DataError, match=f"^data.path is {s3_root}/nothing and does not exist"):
        prepare.prepare(DataSection(path=f"{s3_root}/nothing"), 1, tmp_path / "out")


@pytest.fixture
def offline(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_hub_data_set(tmp_path, offline):
    path = folder(tmp_path / "d", [row(n) for n in range(10)], [row(99)])
    files = prepared(tmp_path / "out", source="hub", hub={"name": str(path)}, validation_size=4)
    assert [len(files[n]) for n in ("sft", "grpo", "validation", "test")] == [6, 6, 4, 1]
    assert files["test"][0]["gold"] == "100"


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        ({"name": "someone/no-such-set"}, "^data.hub.name is someone/no-such-set "),
        ({"name": "someone/no-such-set", "revision": "abc"}, "revision abc"),
    ],
)
def test_hub_that_cannot_be_reached(tmp_path, offline, hub, message):
    with pytest.raises(DataError, match=message) as caught:
        prepare.prepare(DataSection(source="hub", hub=hub), 1, tmp_path / "out")
    assert "data.path" in str(caught.value)


def test_hub_split_that_is_not_there(tmp_path, offline):
    path = folder(tmp_path / "d", GOOD, [row(8)])
    with pytest.raises(DataError, match=r"split dev\) and cannot be loaded \(Unknown split"):
        prepare.prepare(DataSection(source="hub", hub={"name": str(path), "test_split": "dev"}), 1, tmp_path / "out")


def test_bad_row_of_a_hub_data_set(tmp_path, offline):
    path = folder(tmp_path / "d", [row(1), row(2, "none")], [row(8)])
    with pytest.raises(DataError, match=r"^split train row 2 has no ####"):
        prepare.prepare(DataSection(source="hub", hub={"name": str(path)}), 1, tmp_path / "out")


# --- digest ---


def test_digest_follows_the_content_not_the_path(tmp_path):
    a, b = folder(tmp_path / "a", GOOD, [row(8)]), folder(tmp_path / "b", GOOD, [row(8)])
    first = prepare.source_digest(DataSection(path=str(a)))
    assert first == prepare.source_digest(DataSection(path=str(b)))
    write(b / "test.jsonl", [row(9)])
    assert first != prepare.source_digest(DataSection(path=str(b)))
    write(a / "validation.jsonl", [row(9)])
    assert first != prepare.source_digest(DataSection(path=str(a)))


def test_digest_of_the_other_sources():
    assert prepare.source_digest(DataSection()) == ""
    one, other = (
        prepare.source_digest(DataSection(source="hub", hub={"name": "openai/gsm8k", "revision": r}))
        for r in ("a", "b")
    )
    assert one != other


def test_digest_needs_no_heavy_import(tmp_path):
    path = folder(tmp_path / "d", GOOD, [row(8)])
    code = (
        "import sys; from configs.schema import DataSection; from tasks.core.data import prepare; prepare.source_digest(DataSection(path=sys.argv[1])); "
        "print([m for m in ('torch', 'transformers', 'datasets', 'boto3', 'mlflow', 'prefect') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n"
