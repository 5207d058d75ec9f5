"""What went wrong in a completion, for a report that says more than a share of right answers."""

import ast
import operator
import re
from fractions import Fraction

from tasks.core.scoring import answers

# In the order in which they are looked for: the first that holds is the class.
CLASSES = {
    "truncated": "cut off at max_new_tokens",
    "wrong_format": "the right answer, in a form that does not count",
    "no_answer": "no answer",
    "wrong_arithmetic": "an equation that does not hold",
    "wrong_reasoning": "another wrong answer",
}
_TERM = r"[0-9][0-9,]*(?:\.[0-9]+)?"
_EQUATION = re.compile(
    rf"(?<![\w.^/*+\-)] )(?<![\w.^/*+\-)])({_TERM}(?: *[-+*/×÷x−] *\$?{_TERM}){{1,8}}) *= *\$?({_TERM})(?![\w/^%]| *[-+*/×÷−] *[0-9(])"
)
_PLAIN = str.maketrans({"×": "*", "x": "*", "÷": "/", "−": "-", ",": None, "$": None, " ": None})
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def error_class(completion: str, answer: str | None, gold: str, correct: bool, truncated: bool) -> str | None:
    """One of CLASSES for a completion that is not right, None for one that is."""
    if correct:
        return None
    if truncated:
        return "truncated"
    if answer is None:
        last = answers.extract_answer(completion, last_number=True)
        return "wrong_format" if answers.same_answer(last, gold) else "no_answer"
    return (
        "wrong_arithmetic"
        if any(not holds(*found.groups()) for found in _EQUATION.finditer(completion))
        else "wrong_reasoning"
    )


def holds(sum_: str, result: str) -> bool:
    """Whether an equation of plain numbers holds, to the decimals that its result is given with; one that cannot be computed counts as holding.

    >>> holds("48 + 24", "72"), holds("2 x 3 + 1", "8"), holds("10 / 3", "3.33"), holds("1 / 0", "1")
    (True, False, True, True)
    """
    try:
        value = _value(ast.parse(sum_.translate(_PLAIN).lstrip("0") or "0", mode="eval").body)
    except (SyntaxError, ZeroDivisionError, KeyError):
        return True
    plain = result.replace(",", "")
    decimals = len(plain.partition(".")[2])
    # One unit of the last decimal: people round, and cut off.
    off = abs(value - Fraction(plain))
    return off == 0 or (value.denominator != 1 and off < Fraction(1, 10**decimals))


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    return Fraction(str(node.value))
