"""What may stand beside a number: signs of currency, units of measurement, and words that only say of what it is."""

import re
from functools import lru_cache

PERCENT = frozenset({"%"})
_CURRENCIES = {
    "$": "$",
    "US$": "$",
    "USD": "$",
    "€": "€",
    "EUR": "€",
    "£": "£",
    "GBP": "£",
    "¥": "¥",
    "₹": "₹",
    "Rs": "₹",
    "Rs.": "₹",
    "INR": "₹",
}
_CURRENCIES |= {sign: sign for sign in "₩₽₺₫₴₦₱฿₪"}
CURRENCY_SIGNS = "|".join(re.escape(sign) for sign in sorted(_CURRENCIES, key=len, reverse=True))
SIGNS_ALONE = "|".join(re.escape(sign) for sign in _CURRENCIES if not sign.isascii() or sign == "$")

# Words after a number that make another number of it, anywhere in the label.
_HEDGES = {
    "maybe", "perhaps", "possibly", "probably", "not", "isn", "wasn", "aren", "cannot", "never", "or", "no", "nope", "wait", "but", "wrong", "incorrect",
    "false", "except", "plus", "minus", "roughly", "about", "almost", "nearly", "approx", "approximately", "circa", "ish",
    "half", "halves", "quarter", "quarters", "third", "thirds", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths",
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "hundreds", "dozen",
    "dozens",
}  # fmt: skip
# Words that do so right after the number.
_NOT_FIRST = {
    "and", "billion", "billions", "bn", "crore", "crores", "cubed", "factorial", "fold", "k", "lakh", "lakhs", "less", "mil", "million", "millions", "mn",
    "more", "over", "pi", "quadrillion", "quadrillions", "sqrt", "squared", "thousand", "thousands", "times", "to", "trillion", "trillions", "x",
}  # fmt: skip
# `72M` is 72 million; a metre is written small.
_MILLIONS = ("M", "B", "K")
_WORD = re.compile(r"[^\W\d_²³]+")
_MOST_WORDS = 12


def _aliases() -> dict[str, frozenset[str]]:
    """Written unit (lower case) -> names of the units that it may be."""
    table = {
        "in": "inch inches", "ft": "foot feet", "yd": "yds yard yards", "mi": "mile miles", "s": "sec secs second seconds", "min": "mins minute minutes",
        "h": "hr hrs hour hours", "day": "days", "week": "weeks wk wks", "month": "months", "year": "years yr yrs", "lb": "lbs pound pounds",
        "oz": "ounce ounces", "ton": "tons tonne tonnes", "gal": "gallon gallons", "qt": "quart quarts", "pt": "pint pints", "cup": "cups",
        "°": "degree degrees deg",
        "°C": "°c celsius", "°F": "°f fahrenheit", "rad": "radian radians", "mph": "", "kph": "kmh", "$": "dollar dollars usd bucks", "€": "euro euros eur",
        "£": "pound pounds gbp", "¢": "cent cents", "₹": "rupee rupees inr", "¥": "yen yuan", "ha": "hectare hectares", "acre": "acres", "J": "j joule joules",
        "W": "watt watts", "V": "volt volts", "N": "newton newtons", "Hz": "hz hertz", "byte": "bytes", "kb": "kilobyte kilobytes",
        "mb": "megabyte megabytes", "gb": "gigabyte gigabytes",
    }  # fmt: skip
    prefixes = {"": "", "k": "kilo", "c": "centi", "m": "milli", "d": "deci"}
    metric = {"m": ("meter", "metre"), "g": ("gram",), "l": ("liter", "litre")}
    for short, names in metric.items():
        for p, prefix in prefixes.items():
            table[p + short] = " ".join(f"{prefix}{name} {prefix}{name}s" for name in names)
    for length in ("in", "ft", "yd", "mi", "mm", "cm", "dm", "m", "km"):
        for power, words in (("²", ("square", "sq", "sq.")), ("³", ("cubic", "cu"))):
            written = [length, *table[length].split()]
            forms = [f"{word} {name}" for word in words for name in written] + [f"{name}{power}" for name in written]
            forms += [f"{name} {'squared' if power == '²' else 'cubed'}" for name in written]
            table[length + power] = "|".join(forms)
    found: dict[str, set[str]] = {}
    for name, words in table.items():
        for word in [name.casefold(), *(words.split("|") if "|" in words else words.split())]:
            found.setdefault(word, set()).add(name)
    return {word: frozenset(names) for word, names in found.items()}


_UNITS = _aliases()
_SPEEDS = {"mph": "mi/h", "kph": "km/h"}


def is_hedged(text: str) -> bool:
    """Whether a text takes back, doubts or changes the number beside it."""
    return not _HEDGES.isdisjoint(_WORD.findall(text.casefold()))


def is_label(text: str) -> bool:
    """Whether what follows a number only says of what it is: words, and none that changes the number or offers a second one."""
    if not text:
        return True
    if not (text[0].isalpha() or text[0] in "°¢(/") or any(not (c.isalpha() or c in " .,;:'/()°¢²³-") for c in text):
        return False
    if text.startswith(_MILLIONS) and not text[1:2].isalpha():
        return False
    words = _WORD.findall(text.casefold())
    if not words:
        return text in ("°", "¢")
    if len(words) > _MOST_WORDS or words[0] in _NOT_FIRST or is_hedged(text):
        return False
    # A letter alone is a variable (5x) unless it is a unit (5 m).
    return len(words[0]) > 1 or text[0] in "°(/" or words[0] in _UNITS


def unit(label: str, money: str | None = None) -> frozenset[str]:
    """Names of the units that a label may mean, such as {"km"} or {"$/h"}; its own words where it is none; nothing where there is neither.

    >>> unit("kilometers from home") == unit("km"), unit("km per hour") == unit("km/h"), unit("pounds") == {"lb", "£"}
    (True, True, True)
    """
    parts = [part.strip(" ") for part in re.split(r"/|\bper\b", label.casefold())]
    above = frozenset({_CURRENCIES[money]}) if money else _unit(parts[0])
    for part in parts[1:]:
        # `5 per hour` is a unit, too, whatever it counts.
        above = frozenset(f"{a}/{b}" for a in above or {""} for b in _unit(part))
    return above


@lru_cache(maxsize=4096)
def _unit(text: str) -> frozenset[str]:
    """The unit that a text begins with; its words where it is none."""
    words = text.strip(" .,;:()-").split()
    for count in range(min(3, len(words)), 0, -1):
        names = _UNITS.get(" ".join(words[:count]).rstrip(".,;:)"))
        if names:
            return frozenset(_SPEEDS.get(name, name) for name in names)
    return frozenset({" ".join(words)}) if words else frozenset()


def is_known(names: frozenset[str]) -> bool:
    """Whether these are units that another answer can contradict, rather than words such as `clips`."""
    return bool(names) and all(part in _KNOWN for name in names for part in name.split("/"))


_KNOWN = {name for names in _UNITS.values() for name in names} | set(_CURRENCIES.values()) | {"%"}


def shown(label: str, money: str | None, percent: bool) -> tuple[str, str]:
    """What a gold answer keeps before and after its digits: a sign of currency, %, a unit; never words such as `clips`."""
    if percent:
        return "", "%"
    known = is_known(unit(label, money)) and not (money and "/" not in label and "per" not in label.split())
    after = f" {label}" if known and label else ""
    return (_CURRENCIES[money], after) if money else ("", after)
