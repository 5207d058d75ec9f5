"""Answers: where a completion states one. Whether it is the right one says `same_answer` (compare.py)."""

import re
from typing import NamedTuple

from tasks.core.scoring.compare import normal_gold, same_answer

__all__ = ["extract_answer", "is_formatted", "normal_gold", "same_answer"]

_FINAL = re.compile(r"final answer[*_]{0,3}\s*[:：]", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBERS = re.compile(r"(?<![\w.])[-−]?[$€£]?[0-9]++(?:[,.'_ ][0-9]++)*+(?: ?/ ?[0-9]++)?%?")


class Form(NamedTuple):
    """A form in which answers are taught: what marks it, how it is written, and how a prompt asks for it."""

    marker: re.Pattern
    written: str
    asked: str


FORMS = {
    "final_answer": Form(_FINAL, "Final Answer: {}", "'Final Answer: ' and the answer"),
    "boxed": Form(_BOXED, r"\boxed{{{}}}", r"the answer in \boxed{}"),
    "answer_tags": Form(re.compile(r"<answer>"), "<answer>{}</answer>", "the answer in <answer></answer>"),
    "gsm8k": Form(re.compile(r"####"), "#### {}", "'#### ' and the answer"),
}
_WRAPPING = " \t*_`\"'“”"
# A line that only opens or closes a formula or a block of code: the answer stands on a line of its own below it.
_MARKS_ALONE = re.compile(r"(?:[ \t]*(?:\$\$?|\\[\[\]()]|```\w*)?[ \t\r*_]*(?:\n|\Z))*+")


def extract_answer(text: str, last_number: bool = False) -> str | None:
    r"""The final answer that a completion states, or None. The first of these forms that occurs counts, and of that the last one:

    1. `Final Answer: ...`, in any case, to the end of the line (or the next line with anything on it); of a `\boxed{}` in it, what it holds
    2. `\boxed{...}`, braces balanced
    3. `#### ...`, to the end of the line
    4. only with `last_number` (`grpo.reward_config.last_number`): the last number in the text

    A form that breaks off before its answer is no answer, whatever stands above it.

    >>> extract_answer("48 + 24 = 72. Final Answer: 72"), extract_answer("that makes 72 clips"), extract_answer("that makes 72 clips", last_number=True)
    ('72', None, '72')
    """
    end = None
    for found in _FINAL.finditer(text):
        end = found.end()
    if end is not None:
        answer = _first_line(text[end:])
        return _boxed(answer) or answer if answer else None
    if _BOXED.search(text):
        return _boxed(text)
    if "####" in text:
        return _first_line(text.rpartition("####")[2])
    return _last_number(text) if last_number else None


def is_formatted(text: str, form: str = "final_answer") -> bool:
    """Whether a completion states an answer in this form (`grpo.reward_config.answer_format`)."""
    return FORMS[form].marker.search(text) is not None and extract_answer(text) is not None


def write_answer(gold: str, form: str = "final_answer") -> str:
    r"""The gold answer as a demonstration states it.

    >>> write_answer("72"), write_answer("72", "boxed"), write_answer("72", "answer_tags"), write_answer("72", "gsm8k")
    ('Final Answer: 72', '\\boxed{72}', '<answer>72</answer>', '#### 72')
    """
    return FORMS[form].written.format(gold)


def instruction(form: str = "final_answer") -> str:
    """What a prompt says to ask for an answer in this form (`data.instruction: auto`)."""
    return f"Reason step by step and end with {FORMS[form].asked}."


def _first_line(text: str) -> str | None:
    """The first line with anything on it but marks (`**`, `\\[`, `$$`), without Markdown around it; None where there is none."""
    text = text.lstrip(" \t\r\n*_")
    line = text[_MARKS_ALONE.match(text).end() :].lstrip(" \t\r\n*_").partition("\n")[0].strip(_WRAPPING + "\r")
    return line or None


def _boxed(text: str) -> str | None:
    r"""What the last boxed expression holds, braces balanced (`\{` is none); None where it is missing, empty or not closed."""
    begin = None
    for found in _BOXED.finditer(text):
        begin = found.end()
    if begin is None:
        return None
    depth = 1
    for found in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return text[begin : begin + found.start()].strip() or None
    return None


def _last_number(text: str) -> str | None:
    last = None
    for found in _NUMBERS.finditer(text):
        last = found[0]
    return last
