"""What is asked: two multiple-choice tasks and a generation task, as ordinary local lm-eval tasks."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from demo.tasks import definition, draw, question
from sandhi_core.evaluation.requests import ask
from sandhi_core.evaluation.taskfiles import task_identity
from sandhi_core.evaluation.tasks import Suite, SuiteTask
from sandhi_core.records import Split

TASKS = ("past", "units")
SHOTS = 5
"""Solved examples before every question, the same for all of a task, as lm-eval gives them with `num_fewshot`."""
GENERATION = "generated"
SPLIT: Split = "search"
"""The benchmark deals no splits: all questions stand in this one."""


def rows(task: str, questions: int, choices: int | None = None, shots: int = 0) -> list[dict[str, Any]]:
    """The task's first questions after `shots` solved examples; with `choices`, the right answer and as many wrong
    ones as make up that number."""
    data = draw(task)
    found = [question(task, item) for item in data.evaluation[:questions]]
    solved = "".join(f"{item.prompt} {item.answer}\n" for item in data.training[:shots])
    for row in found:
        row["query"] = solved + row["query"]
    if choices is None:
        return found
    for row in found:
        right = row["choices"][row["gold"]]
        wrong = [choice for choice in row["choices"] if choice != right]
        row["choices"] = [right, *wrong[: choices - 1]]
        row["gold"] = 0
    return found


def write(
    folder: Path,
    questions: int,
    choices: int | None = None,
    tasks: Sequence[str] = TASKS,
    shots: int = SHOTS,
) -> Path:
    """The task files for `questions` questions of each task, and one that has the same prompts answered in text."""
    folder.mkdir(parents=True)
    asked = {task: rows(task, questions, choices, shots) for task in tasks}
    for task, found in asked.items():
        _write(folder, task, definition(task), found)
    generated = {
        "task": f"sandhi_{GENERATION}",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choosing = definition(GENERATION)
    del choosing["doc_to_choice"]
    _write(folder, GENERATION, choosing | generated, [row for found in asked.values() for row in found])
    return folder


def _write(folder: Path, name: str, config: dict[str, Any], found: list[dict[str, Any]]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in found))
    config["dataset_kwargs"] = {"data_files": {"test": str(data)}}  # lm-eval's own command runs elsewhere
    (folder / f"{config['task']}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def suite(folder: Path, tasks: Sequence[str], cache: Path) -> Suite:
    """All questions of the tasks that `write` left in `folder`, built once."""
    return Suite(tuple(_task(folder, f"sandhi_{task}", cache) for task in tasks))


def _task(folder: Path, name: str, cache: Path) -> SuiteTask:
    asked = ask(folder, name, 42, cache, task_identity(folder, name))
    (metric,) = asked.task.aggregation()
    aggregate, kind = asked.task.aggregation()[metric], asked.task._filters[0].name
    return SuiteTask(name, metric, kind, True, aggregate, asked.task, {SPLIT: asked.questions}, name)


def shortened(whole: Suite, questions: int) -> Suite:
    """The first `questions` of each task."""
    return Suite(tuple(replace(t, questions={SPLIT: t.questions[SPLIT][:questions]}) for t in whole.tasks))


def decisions(asked: Suite) -> list[Any]:
    """Of every question, from the responses that its requests hold now: the choice taken, or the text given."""
    found: list[Any] = []
    for task in asked.tasks:
        for one in task.questions[SPLIT]:
            responses = [request.resps[0] for request in one.requests]
            found.append(responses[0] if isinstance(responses[0], str) else taken([r[0] for r in responses]))
    return found


def taken(likelihoods: Sequence[float]) -> int:
    """The likeliest choice, the first of equals, as lm-eval takes it."""
    return max(range(len(likelihoods)), key=lambda i: likelihoods[i])
