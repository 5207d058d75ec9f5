"""Comparison: whether an answer is the gold one. What the gold answer looks like decides how; docs/rewards.md gives every rule with its reason."""

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from tasks.core.scoring import expressions, units
from tasks.core.scoring.numerals import cleaned, parse_quantity

_LONGEST = 1000  # characters of an answer that is compared as anything but text
_LEAD = re.compile(
    r"(?:so |thus |therefore |hence )?,? *(?:the )?(?:final |correct )?(?:answer|option|choice) *(?:is|=|:) *:? *",
    re.IGNORECASE,
)
# Words that say what a number is: `The total cost is`, `Total:`; and those among them with which it would be another one.
_NAMED = re.compile(
    r"(?:[^\W\d_][^\d\n!=:<>≤≥≠≈~]{0,80}?)??(?:\b(?:is|are|was|were|equals)\b|:) *:? *|= *", re.IGNORECASE
)
_ANOTHER = {
    "twice", "double", "triple", "more", "less", "least", "most", "over", "under", "above", "below", "at", "than", "between", "square", "squared", "root",
    "inverse", "reciprocal", "opposite", "negative", "absolute",
}  # fmt: skip
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORD = re.compile(r"(yes|no|true|false)(?=$|[.,;:!\n]| -)(.*)", re.IGNORECASE | re.DOTALL)
_CHOICE_GOLD = re.compile(r"\(([A-Ja-j])\)\.?|([A-Ja-df-hj])[.):]?|([EI])[.):]?")
_CHOICE = re.compile(r"(?:option |choice |answer )?(\()?([A-J])(\))?(.*)", re.IGNORECASE | re.DOTALL)
_OTHER_CHOICE = re.compile(
    r"(?<![\w'])\(?([A-J])\)?(?![\w'])(?! +[a-z])|(?<![\w'])\(?([A-J])\)(?!\w)|\b(?:or|and|not) +\(?([A-J])\b"
)
_TAKEN_BACK = re.compile(r"[ ,]*(?:is|are|was|or|and|/|isn't|not)\b", re.IGNORECASE)
_TERM = r"[0-9]+(?:\.[0-9]+)?"
_RATIO = re.compile(rf"{_TERM}(?: *(?::|∶|\bto\b) *{_TERM}){{1,5}}", re.IGNORECASE)
_TEXT_GOLD = re.compile(r"\$?\\(?:text|textbf|mathrm|mbox) *\{([^{}]*[^\W\d_]{2}[^{}]*)\}\$?")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FUNCTIONS = re.compile(
    r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|pi|sqrt|gcd|lcm|max|min|mod|pmatrix|bmatrix|matrix|cases|array)\b"
)
_WORDS = re.compile(r"[^\W\d_]{2}")
# A tower, an exponent of four digits, a factorial of three: what takes long to compute is no answer to compare.
_HUGE = re.compile(r"(?:\^|\*\*)[^\s+\-=,;]*(?:\^|\*\*)|(?:\^|\*\*)\W*[0-9]{4}|[0-9]{3}[\s)}]*!|!\s*!|[0-9]{40}")
# Numbers alone that make no quantity: `1,5` (1.5, or 1 and 5), `2-3`, `1/0`, `48 + 24`. Only a list with spaces (`1, 5`) says what it is.
_UNCLEAR = re.compile(r"[-−–+*/0-9.,;:%$€£' ]*")
_BRACKETS = "([])"


class Gold(NamedTuple):
    """A gold answer that was understood: its kind, what is compared, and the form in which data sets keep it."""

    kind: str  # number, ratio, word, choice, text or expression
    value: Any
    plain: str


@lru_cache(maxsize=65_536)
def read_gold(text: str) -> Gold | None:
    r"""What a gold answer is; None for one that cannot be understood, which no answer could be compared with.

    >>> [read_gold(t).kind for t in ("$1,080", "3:4", "Yes", "(B)", r"\sqrt{2}", r"\text{Evelyn}")], read_gold("3 or 4")
    (['number', 'ratio', 'word', 'choice', 'expression', 'text'], None)
    """
    text = text.strip()
    if not text or len(text) > _LONGEST:
        return None
    plain = cleaned(text)
    if (word := plain.strip(".! ").casefold()) in _OPPOSITES:
        return Gold("word", word, word)
    if match := _CHOICE_GOLD.fullmatch(plain):
        letter = next(group for group in match.groups() if group).upper()
        return Gold("choice", letter, letter)
    if _RATIO.fullmatch(plain):
        terms = _terms(plain)
        return Gold("ratio", terms, ":".join(re.findall(_TERM, plain)))
    if quantity := parse_quantity(text, as_gold=True):
        unit = quantity.unit if units.is_known(quantity.unit) else frozenset()
        return Gold("number", (quantity.value, unit), quantity.plain)
    if match := _TEXT_GOLD.fullmatch(text):
        return Gold("text", _folded(match[1]), f"\\text{{{match[1].strip()}}}")
    expression = _expression(text)
    if (
        expression is not None
        and (", " in text or not _UNCLEAR.fullmatch(expression))
        and expressions.parses(expression)
    ):
        return Gold("expression", expression, expression)
    return None


def normal_gold(text: str) -> str | None:
    """A gold answer as data sets keep it ("1080", "-2.5", "3/4", "50%", "$18", "5 km", "3:4", "yes", "B"); None for one that cannot be understood."""
    gold = read_gold(text)
    return gold.plain if gold else None


def same_answer(answer: str | None, gold: str | None) -> bool:
    """Whether an answer is the gold one. No answer is never right. Never raises over what an answer says, and takes bounded time.

    A gold answer that is none of the known kinds is compared as text, but for case and space.

    >>> same_answer("1,080 clips.", "1080"), same_answer("50%", "0.5"), same_answer("5 m", "5 km"), same_answer("5", "5 km")
    (True, False, False, True)
    """
    if answer is None or gold is None:
        return False
    if answer == gold:
        return answer.strip() != ""
    read = read_gold(gold)
    if read is None:
        return _folded(answer) == _folded(gold) != ""
    if len(answer) > _LONGEST:
        return False
    return _RULES[read.kind](answer, read.value)


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold().strip(" .*_\"'")


def _stated(answer: str) -> str:
    """An answer without its wrapping and without words such as `the answer is` before it."""
    plain = cleaned(answer)
    match = _LEAD.match(plain)
    return plain[match.end() :] if match else plain


def _number(answer: str, gold: tuple[Fraction, frozenset[str]]) -> bool:
    value, unit = gold
    found = parse_quantity(answer)
    if found is None and (rest := _after_its_name(answer)):
        found = parse_quantity(rest)
    if found is None or found.value != value:
        return False
    if unit:
        return not found.unit or not unit.isdisjoint(found.unit)
    # A percent sign on what the gold answer gives as a proportion says something else.
    return found.unit != units.PERCENT or abs(value) >= 1 or value == 0


def _after_its_name(answer: str) -> str | None:
    """What stands behind the words that say what it is; None where there are none, and where they make it something else."""
    answer = answer.strip(" *_")
    match = _NAMED.match(answer)
    if match is None or units.is_hedged(match[0]) or not _ANOTHER.isdisjoint(re.findall(r"\w+", match[0].casefold())):
        return None
    return answer[match.end() :]


def _ratio(answer: str, gold: tuple[Fraction, ...]) -> bool:
    plain = cleaned(answer)
    if not _RATIO.fullmatch(plain):
        plain = cleaned(_after_its_name(answer) or "")
    return _RATIO.fullmatch(plain) is not None and _terms(plain) == gold


def _terms(ratio: str) -> tuple[Fraction, ...]:
    return tuple(Fraction(term) for term in re.findall(_TERM, ratio))


def _word(answer: str, gold: str) -> bool:
    match = _WORD.fullmatch(_stated(answer))
    if match is None or match[1].casefold() != gold:
        return False
    others = {*_OPPOSITES, "maybe", "or"} - {gold}
    return others.isdisjoint(re.findall(r"\w+", match[2].casefold()))


def _choice(answer: str, gold: str) -> bool:
    match = _CHOICE.fullmatch(_stated(answer))
    if match is None or match[2].upper() != gold or (match[1] and not match[3]):
        return False
    rest = match[4]
    if not rest.strip(" .:"):
        return True
    if not (match[3] or (match[2].isupper() and (rest[0] in ".:" or rest.startswith(" -")))) or _TAKEN_BACK.match(rest):
        return False
    others = {next(letter for letter in found if letter) for found in _OTHER_CHOICE.findall(rest)}
    return others <= {gold, "I"}


def _text(answer: str, gold: str) -> bool:
    return _folded(_stated(answer)) == gold


def _same_expression(answer: str, gold: str) -> bool:
    found = _expression(answer)
    if found is None:
        return False
    one, other = ("".join(text.split()) for text in (found, gold))
    if one == other:
        return True
    # math-verify folds case, in which variables differ, and takes a pair, an interval and a list for one another.
    if one.casefold() == other.casefold() or _brackets(one) != _brackets(other):
        return False
    return expressions.equal(gold, found)


def _brackets(text: str) -> str:
    """The brackets around a pair or an interval."""
    around = text[:1] + text[-1:]
    return around if "," in text and set(around) & set(_BRACKETS) else ""


def _expression(text: str) -> str | None:
    """The LaTeX of an expression, without dollar signs around it; None for words, and for what is too long, too deep or too huge to compare."""
    text = text.strip().strip("*").rstrip(".").strip()
    match = _LEAD.match(text)
    text = text[match.end() :] if match else text
    for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(begin) and text.endswith(end) and len(text) > len(begin + end):
            text = text[len(begin) : -len(end)].strip()
    text = text.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("−", "-")
    if (
        not text
        or len(text) > 300
        or "$" in text
        or text.count("{") + text.count("(") + text.count("\\sqrt") > 40
        or _HUGE.search(text)
    ):
        return None
    words = _FUNCTIONS.sub(" ", _COMMAND.sub(" ", text))
    return None if _WORDS.search(words) or "\n" in text else text


_RULES = {
    "number": _number,
    "ratio": _ratio,
    "word": _word,
    "choice": _choice,
    "text": _text,
    "expression": _same_expression,
}
