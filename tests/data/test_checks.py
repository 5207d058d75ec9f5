import errno
import json
import logging
import os
import subprocess
import sys

import pytest
from paths import GSM8K, ROOT

from configs.errors import ConfigError, DataError
from configs.loading import load
from configs.schema import DataSection, ModelSection
from tasks.core.data import card, checks, encoding, prepare, table
from tasks.core.execution import preflight
from tasks.core.model import prompt_lengths, scratch

STORY = "Ann sells small green apples and large yellow pears at the weekly market in town."


def row(question, gold=1, answer=None):
    return {"question": question, "answer": answer or f"#### {gold}"}


def prepared(tmp_path, train, test=None, seed=1, checks=None, name="out", **section):
    """(rows by file, card) of training and test rows."""
    folder = tmp_path / f"{name}-in"
    folder.mkdir()
    for role, rows in {"train": train, "test": test or [row("Nothing like the others?")]}.items():
        (folder / f"{role}.jsonl").write_text(
            "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
        )
    out = tmp_path / name
    prepare.prepare(DataSection(path=str(folder), validation_size=0, checks=checks or {}, **section), seed, out)
    return {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in out.glob("*.jsonl")}, json.loads(
        (out / "card.json").read_text()
    )


def questions(rows):
    return [r["question"] for r in rows]


def counts(found, check):
    return tuple(found["checks"][check][name] for name in ("found", "fixed", "dropped", "kept"))


# --- rows ---


@pytest.mark.parametrize(
    ("bad", "check"),
    [
        ({"question": "x?"}, "missing"),
        ({"question": "  ", "answer": "#### 1"}, "missing"),
        ({"question": None, "answer": "#### 1"}, "missing"),
        ("{not JSON", "unreadable"),
        ("[1]", "unreadable"),
        ({"question": 5, "answer": "#### 1"}, "unreadable"),
        ({"question": "\ud800", "answer": "#### 1"}, "unreadable"),
        ({"question": "x?", "answer": "#### three or four"}, "unreadable"),
        ({"question": "x?", "answer": "no mark"}, "unreadable"),
    ],
)
def test_rows_that_cannot_be_used_are_dropped_where_the_configuration_says_so(tmp_path, bad, check):
    files, found = prepared(tmp_path, [row("One?"), bad, row("Two?")], checks={check: "drop"})
    assert questions(files["grpo"]) == ["One?", "Two?"]
    assert [r["id"] for r in files["grpo"]] == ["train-1", "train-3"]
    assert counts(found, check) == (1, 0, 1, 0)
    assert found["checks"][check]["examples"][0]["where"] == "train.jsonl line 2"


def test_a_split_of_which_every_row_is_dropped(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^test.jsonl has 1 rows and none that can be used: missing dropped 1 \(such as test.jsonl line 1, which has no",
    ):
        prepared(tmp_path, [row("One?")], [{"question": "x?"}], checks={"missing": "drop"})


# --- encoding ---

DAMAGED = "Itâ€™s 5 â‚¬ and 1\x00 apple?"


@pytest.mark.parametrize(
    ("damaged", "whole"),
    [
        ("Itâ€™s", "It’s"),
        ("cafÃ©", "café"),
        ("a\x00b\x1b\x07", "ab"),
        ("naïve “café” ½ – 5 € £ ¢ × ÷ − ³ \xa0 \u2028 \u200b ñ 日本語 Ωmega 🐳 x² Привет", None),
        ("two\r\n\tlines & &amp; <b>", None),
    ],
)
def test_repairs(damaged, whole):
    assert encoding.repaired(damaged) == (whole or damaged)
    assert (encoding.damage(damaged) is None) == (whole is None)


@pytest.mark.parametrize(
    ("policy", "kept", "counted"),
    [
        ("fix", ["It’s 5 € and 1 apple?", "Whole?"], (2, 1, 1, 0)),
        ("drop", ["Whole?"], (2, 0, 2, 0)),
        ("warn", [DAMAGED, "Lost \ufffd?", "Whole?"], (2, 0, 0, 2)),
    ],
)
def test_damaged_encoding(tmp_path, policy, kept, counted):
    files, found = prepared(tmp_path, [row(DAMAGED), row("Lost \ufffd?"), row("Whole?")], checks={"encoding": policy})
    assert questions(files["grpo"]) == kept
    assert counts(found, "encoding") == counted


def test_damaged_encoding_can_stop_preparation(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^train.jsonl line 1 has U\+FFFD in place of a lost character in column question: 'Lost .\?'; correct the line, or set",
    ):
        prepared(tmp_path, [row("Lost \ufffd?")], checks={"encoding": "fail"})


# --- duplicates and conflicts ---

TWICE = [row("One?", 1, "First.\n#### 1"), row("Two?"), row(" one? ", 1, "Second.\n#### 1")]


@pytest.mark.parametrize(
    ("policy", "prompts", "demonstrations", "counted"),
    [
        ("fix", ["One?", "Two?"], 3, (1, 1, 0, 0)),
        ("drop", ["One?", "Two?"], 2, (1, 0, 1, 0)),
        ("warn", ["One?", "Two?", "one?"], 3, (1, 0, 0, 1)),
    ],
)
def test_duplicates(tmp_path, policy, prompts, demonstrations, counted):
    files, found = prepared(tmp_path, TWICE, checks={"duplicates": policy})
    assert questions(files["grpo"]) == prompts
    assert len(files["sft"]) == demonstrations
    assert counts(found, "duplicates") == counted


def test_duplicates_can_stop_preparation(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^data.checks.duplicates found 1 row\(s\) that repeat a question of their split, the first at train.jsonl line 3 \(",
    ):
        prepared(tmp_path, TWICE, checks={"duplicates": "fail"})
    assert not (tmp_path / "out").exists()


def test_the_same_question_with_other_gold_answers(tmp_path):
    train = [row("One?", 1), row("one?", 2), row("Half?", "1/2"), row("Half?", "0.5"), row("Two?", 2)]
    files, found = prepared(tmp_path, train, checks={"conflicts": "drop"})
    assert questions(files["grpo"]) == ["Half?", "Two?"]
    assert counts(found, "conflicts") == (2, 0, 2, 0)
    assert found["checks"]["conflicts"]["examples"][0]["why"] == "1 here and 2 at train.jsonl line 2: 'One?'"


# --- splits ---


def test_leaks_are_taken_out_of_training(tmp_path):
    files, found = prepared(
        tmp_path, [row("One?"), row("Two?"), row("TWO? ")], [row("two?"), row("Three?")], checks={"leaks": "drop"}
    )
    assert (questions(files["grpo"]), questions(files["test"])) == (["One?"], ["two?", "Three?"])
    assert [r["id"] for r in files["sft"]] == ["train-1"]
    # Of the question in both splits, both of its rows are dropped.
    assert counts(found, "leaks") == (1, 0, 2, 0)


def test_a_question_whose_accents_are_encoded_otherwise_is_the_same(tmp_path):
    with pytest.raises(DataError, match="1 held-out question\\(s\\) also occur in another split"):
        prepared(tmp_path, [row("How many caf\u00e9s?"), row("Two?")], [row("How many cafe\u0301s?")])


SHARED = "the baker of the old town bakes forty loaves of bread every single morning"  # 14 words
COPY = f"Today {SHARED.upper().replace(' ', ', ')}! How many in a week?"


@pytest.mark.parametrize(("policy", "kept", "counted"), [("warn", 2, (1, 0, 0, 1)), ("drop", 1, (1, 0, 1, 0))])
def test_contamination(tmp_path, policy, kept, counted):
    train = [row(COPY, 280), row(f"{' '.join(SHARED.split()[:12])}, and sells some: how many?")]
    files, found = prepared(
        tmp_path, train, [row(f"Every day {SHARED}. How many in a year?", 14600)], checks={"contamination": policy}
    )
    assert len(files["grpo"]) == len(files["sft"]) == kept
    assert counts(found, "contamination") == counted


def test_contamination_can_stop_preparation(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^data.checks.contamination found 1 training row\(s\) .* the first at train.jsonl line 1 \(.*; test.jsonl line 1: ",
    ):
        prepared(
            tmp_path,
            [row(COPY, 280)],
            [row(f"Every day {SHARED}. How many in a year?", 14600)],
            checks={"contamination": "fail"},
        )


def test_short_questions_are_contaminated_by_the_same_words_alone(tmp_path):
    train = [row("What is 12 + 34", 46), row("What is 12 - 34", -22), row("What is 12 + 34 + 5", 51)]
    files, found = prepared(tmp_path, train, [row("What is: 12 + 34?", 46)], checks={"contamination": "drop"})
    assert questions(files["grpo"]) == ["What is 12 - 34", "What is 12 + 34 + 5"]
    assert counts(found, "contamination")[0] == 1


def test_an_instruction_that_all_questions_share_is_no_contamination(tmp_path):
    told = "Solve the following problem step by step and write the answer at the end of your text: "
    train = [row(f"{told}What is {n} + {n}?", 2 * n) for n in range(20)]
    _, found = prepared(tmp_path, train, [row(f"{told}What is 77 + 77?", 154)])
    assert counts(found, "contamination")[0] == 0


# --- near duplicates ---

CLOSE = [
    row(f"{STORY} How many of the 12 are left?"),
    row("Two?"),
    row(f"{STORY.replace('town', 'Rome')} How many of the 12 are left?"),
]


@pytest.mark.parametrize(("policy", "kept", "counted"), [("warn", 3, (1, 0, 0, 1)), ("drop", 2, (1, 0, 1, 0))])
def test_near_duplicates(tmp_path, policy, kept, counted):
    files, found = prepared(tmp_path, CLOSE, checks={"near_duplicates": policy})
    assert len(files["grpo"]) == len(files["sft"]) == kept
    assert counts(found, "near_duplicates") == counted
    assert "train.jsonl line 1" in found["checks"]["near_duplicates"]["examples"][0]["why"]


def test_a_training_question_near_to_a_held_out_one_is_dropped_with_all_its_demonstrations(tmp_path):
    files, found = prepared(tmp_path, [CLOSE[0], CLOSE[0], row("Two?")], [CLOSE[2]], checks={"near_duplicates": "drop"})
    assert (questions(files["grpo"]), len(files["sft"]), len(files["test"])) == (["Two?"], 1, 1)
    assert counts(found, "near_duplicates")[0] == 1


def test_questions_with_other_numbers_are_no_near_duplicates(tmp_path):
    _, found = prepared(tmp_path, [row(f"{STORY} How many of the {n} are left?", n) for n in range(30)])
    assert counts(found, "near_duplicates")[0] == 0


def test_similarity_is_the_limit(tmp_path):
    _, found = prepared(tmp_path, CLOSE, checks={"similarity": 0.99})
    assert counts(found, "near_duplicates")[0] == 0


# --- demonstrations ---

BOXED = row("One?", 2, "It is \\boxed{3}.\n#### 2")


def test_a_demonstration_that_states_another_answer_is_dropped_and_its_prompt_stays(tmp_path):
    files, found = prepared(tmp_path, [BOXED, row("Two?")])
    assert (questions(files["grpo"]), [r["id"] for r in files["sft"]]) == (["One?", "Two?"], ["train-2"])
    assert counts(found, "disagreements") == (1, 0, 1, 0)
    assert found["checks"]["disagreements"]["examples"] == [
        {"where": "train.jsonl line 1 (train-1)", "why": "states '3', and gold is '2'", "outcome": "dropped"}
    ]


def test_a_gold_column_that_says_otherwise(tmp_path):
    train = [
        {"question": "One?", "answer": "Final Answer: 3", "gold": "2"},
        {"question": "Two?", "answer": "Final Answer: 4", "gold": "4.0"},
    ]
    files, found = prepared(
        tmp_path, train, [{"question": "x?", "gold": 1}], checks={"disagreements": "warn"}, gold_column="gold"
    )
    assert [r["completion"] for r in files["sft"]] == ["Final Answer: 3", "Final Answer: 4"]
    assert counts(found, "disagreements") == (1, 0, 0, 1)


def test_no_demonstration_that_is_left_stops_preparation(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^no demonstration is left for SFT after the checks of data.checks: disagreements dropped 1 \(such as train.jsonl",
    ):
        prepared(tmp_path, [BOXED])


def test_disagreements_can_stop_preparation(tmp_path):
    with pytest.raises(
        DataError,
        match=r"^data.checks.disagreements found 1 demonstration\(s\) that state another answer than gold, the first at train.jsonl",
    ):
        prepared(tmp_path, [BOXED], checks={"disagreements": "fail"})
    assert not (tmp_path / "out").exists()


def test_arithmetic_is_wrong_on_purpose_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ratchet"):
        prepare.prepare(DataSection(arithmetic={"demonstrations": 100}), 1, tmp_path / "out")
    assert [m.partition(", the first")[0] for m in caplog.messages] == [
        "data.checks.disagreements: 15 demonstration(s) that state another answer than gold (15 kept)"
    ]
    assert json.loads((tmp_path / "out/card.json").read_text())["demonstrations"] == {
        "right": 40,
        "wrong": 15,
        "without_an_answer": 45,
    }


# --- long prompts ---


@pytest.mark.parametrize(("policy", "kept"), [("drop", ["short"]), ("warn", ["long", "short"])])
def test_prompts_that_are_too_long_for_the_model(policy, kept):
    assert [r["id"] for r in fitting(policy)] == kept


def test_prompts_that_are_too_long_can_stop_training():
    with pytest.raises(
        DataError,
        match=r"^1 of 2 prompts have more than 40 tokens, the first long with \d+; the model takes 50, completions included: lower grpo",
    ):
        fitting("fail")


def fitting(policy):
    tokenizer = scratch.train_tokenizer(["What is 1 + 1?"], 300)
    rows = [
        {"id": name, "prompt": [{"role": "user", "content": text}]}
        for name, text in (("long", "9" * 60), ("short", "é" * 5))
    ]
    return prompt_lengths.fitting(rows, tokenizer, ModelSection(), 50, 10, policy)


# --- GSM8K ---


def test_gsm8k_passes_with_the_defaults(tmp_path):
    source = GSM8K
    if not source.is_dir():
        pytest.skip(f"no GSM8K in {source}")
    prepare.prepare(DataSection(path=str(source), validation_size=0), 1, tmp_path / "out")
    found = json.loads((tmp_path / "out/card.json").read_text())
    assert {name: check["kept"] for name, check in found["checks"].items() if check["found"]} == {
        "contamination": 4,
        "near_duplicates": 1,
    }
    assert [found["splits"][name]["rows"] for name in ("train", "test")] == [7473, 1319]


# --- policies ---


@pytest.mark.parametrize(
    ("check", "policy", "message"),
    [
        (
            "missing",
            "warn",
            "a row without its question or answer can be neither repaired nor used: set it to drop or fail",
        ),
        (
            "unreadable",
            "fix",
            "a row that cannot be read or compared with can be neither repaired nor used: set it to drop or fail",
        ),
        ("conflicts", "fix", "nobody knows which gold answer is right: set it to drop, warn or fail"),
        ("near_duplicates", "fix", "nobody knows which of two wordings is right: set it to drop, warn or fail"),
        (
            "leaks",
            "warn",
            "what judges a model must not have trained it, and a row cannot be repaired out of a split: set it to drop or fail",
        ),
        ("contamination", "fix", "shared words cannot be repaired: set it to drop, warn or fail"),
        (
            "disagreements",
            "fix",
            "nobody knows whether the demonstration or the gold answer is right: set it to drop, warn, fail or auto",
        ),
        ("long_prompts", "fix", "a prompt that is cut asks something else: set it to drop, warn or fail"),
    ],
)
def test_what_a_check_cannot_do_is_refused(check, policy, message):
    with pytest.raises(ConfigError, match=f"^data.checks.{check} is {policy}, and {message}$"):
        load({"data": {"checks": {check: policy}}})


# --- card, progress, determinism ---


def test_card_is_of_the_files_and_names_neither_path_nor_time(tmp_path):
    train = [row("One?"), row("Two?"), BOXED | {"question": "Three?"}]
    _, found = prepared(tmp_path, train, name="a")
    _, again = prepared(tmp_path, train, name="b")
    assert found == again and (tmp_path / "a/card.md").read_bytes() == (tmp_path / "b/card.md").read_bytes()
    assert found["digest"] == card.digest(tmp_path / "a")
    assert found["splits"]["train"] == {
        "rows": 3,
        "mean_prompt_words": 1.0,
        "longest_prompt_words": 1,
        "longest_prompt_bytes": 6,
    }
    text = (tmp_path / "a/card.md").read_text()
    assert (
        "| disagreements | drop | 1 | 0 | 1 | 0 |" in text
        and "- train.jsonl line 3 (train-3) (dropped): `states '3', and gold is '2'`" in text
    )
    assert str(tmp_path) not in text + json.dumps(found)


def test_rows_are_counted_by_category(tmp_path):
    train = [
        row("One?") | {"category": "a"},
        row("Two?") | {"category": "b"},
        row("Three?") | {"category": "a"},
        row("Four?"),
    ]
    _, found = prepared(tmp_path, train)
    assert found["splits"]["train"]["categories"] == {"a": 2, "b": 1}


def test_progress_rises_to_its_end(tmp_path):
    events = []
    prepare.prepare(DataSection(), 1, tmp_path / "out", lambda **event: events.append(event))
    shares = [event["done"] / event["total"] for event in events if event["event"] == "progress"]
    assert shares == sorted(shares) and shares[-1] == 1 and len(shares) > 10


def test_the_same_bytes_in_other_processes_with_other_threads(tmp_path):
    lines = [
        row(f"{STORY} {'Then' if n % 3 else 'Now'} {n // 2} of them {'are' if n % 2 else 'were'} sold?", n // 2)
        for n in range(400)
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = (
        "import sys; from pathlib import Path; from configs.schema import DataSection; from tasks.core.data import prepare; "
        "prepare.prepare(DataSection(path=sys.argv[1], test_size=40, validation_size=20, max_samples=100, checks={'near_duplicates': 'drop', "
        "'contamination': 'drop', 'conflicts': 'drop'}), 3, Path(sys.argv[2]))"
    )
    for name, hash_seed, threads in (("a", "1", "1"), ("b", "2", "4")):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        env["PYTHONPATH"] = str(ROOT)
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "all.jsonl"), str(tmp_path / name)],
            check=True,
            env=env,
            capture_output=True,
        )
    a, b = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in "ab")
    assert a == b
    assert json.loads(a["report.json"])["num_near_duplicates"] > 50


def test_a_full_disk_is_said_to_be_one(tmp_path, monkeypatch):
    made = table.Table.__init__

    def small(self, file):
        made(self, file)
        self.db.execute("PRAGMA max_page_count = 16")

    monkeypatch.setattr(table.Table, "__init__", small)
    with pytest.raises(OSError) as caught:
        prepare.prepare(DataSection(), 1, tmp_path / "out")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_what_ratchet_check_says(tmp_path):
    _, found = prepared(tmp_path, [row("Lost \ufffd?"), row("It is cafÃ©?"), row("Two?"), row("two?")])
    assert preflight.found(found["checks"]) == "duplicates 1 fixed; encoding 1 fixed, 1 dropped"
    fits = "the longest prompt has 4 words in 24 bytes and fits into the 1,024 tokens of the model beside 32 new ones"
    assert preflight.longest(found["splits"], 1024, 32) == fits
    assert (
        preflight.longest(found["splits"], 300, 32)
        .partition(" and ")[2]
        .startswith("may not fit (tokens are counted before SFT")
    )


def test_bands_are_the_same_on_every_machine():
    assert checks._bands("Tom has 3 apples.")[:2] == [6282221465886724883, 5351604478076307634]
