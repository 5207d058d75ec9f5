"""Answers: where a completion or a gold solution states one, what number it is, and whether two are the same."""

import re
from fractions import Fraction

_FINAL = re.compile(r"final answer\s*:", re.IGNORECASE)
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([-+]?)\s*[$€£]?\s*([-+]?)\s*({_UNSIGNED})(?:\s*/\s*({_UNSIGNED}))?\s*%?(.*)")
_FRAC = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_DASHES = str.maketrans(dict.fromkeys("−–—﹣-", "-"))
_LATEX = str.maketrans({"\\": None, "{": " ", "}": " "})
_WRAPPING = " \t*_`\"'“”"
_LONGEST = 200  # characters; anything longer is no number that a gold answer holds, and conversion would be slow
# Words after a number that make another number, or two answers, of it.
_NOT_UNITS = {"and", "billion", "bn", "cubed", "dozen", "half", "hundred", "hundreds", "k", "million", "millions", "minus", "mn", "over",
              "plus", "squared", "thousand", "thousands", "times", "to", "trillion", "x"}  # fmt: skip
_HEDGES = {"maybe", "not", "or"}


def extract_answer(text: str) -> str | None:
    r"""The final answer that a completion states: after the last `Final Answer:`, else in the last `\boxed{}`, else after the last `####`, else None.

    A bare number in the text is no answer; neither is a form that breaks off before the answer.

    >>> extract_answer("48 + 24 = 72. Final Answer: 72")
    '72'
    """
    finals = list(_FINAL.finditer(text))
    if finals:
        answer = _first_line(text[finals[-1].end() :])
        return _boxed(answer) or answer if answer else None
    if "\\boxed{" in text:
        return _boxed(text)
    if "####" in text:
        return _first_line(text.rpartition("####")[2])
    return None


def _first_line(text: str) -> str | None:
    """The first line with anything on it, without Markdown around it; None where there is none."""
    line = text.lstrip(" \t\r\n*_").partition("\n")[0].strip(_WRAPPING + "\r")
    return line or None


def _boxed(text: str) -> str | None:
    """What the last boxed expression holds, braces balanced; None where it is missing, empty or not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin, depth = start + len("\\boxed{"), 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip() or None
    return None


def _number_parts(text: str) -> tuple[str, str, str] | None:
    """Sign, digits and divisor ("1" where there is none) of a text that is one number with at most a currency, % or unit."""
    if len(text) > _LONGEST:
        return None
    plain = _FRAC.sub(r"\1/\2", text).replace("\\text", " ").replace("\\,", "").replace("\\!", "").translate(_DASHES).translate(_LATEX)
    plain = plain.strip(_WRAPPING + "()").rstrip(". ").removesuffix("$").strip()
    match = _NUMBER.fullmatch(plain)
    if match is None or (match[1] and match[2]) or not _is_unit(match[5].strip()):
        return None
    sign = "-" if "-" in (match[1], match[2]) else ""
    divisor = match[4] or "1"
    if not Fraction(divisor.replace(",", "")):
        return None
    return sign, match[3].replace(",", "").removesuffix("."), divisor.replace(",", "").removesuffix(".")


def _is_unit(text: str) -> bool:
    """Whether what follows a number only says of what it is: words, and none that changes the number or offers a second one."""
    if not text:
        return True
    if not (text[0].isalpha() or text[0] in "°(/"):
        return False
    if any(not (c.isalpha() or c in " .'’/()°²³-") for c in text):
        return False
    words = re.findall(r"[^\W\d_]+", text.casefold())
    return bool(words) and words[0] not in _NOT_UNITS and not _HEDGES.intersection(words)


def parse_number(text: str) -> Fraction | None:
    """The exact value of one number, as people write it; None for anything else, two numbers among them.

    >>> parse_number("$1,080.50"), parse_number("-3/4"), parse_number("50%"), parse_number("72 clips."), parse_number("72 or 73")
    (Fraction(2161, 2), Fraction(-3, 4), Fraction(50, 1), Fraction(72, 1), None)
    """
    parts = _number_parts(text)
    return Fraction(f"{parts[0]}{parts[1]}") / Fraction(parts[2]) if parts else None


def normal_number(text: str) -> str | None:
    """A number without commas, signs of currency, per cent and units, as gold answers are kept ("1080", "-2.5", "3/4"); None for no number."""
    parts = _number_parts(text)
    if parts is None:
        return None
    return f"{parts[0]}{parts[1]}" + (f"/{parts[2]}" if parts[2] != "1" else "")


def same_answer(a: str | None, b: str | None) -> bool:
    """Whether two answers are the same number or, where neither is a number, the same text but for case and space. No answer equals nothing."""
    if a is None or b is None:
        return False
    x, y = parse_number(a), parse_number(b)
    if x is not None or y is not None:
        return x == y
    a, b = (" ".join(t.split()).casefold().rstrip(".") for t in (a, b))
    return a != "" and a == b


def is_formatted(text: str) -> bool:
    """Whether a completion states an answer in the form `Final Answer: ...`."""
    return _FINAL.search(text) is not None and extract_answer(text) is not None
