"""`sandhi check` of a whole pool: what is wrong with tasks and machine is told like what is wrong with models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lm_eval.tasks import TaskManager

from pipelines import progress
from pipelines.checking import check
from sandhi_core.__main__ import main
from sandhi_core.checkpoints.checkpoint import Checkpoint
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
def test_an_include_path_that_is_no_folder_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(requests, "_own_tasks", lambda: pytest.fail("lm-eval's own index was searched"))
    if kind == "file":
        (tmp_path / "tasks").write_text("")
    (problem,) = errors(check(pool_file(tmp_path), tmp_path / "root"))
    assert (problem["code"], problem["model"], problem["file"]) == ("include-path", None, str(tmp_path / "tasks"))
    assert problem["message"] == "evaluation.include_path is no folder"


POOL = """\
name: p
models:
  - name: a
    path: a
    tasks: [{task: letters, metric: acc, budget: 0.1}]
  - name: b
    path: ./gone
    tasks:
      - {task: letters, metric: nonesuch, budget: 0.1}
  - name: c
    path: no/such-model
    tasks: [{task: nowhere, metric: acc, budget: 0.3}]
evaluation:
  include_path: tasks
  device: cuda
"""


def test_what_no_other_file_is_to_blame_for_is_told_of_the_pool_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(requests, "_own_tasks", lambda: TaskManager(include_defaults=False))
    choice_task(tmp_path / "tasks")
    tiny_llama(tmp_path / "a")
    file = tmp_path / "pool.yaml"
    file.write_text(POOL)
    document = check(file, tmp_path / "root")
    lines = {(p["code"], p["model"]): p["file"] for p in document["problems"]}
    assert lines == {
        ("directory-missing", "b"): f"{file}:7",
        ("task", "b"): f"{file}:8",
        ("hub-not-cached", "c"): f"{file}:11",
        ("task", "c"): f"{file}:12",
        ("budget-coarse", "c"): f"{file}:12",
        ("device-missing", None): f"{file}:15",
    }
    assert [g["models"] for g in document["plan"]["groups"]] == [["a"]]  # the others cannot be read
    assert re.fullmatch(
        r"reading the checkpoints of 3 models, [0-9.]+ KiB\nbuilding the tasks\n", capsys.readouterr().err
    )


def test_checkpoints_that_take_long_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REPEAT_SECONDS", 0.0)
    choice_task(tmp_path / "tasks")
    check(pool_file(tmp_path), tmp_path / "root")
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"  a, 1 of 2: [0-9.]+ \w+ read, [0-9.]+ \w+/s, at most [0-9:]+ left", told[1])
    assert any(line.startswith("  b, 2 of 2: ") for line in told)
    check(pool_file(tmp_path), tmp_path / "root", headers_only=True)
    assert (
        capsys.readouterr().err == "reading the checkpoints of 2 models\n  a, 1 of 2\n  b, 2 of 2\nbuilding the tasks\n"
    )


def test_headers_alone_give_the_same_plan_and_say_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice_task(tmp_path / "tasks")
    file = pool_file(tmp_path)
    whole = check(file, tmp_path / "root")
    monkeypatch.setattr(Checkpoint, "raw", lambda *_: pytest.fail("weights were read"))
    found = check(file, tmp_path / "other", headers_only=True)
    (warning,) = [p for p in found["problems"] if p not in whole["problems"]]
    assert (warning["code"], warning["severity"]) == ("weights-unread", "warning")
    assert found["ok"] is whole["ok"] is True
    assert found["plan"] == whole["plan"]
    assert list((tmp_path / "other" / "scans").iterdir()) == []  # nothing of it is kept


def test_a_build_reads_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(tmp_path / "pool.yaml"), "--headers-only"]) == 2
    assert "give --headers-only with --dry-run, or to check" in capsys.readouterr().err


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
