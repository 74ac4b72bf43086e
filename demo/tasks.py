"""Turns the rules into tasks: questions held out from training, written as ordinary local lm-eval tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from demo.rules import RULES, Item
from demo.seeds import seed, seeded

EVALUATION_ITEMS = 1000
TRAINING_ITEMS = 6000
HELD_OUT_TENTHS = 3  # the smallest task, of 3999 items, still gives 1000 questions
CHOICES = 4


@dataclass(frozen=True)
class TaskData:
    """A task's items: no key occurs on both sides."""

    training: list[Item]
    evaluation: list[Item]


def draw(task: str) -> TaskData:
    """Draw a task's items. The side an item falls on depends on its key alone, not on what was drawn before."""
    training: list[Item] = []
    evaluation: list[Item] = []
    seen: set[str] = set()
    for item in RULES[task](seeded("items", task)):
        held_out = seed("side", task, item.key) % 10 < HELD_OUT_TENTHS
        side, limit = (evaluation, EVALUATION_ITEMS) if held_out else (training, TRAINING_ITEMS)
        if len(side) < limit and item.prompt not in seen:
            seen.add(item.prompt)
            side.append(item)
        if len(training) == TRAINING_ITEMS and len(evaluation) == EVALUATION_ITEMS:
            break
    return TaskData(training, evaluation)


def question(task: str, item: Item) -> dict[str, Any]:
    """One row of the evaluation file.

    A choice ends in a newline: were one choice a prefix of another, its log-likelihood could never be the smaller.
    """
    name = f"{task}:{item.key}:{item.prompt}"
    rng = seeded("choices", name)
    wrong = sorted({answer for answer in item.wrong if answer != item.answer})
    choices = [*rng.sample(wrong, min(CHOICES - 1, len(wrong))), item.answer]
    rng.shuffle(choices)
    return {
        "id": f"{task}-{seed('id', name):016x}",
        "query": item.prompt,
        "choices": [choice + "\n" for choice in choices],
        "gold": choices.index(item.answer),
    }


def definition(task: str) -> dict[str, Any]:
    """The lm-eval task; its data file lies beside the YAML file."""
    return {
        "task": f"sandhi_{task}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def write_tasks(folder: Path, questions: int = EVALUATION_ITEMS) -> None:
    """Write every task's YAML and JSONL files into the folder, with the first so many `questions`."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in RULES:
        rows = [json.dumps(question(task, item)) + "\n" for item in draw(task).evaluation[:questions]]
        (folder / f"{task}.jsonl").write_text("".join(rows), encoding="utf-8")
        text = yaml.safe_dump(definition(task), sort_keys=False)
        (folder / f"sandhi_{task}.yaml").write_text(text, encoding="utf-8")
