"""The rules behind the demo's tasks: each is a stream of items whose answer follows from the rule alone.

No data comes from outside. A stream may repeat an item or run out; `demo.tasks` draws from it, drops repeats and
keeps training and evaluation apart by `Item.key`, so two items that give each other away share a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from demo.seeds import seeded


@dataclass(frozen=True)
class Item:
    """One question: what is asked, the right answer, and answers that are plausible but wrong."""

    key: str
    prompt: str
    answer: str
    wrong: tuple[str, ...]


def sort_letters(rng: Random) -> Iterator[Item]:
    """Four different letters into alphabetical order; wrong answers are other orders of the same letters."""
    while True:
        letters = rng.sample(ascii_lowercase, 4)
        a, b, c, d = sorted(letters)
        orders = [(b, a, c, d), (a, c, b, d), (a, b, d, c), *(rng.sample(letters, 4) for _ in range(3))]
        yield Item(a + b + c + d, f"Sort: {' '.join(letters)} =", f"{a} {b} {c} {d}",
                   tuple(" ".join(order) for order in orders))  # fmt: skip


def largest_number(rng: Random) -> Iterator[Item]:
    """The largest of three different numbers of two digits; the wrong answers are the other two."""
    while True:
        numbers = rng.sample(range(10, 100), 3)
        text = [str(number) for number in numbers]
        best = str(max(numbers))
        key = " ".join(sorted(text))
        yield Item(key, f"Max: {' '.join(text)} =", best, tuple(number for number in text if number != best))


# From, to, and how many powers of ten lie between.
UNITS = (
    ("km", "m", 3), ("m", "cm", 2), ("m", "mm", 3), ("cm", "mm", 1), ("kg", "g", 3), ("t", "kg", 3),
    ("g", "mg", 3), ("l", "ml", 3), ("l", "cl", 2), ("l", "dl", 1), ("m", "dm", 1), ("hl", "l", 2),
)  # fmt: skip


def convert_units(rng: Random) -> Iterator[Item]:
    """A whole number of one unit in a smaller one; wrong answers are off by powers of ten or reverse the digits."""
    questions = [(number, *unit) for unit in UNITS for number in range(2, 600)]
    rng.shuffle(questions)
    for number, large, small, power in questions:
        wrong = [str(number * 10**other) for other in range(5)] + [str(number)[::-1].lstrip("0") + "0" * power]
        yield Item(f"{number} {large} {small}", f"Convert: {number} {large} to {small} =",
                   str(number * 10**power), tuple(wrong))  # fmt: skip


ONSETS = """
    b bl br c cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr tw v w wh z
""".split()
RIMES = """
    ab ack ade aff aim ake alk all amp an ap arn ash ast ate ay eal ean eck eed eel een eep eg elp end ent ep erk est
    ick ide ig ill im ind ine ing ink ip irl ish ite ob ock od oil ole oll ome oop op ore ort ot ound ow ub uck udge
    uff ug ull um ump un unt up urn ush ust uy ry ly ny
""".split()
PREFIXES = ("", "re", "un", "mis", "out", "over")
# Endings that change instead of taking -ed, as in "sing, sang".
STRONG = {"ing": "ang", "ink": "ank", "eep": "ept", "ow": "ew", "ide": "ode", "ind": "ound", "eel": "elt"}
VOWELS = "aeiou"


def regular_past(verb: str) -> str:
    """The spelling rules of -ed: after e, after a consonant and y, after one vowel and one consonant."""
    if verb.endswith("e"):
        return verb + "d"
    if verb[-1] == "y" and verb[-2] not in VOWELS:
        return verb[:-1] + "ied"
    if verb[-1] not in VOWELS + "wxy" and verb[-2] in VOWELS and verb[-3] not in VOWELS:
        return verb + verb[-1] + "ed"
    return verb + "ed"


def past_of(verb: str) -> str:
    """The past of an invented verb: a strong ending changes, every other one takes -ed by the spelling rules."""
    for ending, past in STRONG.items():
        if verb.endswith(ending):
            return verb.removesuffix(ending) + past
    return regular_past(verb)


def past_tense(rng: Random) -> Iterator[Item]:
    """The past of an invented verb; wrong answers follow a rule that does not apply to it."""
    verbs = [(stem, prefix) for onset in ONSETS for rime in RIMES for stem in [onset + rime] for prefix in PREFIXES]
    rng.shuffle(verbs)
    for stem, prefix in verbs:
        verb = prefix + stem
        last = max(verb.rfind(vowel) for vowel in VOWELS + "y")
        shifted = [verb[:last] + vowel + verb[last + 1 :] for vowel in "aeou"]
        wrong = [verb + "ed", verb + "d", verb + verb[-1] + "ed", verb[:-1] + "ied", regular_past(verb), *shifted]
        yield Item(stem, f"Past: {verb} =", past_of(verb), tuple(wrong))


def elements() -> dict[str, str]:
    """Eighteen invented elements and their symbols: the first letter and a later one, which must be remembered."""
    rng = seeded("elements")
    table: dict[str, str] = {}
    while len(table) < 18:
        name = rng.choice("bcmnrt") + rng.choice("aeiou") + rng.choice("bdgklmnrstvz")
        name += rng.choice(("ium", "on", "ine"))
        symbol = name[0].upper() + rng.choice(name[2:])
        if symbol not in table.values() and name not in table:
            table[name] = symbol
    return table


def formula(rng: Random) -> Iterator[Item]:
    """Two amounts of two elements as a formula; wrong answers take another symbol or exchange the amounts."""
    table = elements()
    while True:
        first, second = rng.sample(sorted(table), 2)
        m, n = rng.sample(range(2, 10), 2)
        a, b = table[first], table[second]
        like_a = [symbol for symbol in table.values() if symbol[0] == a[0] and symbol not in (a, b)]
        like_b = [symbol for symbol in table.values() if symbol[0] == b[0] and symbol not in (a, b)]
        wrong = [f"{x}{m}{b}{n}" for x in like_a] + [f"{a}{m}{y}{n}" for y in like_b] + [f"{a}{n}{b}{m}"]
        wrong += [f"{x}{m}{y}{n}" for x, y in zip(like_a, like_b, strict=False)] + [f"{b}{m}{a}{n}"]
        yield Item(" ".join(sorted((f"{m} {first}", f"{n} {second}"))), f"Formula: {m} {first} {n} {second} =",
                   f"{a}{m}{b}{n}", tuple(wrong))  # fmt: skip


ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"),
    (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def roman(number: int) -> str:
    """The number in Roman numerals."""
    numeral = ""
    for value, letters in ROMAN:
        numeral += letters * (number // value)
        number %= value
    return numeral


def roman_numerals(rng: Random) -> Iterator[Item]:
    """A Roman numeral as a number; wrong answers are near it."""
    for number in rng.sample(range(1, 4000), 3999):
        near = (number + step for step in (1, -1, 10, -10, 5, 100, -100, 50))
        yield Item(str(number), f"Roman: {' '.join(roman(number))} =", str(number),
                   tuple(str(other) for other in near if other > 0))  # fmt: skip


RULES: dict[str, Callable[[Random], Iterator[Item]]] = {
    "sort": sort_letters,
    "largest": largest_number,
    "units": convert_units,
    "past": past_tense,
    "formula": formula,
    "roman": roman_numerals,
}
