"""Numbers as people write them: one text, one exact value and its unit, or nothing. The rules are in docs/rewards.md."""

import re
from fractions import Fraction
from typing import NamedTuple

from tasks.core.scoring import units

LONGEST = 200  # characters; anything longer is no number that a gold answer holds, and conversion would be slow
_MOST_POWER = 1000  # of ten

_CHARACTERS = str.maketrans(
    dict.fromkeys("−–—﹣-‐‑‒", "-")
    | dict.fromkeys(
        "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\r", " "
    )
    | dict.fromkeys("’‘ʼ′`´", "'")
    | {
        "¼": " 1/4 ",
        "½": " 1/2 ",
        "¾": " 3/4 ",
        "⅐": " 1/7 ",
        "⅑": " 1/9 ",
        "⅒": " 1/10 ",
        "⅓": " 1/3 ",
        "⅔": " 2/3 ",
        "⅕": " 1/5 ",
        "⅖": " 2/5 ",
    }
    | {
        "⅗": " 3/5 ",
        "⅘": " 4/5 ",
        "⅙": " 1/6 ",
        "⅚": " 5/6 ",
        "⅛": " 1/8 ",
        "⅜": " 3/8 ",
        "⅝": " 5/8 ",
        "⅞": " 7/8 ",
        "⁄": "/",
        "∕": "/",
        "＄": "$",
        "％": "%",
    }
)
_WRAPPING = " *_\"'“”"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

# Groups begin with 1 to 9: 0,125 is a decimal. A single `1,234` is grouped and a single `1.234` is not: English, where only context could tell.
_ENGLISH = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?"
_INDIAN = r"[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?"
_CONTINENTAL = r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+,[0-9]+|[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}"
_SPACED = "|".join(rf"[1-9][0-9]{{0,2}}(?:{mark}[0-9]{{3}})+(?:[.,][0-9]+)?" for mark in " '_")
_DECIMAL_COMMA = r"0,[0-9]+|[1-9][0-9]*,(?:[0-9]{4,}|[0-9]{1,2})"
_PLAIN = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
_END = r"(?![0-9]|[.,'_][0-9])"
_NUMERAL = rf"(?:{_ENGLISH}|{_INDIAN}|{_CONTINENTAL}|{_SPACED}|{_DECIMAL_COMMA}|{_PLAIN}){_END}"
_GROUPED = re.compile(rf"{_ENGLISH}|{_INDIAN}")
_COMMA = re.compile(rf"(?:{_DECIMAL_COMMA}){_END}")

_SIMPLE = re.compile(r"[-+]?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_HEAD = re.compile(rf"([-+]?) ?({units.CURRENCY_SIGNS})? ?([-+]?) ?({_NUMERAL})")
_POWER = re.compile(
    r"[eE]([-+]?[0-9]+)(?![0-9.])| *[x×*·⋅] *10 *(?:(?:\^|\*\*) *\(?([-+]?[0-9]+)\)?(?![0-9.])|([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+))"
)
_TEN_TO = re.compile(r" *(?:\^|\*\*) *\(?([-+]?[0-9]+)\)?(?![0-9.])|([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_OVER = re.compile(rf" *(/) *({_NUMERAL})")
_MIXED = re.compile(r"(?: and)? +([0-9]+) */ *([0-9]+)(?![0-9]|[.,'_/] ?[0-9])")
_SCALE = re.compile(r" *(thousand|million|billion|trillion)\b", re.IGNORECASE)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNKNOWN = re.compile(r"(?<![^\W\d_²³])[^\W\d_²³](?![^\W\d_²³])")
_CALCULATES = re.compile(r"^[-−]|[0-9^²³√]|\\sqrt")
_INDEX = re.compile(r"_ *(?:\w|\{ *\w+ *\})|(?<=[^\W\d_])[₀-₉]+")
_CALL = re.compile(r"[^\W\d_]+\([^()]*\)")
_MONEY_AFTER = re.compile(rf" *({units.SIGNS_ALONE})(?![0-9])")
_PERCENT = re.compile(r" *(?:%|per ?cent\b)", re.IGNORECASE)

_MATH = re.compile(r"(\$\$?)([^$]*)\1(?! *[0-9])(.*)|\\[(\[](.*?)\\[)\]](?! *[0-9])(.*)", re.DOTALL)
_FRAC = re.compile(r"\\[dtc]?frac *(?:\{ *([-+]?[0-9][0-9.,]*) *\}|([0-9])) *(?:\{ *([0-9][0-9.,]*) *\}|([0-9]))")
_TEXTUAL = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|bm|boldsymbol|underline|boxed|operatorname) *\{([^{}]*)\}"
)
_LATEX = [
    (re.compile(r"\\!|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:[,;: ]|q?quad(?![a-z]))|~"), " "),
    (re.compile(r"\^ *\{? *\\circ *\}?|\\degree(?![a-z])"), "°"),
    (re.compile(r"\\(?:times|cdot)(?![a-z])"), "×"),
    (re.compile(r"\\([%&#_])"), r"\1"),
    (re.compile(r"\\pounds(?![a-z])"), "£"),
    (re.compile(r"\\euro(?![a-z])"), "€"),
    (re.compile(r"\^ *\{ *([-+]?[0-9]+) *\}"), r"^\1"),
]
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_UNIT_POWER = re.compile(r"(?<=[a-zA-Z]) *\^ *([23])(?![0-9])")


class Quantity(NamedTuple):
    """A value with its unit (names of `units`, empty where none is written) and its plain form, such as "1080", "3/4", "$2.50" or "5 km"."""

    value: Fraction
    unit: frozenset[str]
    plain: str


def cleaned(text: str) -> str:
    """A text without LaTeX's and Markdown's wrapping, its dashes and spaces made plain; a command that remains keeps its backslash."""
    text = text.translate(_CHARACTERS)
    if "**" in text:
        # Two spaces, here and below: what was wrapped side by side makes no groups of digits.
        text = _BOLD.sub(r"  \1  ", text)
    if any(mark in text for mark in "\\${^"):
        # \x01: a dollar sign that is money whatever stands around it.
        text = text.replace("\\$", "\x01").strip(" ")
        match = _MATH.fullmatch(text)
        if match:
            text = (match[2] or match[4] or "") + " " + (match[3] or match[5] or "")
        for pattern, plain in _LATEX:
            text = pattern.sub(plain, text)
        text = _TEXTUAL.sub(r"  \1  ", text)
        text = _FRAC.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]} ", text)
        text = _UNIT_POWER.sub(lambda m: {"2": "²", "3": "³"}[m[1]], text).replace("\x01", "$")
        text = text.replace("{", "  ").replace("}", "  ")
    return text.strip(_WRAPPING).rstrip(". ").strip(_WRAPPING)


def parse_quantity(text: str, *, as_gold: bool = False) -> Quantity | None:
    """The one number that a text is, exactly; None for anything else, two numbers among them.

    `as_gold` refuses what an answer may be given the benefit of: `1,5` (a decimal comma, or two numbers), `x = 5`, and `5m` (a unit, or a variable).
    """
    if len(text) > LONGEST:
        return None
    if _SIMPLE.fullmatch(text):
        return Quantity(Fraction(text), frozenset(), text.removeprefix("+"))
    plain = cleaned(text)
    if plain.startswith("(") and plain.endswith(")") and "," not in plain:
        plain = plain[1:-1].strip(" ")
    if "=" in plain:
        plain = None if as_gold else _right_side(plain)
    return _quantity(plain, as_gold) if plain else None


def _is_of_an_unknown(left: str) -> bool:
    """Whether the left side of an equation calculates with a letter (`2x`, `-x`, `x + 5`): the other side is then not what the letter is."""
    left = _INDEX.sub("", left)
    return _UNKNOWN.search(left) is not None and not _CALL.fullmatch(left) and _CALCULATES.search(left) is not None


def _right_side(text: str) -> str | None:
    """What `x = 5` says; None for two equations, for a comparison, and for a left side that is a number of its own and another one (`144/2 = 72` holds)."""
    left, _, right = (part.strip(" ") for part in text.partition("="))
    if "=" in right or not left or left[-1] in "<>!~≈:" or units.is_hedged(left) or _is_of_an_unknown(left):
        return None
    if own := _quantity(left, False):
        said = _quantity(right, False)
        if said is None or said.value != own.value or units.PERCENT in (own.unit, said.unit):
            return None
    return right


def _quantity(text: str, as_gold: bool) -> Quantity | None:
    head = _HEAD.match(text)
    if head is None or (head[1] and head[3]) or (_COMMA.match(head[4]) and (as_gold or text.startswith("("))):
        return None
    money, numeral, rest = head[2], head[4], text[head.end() :]
    found = _with_power(numeral, rest) or _with_fraction(numeral, rest) or (_value(numeral), _digits(numeral), rest)
    value, digits, rest = found
    if value is None:
        return None
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1].casefold()], rest[scale.end() :]
        digits = str(value)
    if money is None and (sign := _MONEY_AFTER.match(rest)):
        money, rest = sign[1], rest[sign.end() :]
    percent = _PERCENT.match(rest)
    label = rest[percent.end() if percent else 0 :].strip(" ")
    if as_gold and len(label) == 1 and rest[:1].isalpha():
        return None
    if not units.is_label(label) or (money and percent):
        return None
    unit = units.PERCENT if percent else units.unit(label, money)
    sign = "-" if "-" in (head[1], head[3]) else ""
    known = units.shown(label, money, bool(percent))
    return Quantity(-value if sign else value, unit, f"{sign}{known[0]}{digits}{known[1]}")


def _with_power(numeral: str, rest: str) -> tuple[Fraction | None, str, str] | None:
    """Value, digits and what follows of 1.5e3, 1.5 × 10^3 and 10^6; the value is None for a power that is out of reach."""
    match, base = _POWER.match(rest), _value(numeral)
    if match is None and numeral == "10":
        match, base = _TEN_TO.match(rest), Fraction(1)
    if match is None:
        return None
    given = next(group for group in match.groups() if group).translate(_SUPERSCRIPTS)
    if len(given) > 5 or abs(int(given)) > _MOST_POWER:
        return None, "", ""
    value = base * Fraction(10) ** int(given)
    return value, str(value), rest[match.end() :]


def _with_fraction(numeral: str, rest: str) -> tuple[Fraction | None, str, str] | None:
    """Value, digits and what follows of 3/4 and 1 1/2; the value is None for a fraction that is none."""
    if match := _OVER.match(rest):
        below = _value(match[2])
        # `1 234/5` may be a mixed number as well.
        if not below or " " in numeral + match[2]:
            return None, "", ""
        return _value(numeral) / below, f"{_digits(numeral)}/{_digits(match[2])}", rest[match.end() :]
    if numeral.isdecimal() and (match := _MIXED.match(rest)):
        if int(match[1]) >= int(match[2]):
            return None, "", ""
        value = int(numeral) + Fraction(int(match[1]), int(match[2]))
        return value, str(value), rest[match.end() :]
    return None


def _digits(numeral: str) -> str:
    """A numeral with a decimal point at most.

    >>> [_digits(n) for n in ("1,234.5", "1.234,5", "12,34,567", "1 234", "0,5", "72.")]
    ['1234.5', '1234.5', '1234567', '1234', '0.5', '72']
    """
    bare = numeral.replace(" ", "").replace("'", "").replace("_", "")
    if "," in bare and "." in bare:
        grouping = "," if bare.rfind(",") < bare.rfind(".") else "."
        bare = bare.replace(grouping, "")
    elif _GROUPED.fullmatch(bare) or bare.count(",") > 1:
        bare = bare.replace(",", "")
    elif bare.count(".") > 1:
        bare = bare.replace(".", "")
    return bare.replace(",", ".").removesuffix(".")


def _value(numeral: str) -> Fraction:
    return Fraction(_digits(numeral))
