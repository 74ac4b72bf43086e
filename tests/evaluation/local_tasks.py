"""Small local lm-eval tasks: multiple choice by accuracy, and a generation task."""

import json
from pathlib import Path
from typing import Any

import yaml

from sandhi_core.pools.pool import EvaluationSettings, ModelEntry

QUESTIONS = 40


def choice_task(folder: Path, name: str = "letters", **overrides: Any) -> Path:
    """Which letter comes next, three choices; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"query": f"{i}: {'abcdef'[i % 6]} then", "choices": [f" {c}\n" for c in ("ab", "bcd", "c")], "gold": i % 3}
        for i in range(QUESTIONS)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
        "metadata": {"version": 1.0},
    } | overrides
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def generation_task(folder: Path, name: str = "copy", **generation: Any) -> Path:
    """Continue a text; scored by exact match."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"query": f"say {'xyz'[i % 3]}{i}", "answer": "xyz"[i % 3]} for i in range(QUESTIONS)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False} | generation,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder


def included_task(folder: Path) -> Path:
    """`second` in a folder below its data: includes `first.yaml` beside the data, and asks by a function."""
    choice_task(folder, "first")
    below = folder / "below"
    below.mkdir()
    (below / "helpers.py").write_text("def text(doc):\n    return 'Really ' + doc['query']\n")
    (below / "second.yaml").write_text("include: ../first.yaml\ntask: second\ndoc_to_text: !function helpers.text\n")
    return folder


def entry(model: Path, *tasks: tuple[str, str], budget: float = 0.1) -> ModelEntry:
    return ModelEntry.model_validate(
        {
            "name": "m",
            "path": str(model),
            "tasks": [{"task": task, "metric": metric, "budget": budget} for task, metric in tasks],
        }
    )


def settings(folder: Path, **overrides: Any) -> EvaluationSettings:
    return EvaluationSettings.model_validate(
        {"include_path": str(folder), "dtype": "float32", "device": "cpu", **overrides}
    )
