"""`sandhi check` of a whole pool: what is wrong with tasks and machine is told like what is wrong with models."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipelines.checking import check
from sandhi_core.evaluation import requests
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny_llama


def pool_file(folder: Path, **evaluation: Any) -> Path:
    for seed, name in enumerate("ab"):
        tiny_llama(folder / name, seed)
    task = {"task": "letters", "metric": "acc", "budget": 0.2}
    models = [{"name": name, "path": name, "tasks": [task]} for name in "ab"]
    settings = {"include_path": "tasks", "device": "cpu"} | evaluation
    (folder / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "models": models, "evaluation": settings}))
    return folder / "pool.yaml"


def errors(document: dict[str, Any]) -> list[dict[str, Any]]:
    assert document["ok"] is not any(p["severity"] == "error" for p in document["problems"])
    return [p for p in document["problems"] if p["severity"] == "error"]


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_include_path_that_is_no_folder_is_told_of_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(requests, "_own_tasks", lambda: pytest.fail("lm-eval's own index was searched"))
    if kind == "file":
        (tmp_path / "tasks").write_text("")
    found = errors(check(pool_file(tmp_path), tmp_path / "root"))
    assert [(p["code"], p["model"], p["file"]) for p in found] == [("task", m, str(tmp_path / "tasks")) for m in "ab"]
    assert all(p["message"] == "evaluation.include_path is no folder" for p in found)


def test_a_task_that_cannot_be_built_is_told_of_its_models(tmp_path: Path) -> None:
    choice_task(tmp_path / "tasks")
    (tmp_path / "tasks" / "letters.jsonl").unlink()
    found = errors(check(pool_file(tmp_path), tmp_path / "root"))
    assert [(p["model"], p["file"]) for p in found] == [(m, str(tmp_path / "tasks")) for m in "ab"]


def test_a_device_that_is_not_there_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    choice_task(tmp_path / "tasks")
    found = errors(check(pool_file(tmp_path, device="cuda"), tmp_path / "root"))
    assert [p["code"] for p in found] == ["device-missing"]
    assert check(pool_file(tmp_path), tmp_path / "root")["ok"] is True
