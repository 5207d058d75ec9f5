import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RewardComponent, RewardConfig
from tasks.core.scoring import rewards
from tasks.core.scoring.answers import extract_answer, is_formatted, normal_gold, same_answer

EXTRACTED = [
    # Final Answer
    ("48 + 24 = 72. Final Answer: 72", "72"),
    ("Final Answer: 71\nNo, wait.\nFinal Answer: 72", "72"),
    ("**Final Answer:** 72", "72"),
    ("**Final Answer**: 72", "72"),
    ("__Final Answer__: `72`", "72"),
    ("final answer : 72", "72"),
    ("FINAL ANSWER：72", "72"),
    ("Final answer:\n\n72\nbecause", "72"),
    ("Final Answer: 72 clips\r\n", "72 clips"),
    ("Final Answer: $\\boxed{72}$", "72"),
    ("Final Answer: \\boxed{72}. Done", "72"),
    ("\\boxed{71} Final Answer: 72", "72"),
    # the formula on lines of its own, as many models write it
    ("**Final Answer:**\n\\[\n\\boxed{72}\n\\]", "72"),
    ("Final Answer:\n\\[\n72\n\\]", "72"),
    ("Final Answer:\r\n\r\n$$\r\n72\r\n$$\r\n", "72"),
    ("Final Answer: $$\n\\frac{3}{4}\n$$", "\\frac{3}{4}"),
    ("Final Answer:\n```text\n72\n```", "72"),
    ("Final Answer:\n\\[\n\\]\n", None),
    ("\\boxed{72}\nFinal Answer:\n\\[", None),
    ("Final Answer:\n$$72$$", "$$72$$"),
    ("#### 71\nFinal Answer: 72", "72"),
    ("Final Answer: 72\n#### 71", "72"),
    ("Final Answer:", None),
    ("Final Answer: 72\nFinal Answer:", None),
    ("\\boxed{72} Final Answer:", None),
    ("Final Answer: ** ", None),
    # boxed
    ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
    ("\\boxed{1} then \\boxed{a{b{c}}d}", "a{b{c}}d"),
    ("\\boxed {72}", "72"),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("\\boxed{\\{1}", "\\{1"),
    ("#### 71 \\boxed{72}", "72"),
    ("\\boxed{72", None),
    ("\\boxed{71} \\boxed{72", None),
    ("\\boxed{}", None),
    # ####
    ("worked\n#### 72", "72"),
    ("#### 71\n#### 72 clips\nmore", "72 clips"),
    ("####", None),
    ("#### 72 ####", None),
    # nothing
    ("the result is 72", None),
    ("The answer is 72.", None),
    ("72", None),
    ("", None),
    ("\n" * 50, None),
]


@pytest.mark.parametrize(("text", "answer"), EXTRACTED)
def test_extracted_answer(text, answer):
    assert extract_answer(text) == answer


LAST_NUMBERS = [
    ("the result is 72", "72"),
    ("first 71, then 72.", "72"),
    ("that makes $1,080.50 in all", "$1,080.50"),
    ("it falls by -5 degrees", "-5"),
    ("about 3/4 of it", "3/4"),
    ("half, or 50%", "50%"),
    ("no number", None),
    ("v2x", None),
    ("71 Final Answer: 72 and 73", "72 and 73"),
    ("71 Final Answer:", None),
    ("\\boxed{72} and 73", "72"),
]


@pytest.mark.parametrize(("text", "answer"), LAST_NUMBERS)
def test_last_number_is_taken_where_the_config_allows_it_and_no_other_form_occurs(text, answer):
    assert extract_answer(text, last_number=True) == answer


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        ("Final Answer: 72", True),
        ("final answer: 72", True),
        ("Final Answer:  ", False),
        ("\\boxed{72}", False),
        ("72", False),
    ],
)
def test_is_formatted(text, formatted):
    assert is_formatted(text) is formatted


# (gold, right answers, wrong answers)
NUMBERS = [
    ("72", ["72", " 72. ", "72.0", "72.00", "+72", "072", "**72**", '"72"', "`72`", "(72)", "$72$", "\\(72\\)", "\\text{72}", "{72}"],
           ["-72", "7.2", "720", "71.99999999999", "72 or 73", "72, 73", "72 73", "71 to 72", "seventy-two", "72!", "nan", "٧٢", "7²", "\\pm 72", "72/",
            "--72"]),
    ("72", ["72 clips", "72 clips altogether in April and May.", "72\\text{ clips}", "72 km", "$72", "€72", "72%", "72 (clips)", "72°", "**72** clips",
            "$$72$$", "72 $", "72€", "72 € in all", "72 isosceles triangles", "72 falsely labelled boxes", "72 pairs of shoes"],
           ["72 million", "72k", "72x", "72 apples or maybe more", "72 not", "72 dozen", "72 clips and a half", "72. So 73", "about 72", "~72", "≈72",
            "72 $5", "72$ $73", "$$72$$73", "72€%", "72 twenty", "72 lakh", "72 mil", "72 trillions", "72 thousandths", "72 pi", "72 factorial", "72 nearly",
            "72, almost", "72ish or so", "72 isn't it", "72 cannot be"]),
    ("72", ["x = 72", "48 + 24 = 72", "the answer is 72", "So the final answer is: 72", "144/2 = 72", "\\frac{144}{2} = 72", "$144/2 = $72 per hour"],
           ["48 + 24", "71 = 72", "143/2 = 72", "72% = 72", "72 = 72%", "144/2 = 72 = 72", "72 = 72 = 72", "x > 72", "x >= 72", "x != 72", "not x = 72",
            "72 = x", "\\sqrt{5184}", "6^2 \\cdot 2"]),
    ("1234", ["1,234", "1 234", "1\u00a0234", "1\u202f234", "1'234", "1’234", "1_234", "1{,}234", "1\\,234", "1,\\!234", "1,234.00", "1.234,00",
            "$1,234", "1234.", "1.234e3"],
             ["1.234", "12,34", "1,23,4", "1,2345", "1;234", "1, 234", "$1$234", "\\mathbf{1}\\mathbf{234}", "**1****234**", "1**2**34", "1-234", "1/234"]),
    ("1.234", ["1.234", "1.2340", "1,2340"], ["1,234", "1234", "1 234", "1.234.000"]),
    ("1234.5", ["1,234.5", "1.234,5", "1 234,5", "1'234.5", "1_234.50", "1234,5", "€1.234,50"], ["12345", "1.2345", "1,234,5", "1.234.5"]),
    ("1234567", ["1,234,567", "1.234.567", "1 234 567", "12,34,567", "1'234'567", "1_234_567", "1.234567 million", "1.234567 \\times 10^6"],
                ["1,234.567", "1.234,567", "12,345,67", "123,4567"]),
    ("0.5", ["1/2", "0.5 = 1/2", "$$\\frac{1}{2}$$", ".5", "0,5", "½", "\\frac{1}{2}", "\\frac12", "\\dfrac{1}{2}", "$\\frac{1}{2}$ cup", "5e-1", "2/4"],
            ["50%", "0.5%", "1/3", "5",
            "0.50001", "1:2", "1"]),
    ("1/3", ["1/3", "2/6", "\\frac{1}{3}", "⅓"], ["0.3333", "0.333333333333", "33%", "3", "1/0", "1/3/1"]),
    ("-3/4", ["-3/4", "−3/4", "-0.75", "-\\frac{3}{4}", "\\frac{-3}{4}", "–0,75"], ["3/4", "-4/3", "--3/4"]),
    ("1 1/2", ["3/2", "1.5", "1½", "1 1/2", "1 and 1/2", "1\\frac{1}{2}", "1 \\frac12"], ["11/2", "1/2", "1 3/2", "-1.5", "1 1/2/1"]),
    ("-5", ["-5", "−5", "–5", "- 5", "-5.0", "-$5", "$-5"], ["5", "--5", "(5)"]),
    ("1500", ["1.5e3", "1.5E+3", "1.5 x 10^3", "1.5 × 10³", "1.5*10^3", "1.5 \\cdot 10^{3}", "15e2", "1.5 thousand"], ["1.5e4", "1.5", "1.5 x 10",
            "1e999999999", "1.5e3.5"]),
    ("0.002", ["2e-3", "2 × 10⁻³", "2 \\times 10^{-3}", "0.002", "1/500"], ["2e3", "0.0020001"]),
    ("1000000", ["10^6", "10^{6}", "1e6", "1 million", "1,000,000"], ["10^7", "106", "10^6^1", "9^9^9^9"]),
    ("0", ["0", "-0", "0.0", "0%", "$0"], ["", "none", "o"]),
]  # fmt: skip
QUANTITIES = [
    ("5 km", ["5 km", "5 kilometers", "5 kilometres", "5", "5.0 km", "5 km away", "5\\text{ km}"], ["5 m", "5 miles", "5 km/h", "5 clips", "5%", "$5",
            "5000 m", "5 km²", "5 kilometers per hour"]),
    ("12 cm^2", ["12 cm²", "12 square centimeters", "12 sq cm", "12 \\text{ cm}^2", "12"], ["12 cm", "12 m²", "12 cm³"]),
    ("60 km/h", ["60 km/h", "60 km per hour", "60 kilometers per hour", "60 kph", "60"], ["60 km", "60 mph", "60 m/s"]),
    ("50%", ["50%", "50 %", "50\\%", "50 percent", "50 per cent", "50"], ["0.5", "1/2", "5%", "50 km", "$50"]),
    ("$18.50", ["$18.50", "18.5", "\\$18.50", "18.50 dollars", "US$18.50", "USD 18.50", "18.50 $", "18,50$"], ["18.50 €", "18.50/hr", "18.50 per day",
            "€18.50", "18.50 euros", "18.50 cents", "18.50%",
            "$18.50 per hour", "1850"]),
    ("£5", ["£5", "5 pounds", "5"], ["$5", "5 kg"]),
    ("Rs. 500", ["₹500", "500 rupees", "500"], ["$500"]),
    ("90°", ["90°", "90 degrees", "90^\\circ", "90"], ["90°C", "90%"]),
]  # fmt: skip
OTHERS = [
    ("3:4", ["3:4", "3 : 4", "3 to 4", "3\\text{ to }4", "$3:4$", "the answer is 3:4"], ["4:3", "3/4", "0.75", "6:8", "3:4:5", "3:45", "3"]),
    ("1:2:3", ["1:2:3", "1 : 2 : 3"], ["1:2", "3:2:1"]),
    ("yes", ["yes", "Yes", "YES.", "**Yes**", "Yes, because 3 > 2.", "Yes - it is", "\\text{Yes}"], ["no", "yes and no", "yes or no",
            "Yes, or maybe not", "yes, no", "not yes", "yesterday", "true", "y", "1"]),
    ("No", ["no", "No.", "No, it is not."], ["yes", "No, yes", "none", "no one", "not"]),
    ("True", ["true", "True."], ["false", "yes", "True, false"]),
    ("B", ["B", "(B)", "B.", "B)", "b", "(b)", "**B**", "\\text{(B)}", "Option B", "The answer is (B)", "B) 42 clips", "(B) A dog", "B: red", "B. I do",
            "\\textbf{B}"],
          ["A", "A or B", "B or C", "B, C", "B and C", "(B) or (C)", "B) 42 or C) 43", "(B) is wrong, (C)", "Bob", "B is wrong", "not B", "BC", "(B", "42"]),
    ("(A)", ["A", "(A)", "a)"], ["A cat", "a cat", "(B)", "An answer"]),
    ("\\text{Evelyn}", ["Evelyn", "\\text{Evelyn}", "evelyn.", "**Evelyn**", "the answer is Evelyn"], ["Eve", "Evelyn and Bob", "not Evelyn", ""]),
    ("\\sqrt{2}", ["\\sqrt{2}", "\\sqrt2", "$\\sqrt{2}$", "2^{1/2}", "x = \\sqrt{2}", "1.414213562373"], ["1.414", "\\sqrt{3}", "2", "-\\sqrt{2}",
            "\\pm\\sqrt{2}", "\\sqrt{2}, \\sqrt{3}", "root two", "\\sqrt{2", "9^9^9^9"]),
    ("2\\sqrt{3}", ["2\\sqrt{3}", "\\sqrt{12}", "2 \\cdot \\sqrt{3}"], ["\\sqrt{6}", "3\\sqrt{2}", "12"]),
    ("\\frac{\\pi}{2}", ["\\pi/2", "\\frac{\\pi}{2}", "0.5\\pi"], ["\\pi", "90", "\\frac{2}{\\pi}", "1.57"]),
    ("x^2 + 2x + 1", ["(x+1)^2", "1 + 2x + x^2", "x^{2}+2x+1"], ["x^2+2x", "X^2+2X+1", "(x-1)^2", "x^2+2x+1 or 7"]),
    ("(1, 2)", ["(1,2)", "(1, 2)", "$(1, 2)$"], ["(2,1)", "1, 2", "[1, 2]", "(1, 2]", "(1,2,3)"]),
    ("[0, 1)", ["[0,1)", "[0, 1)"], ["(0,1)", "[0,1]", "0,1"]),
    ("1, 5", ["1, 5", "5, 1", "\\{1, 5\\}"], ["1", "5", "1, 5, 6", "1.5", "15"]),
    ("blue whale", ["Blue  Whale.", "blue whale"], ["blue", "whale", "a blue whale", ""]),
]  # fmt: skip
NAMED = [
    (
        "72",
        ["The total cost is $72.", "Total: 72", "= 72", "is 72", "**The total is** 72", "Natalia's total is 72 clips", "A = 72",
         "x_1 = 72", "f(2) = 72", "x + y = 72"],
        ["The total is 72 or 73", "The total is at least 72", "At least: 72", "It isn't: 72", "twice the answer is 72",
         "half of it is 72", "the square is 72", "step 2: 72"],
    ),
    ("72", ["Cost of 2 apples = 72"], ["2x = 72", "-x = 72", "x^2 = 72", "x/2 = 72", "x + 5 = 72", "\\sqrt{x} = 72", "72 M", "72M", "72K"]),
    ("5 km", ["the distance is 5 km"], ["the distance is 5 m"]),
    ("3:45", ["Time: 3:45", "the ratio is 3:45"], ["Time: 45"]),
    ("B", ["The correct option is B", "B: 42 clips"], ["The correct option is C"]),
]  # fmt: skip
COMPARED = [
    (gold, a, same)
    for gold, right, wrong in NUMBERS + QUANTITIES + OTHERS + NAMED
    for same, answers in ((True, right), (False, wrong))
    for a in answers
]


def test_the_table_is_as_large_as_it_claims():
    assert len(EXTRACTED) + len(LAST_NUMBERS) + len(COMPARED) >= 400


@pytest.mark.parametrize(("gold", "answer", "same"), COMPARED)
def test_same_answer(gold, answer, same):
    assert same_answer(answer, gold) is same


@pytest.mark.parametrize(("answer", "gold"), [(None, "72"), ("72", None), (None, None), ("", ""), (" ", " ")])
def test_no_answer_is_never_right(answer, gold):
    assert same_answer(answer, gold) is False


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("72", "72"),
        (" 1,080. ", "1080"),
        ("$1,080.", "$1080"),
        ("-2.50", "-2.50"),
        ("+3/4", "3/4"),
        ("1½", "3/2"),
        ("72 clips", "72"),
        ("5 km", "5 km"),
        ("50 %", "50%"),
        ("1.234,5", "1234.5"),
        ("2e3", "2000"),
        ("3 to 4", "3:4"),
        ("YES", "yes"),
        ("(c)", "C"),
        ("e", "e"),
        ("18.50 €", "€18.50"),
        ("$$72$$", "72"),
        ("$\\sqrt{2}$", "\\sqrt{2}"),
        ("\\text{ Evelyn }", "\\text{Evelyn}"),
        # no answer that another could be compared with
        ("many", None),
        ("three", None),
        ("3 or 4", None),
        ("1,5", None),  # a decimal comma, or two numbers
        ("1/0", None),
        ("2-3", None),
        ("48 + 24", None),
        ("1, 5", "1, 5"),
        ("5m", "5m"),  # five times m
        ("5 m", "5 m"),
        ("about 5", None),
        ("", None),
        ("   ", None),
        ("\\frac{1}{", None),
        ("9" * 2000, None),
    ],
)
def test_gold_answers_as_data_sets_keep_them(text, plain):
    assert normal_gold(text) == plain
    assert plain is None or normal_gold(plain) == plain


ADVERSARIAL = [
    "\\boxed{" * 100_000,
    "\\boxed{" + "{" * 1_000_000,
    "\\boxed{" + "\\" * 1_000_001 + "}",
    "Final Answer: " + "9" * 1_000_000,
    "Final Answer: " * 100_000,
    "final answer" + " " * 1_000_000,
    "final answer *" * 100_000,
    "Final Answer: " + "$$\n" * 300_000,
    "Final Answer: " + "* \n" * 300_000 + "\\[ \n" * 300_000,
    "Final Answer: 1/0",
    "Final Answer: " + "1," * 50_000,
    "Final Answer: " + "1 " * 90,
    "Final Answer: " + "1_" * 90 + "x",
    "Final Answer: " + "(" * 150,
    "Final Answer: " + "$" * 199,
    "Final Answer: " + "\\frac{" * 30,
    "Final Answer: " + "= " * 90,
    "Final Answer: 9^9^9^9",
    "Final Answer: 1e999999999",
    "Final Answer: 10^999999999",
    "Final Answer: 10^{10^{10}}",
    "Final Answer: 99999!",
    "Final Answer: 1e-999999999",
    "Final Answer: \\sqrt{" + "\\sqrt{" * 39 + "2" + "}" * 40,
    "#" * 1_000_000,
    "=" * 1_000_000,
    "1 = " * 250_000,
    "1 + 1 = " * 100_000,
    "# * > " * 100_000,
    "Step 1 " * 100_000,
    "1. " * 100_000,
    "." * 50_000 + " " * 50_000,
    "1" + "/1" * 300_000,
    "-" * 300_000 + "1" * 300_000,
    "1." * 300_000,
    "\n" * 1_000_000,
    "\x00\ud800 Final Answer: \ud800",
    "Final Answer: \u202e72",
    "Final Answer: " + "\U0001d7d5" * 100,
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("gold", ["72", "B", "\\sqrt{2}", "blue whale"])
def test_no_text_breaks_the_rewards_in_a_thread(gold):
    config = RewardConfig(
        components=[RewardComponent(type=t) for t in ("accuracy", "length_penalty", "step", "format")], last_number=True
    )
    reward, found = rewards.build("combined", config), []
    n = len(ADVERSARIAL)
    thread = threading.Thread(target=lambda: found.extend(reward.score(ADVERSARIAL, [gold] * n, [10] * n)))
    thread.start()
    thread.join()
    assert [row["accuracy"] for row in found] == [0.0] * n


PIECES = (
    "Final Answer: ", "\\boxed{", "}", "#### ", "\\frac{1}{2}", "1,234", "9^9^9", "-", "−", "$", "%", " km", "yes", "(B)", "3:4", "\\sqrt", "{", "=", "\n",
    "e9999", "½", "!",
)  # fmt: skip
TEXTS = st.one_of(st.sampled_from(PIECES), st.text(max_size=20), st.integers().map(str), st.floats().map(str))


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(st.lists(TEXTS, max_size=12).map("".join), st.sampled_from(["72", "B", "yes", "1/2", "3:4"]))
def test_any_text_is_scored_0_or_1(text, gold):
    values = rewards.build("accuracy", RewardConfig(last_number=True)).score([text], [gold], [1])[0]
    assert values["accuracy"] in (0.0, 1.0)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.decimals(min_value=-(10**12), max_value=10**12, places=2),
    st.decimals(min_value=-(10**12), max_value=10**12, places=2),
)
def test_two_numbers_are_the_same_answer_where_they_are_equal(a, b):
    assert same_answer(f"{a:,}", str(b)) is (a == b)
    assert same_answer(f"{a:,}", f"{a:f}") is True
