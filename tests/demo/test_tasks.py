"""The demo's tasks: enough questions, answers right by another computation, nothing trained on is asked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from demo.rules import RULES, elements
from demo.tasks import draw, write_tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("tasks")
    write_tasks(target)
    return target


def questions(folder: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def test_the_same_files_every_time(folder: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    assert {p.name for p in folder.iterdir()} == {p.name for p in tmp_path.iterdir()}
    assert all(p.read_bytes() == (tmp_path / p.name).read_bytes() for p in folder.iterdir())


@pytest.mark.parametrize("task", RULES)
def test_questions_are_many_distinct_and_sound(folder: Path, task: str) -> None:
    rows = questions(folder, task)
    assert len(rows) >= 900
    assert len({row["id"] for row in rows}) == len({row["query"] for row in rows}) == len(rows)
    for row in rows:
        choices = row["choices"]
        assert 3 <= len(choices) == len(set(choices)) <= 4
        assert not any(a != b and b.startswith(a) for a in choices for b in choices)


@pytest.mark.parametrize("task", RULES)
def test_nothing_that_is_asked_was_trained_on(task: str) -> None:
    data = draw(task)
    assert not {item.key for item in data.training} & {item.key for item in data.evaluation}
    assert not {item.prompt for item in data.training} & {item.prompt for item in data.evaluation}
    assert len(data.training) >= 1000


VALUES = {"M": 1000, "D": 500, "C": 100, "L": 50, "X": 10, "V": 5, "I": 1}
METRES = {"km": 1000.0, "m": 1.0, "dm": 0.1, "cm": 0.01, "mm": 0.001}
GRAMS = {"t": 1e6, "kg": 1000.0, "g": 1.0, "mg": 0.001}
LITRES = {"hl": 100.0, "l": 1.0, "dl": 0.1, "cl": 0.01, "ml": 0.001}


def answer(task: str, query: str) -> str | None:
    """The answer by another way than the rules take; None where there is none (invented verbs)."""
    words = query.removesuffix(" =").split(": ", 1)[1].split()
    if task == "sort":
        return " ".join(sorted(words))
    if task == "largest":
        return max(words, key=int)
    if task == "units":
        number, large, _, small = words
        table = next(t for t in (METRES, GRAMS, LITRES) if large in t and small in t)
        return str(round(int(number) * table[large] / table[small]))
    if task == "formula":
        table = elements()
        return f"{table[words[1]]}{words[0]}{table[words[3]]}{words[2]}"
    if task == "roman":
        values = [VALUES[letter] for letter in words]
        later = [*values[1:], 0]
        return str(sum(-v if v < after else v for v, after in zip(values, later, strict=True)))
    return None


@pytest.mark.parametrize("task", sorted(RULES.keys() - {"past"}))
def test_gold_is_right(folder: Path, task: str) -> None:
    for row in questions(folder, task):
        assert row["choices"][row["gold"]].strip() == answer(task, row["query"])


def test_pasts_follow_the_spelling_rules(folder: Path) -> None:
    found = {re.match(r"Past: (\w+) =", row["query"])[1]: row for row in questions(folder, "past")}  # type: ignore[index]
    strong = regular = 0
    for verb, row in found.items():
        past = row["choices"][row["gold"]].strip()
        if past.endswith("ed") and past[:-2] in (verb, verb[:-1], verb + verb[-1], verb[:-1] + "i"):
            regular += 1
        else:
            assert not past.endswith("ed") or past == verb + "d"
            strong += 1
    assert regular > strong > 0
