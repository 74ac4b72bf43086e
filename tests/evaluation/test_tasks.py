"""Tasks: found by name, identified by content, built from any directory, refused with a reason."""

import json
from pathlib import Path

import pytest

from sandhi_core.errors import TaskError
from sandhi_core.evaluation.taskfiles import task_files, task_identity
from sandhi_core.evaluation.tasks import SPLITS, load_tasks
from tests.evaluation.local_tasks import QUESTIONS, choice_task, entry, generation_task, settings


def test_every_question_is_in_one_split_in_lm_evals_order(tmp_path: Path) -> None:
    choice_task(tmp_path / "tasks")
    suite = load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path / "tasks"), tmp_path / "cache")
    (task,) = suite.tasks
    ids = {split: [q.requests[0].doc_id for q in task.questions[split]] for split in SPLITS}
    assert sorted(i for found in ids.values() for i in found) == list(range(QUESTIONS))
    assert all(found == sorted(found) for found in ids.values())
    assert suite.questions("search") == {"letters": len(ids["search"])}


def test_data_files_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice_task(tmp_path / "tasks" / "deep", "elsewhere")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    suite = load_tasks(entry(tmp_path, ("elsewhere", "acc")), settings(tmp_path / "tasks"), tmp_path / "cache")
    assert sum(sum(suite.questions(split).values()) for split in SPLITS) == QUESTIONS


def test_files_of_a_task(tmp_path: Path) -> None:
    choice_task(tmp_path, "first")
    (tmp_path / "helpers.py").write_text("def text(doc):\n    return doc['query']\n")
    (tmp_path / "second.yaml").write_text("include: first.yaml\ntask: second\ndoc_to_text: !function helpers.text\n")
    names = [path.name for path in task_files(tmp_path, "second")]
    assert names == ["second.yaml", "helpers.py", "first.yaml", "first.jsonl"]
    assert task_files(tmp_path, "arc_easy") == ()


@pytest.mark.parametrize("file", ["second.yaml", "first.yaml", "first.jsonl", "helpers.py"])
def test_identity_follows_content_of_every_file(tmp_path: Path, file: str) -> None:
    choice_task(tmp_path, "first")
    (tmp_path / "helpers.py").write_text("def text(doc):\n    return doc['query']\n")
    (tmp_path / "second.yaml").write_text("include: first.yaml\ntask: second\ndoc_to_text: !function helpers.text\n")
    before = task_identity(tmp_path, "second")
    assert task_identity(tmp_path, "second") == before
    with (tmp_path / file).open("a") as f:
        f.write("# changed\n" if file != "first.jsonl" else json.dumps({"query": "new"}) + "\n")
    assert task_identity(tmp_path, "second") != before


def test_an_edited_task_is_built_anew_in_the_same_process(tmp_path: Path) -> None:
    choice_task(tmp_path)
    asked = entry(tmp_path, ("letters", "acc"))
    first = load_tasks(asked, settings(tmp_path), tmp_path / "cache")
    choice_task(tmp_path, doc_to_text="Again {{query}}")
    second = load_tasks(asked, settings(tmp_path), tmp_path / "cache")
    assert first.identity != second.identity
    assert second.tasks[0].questions["search"][0].requests[0].args[0].startswith("Again ")


@pytest.mark.parametrize(
    ("metric", "reason"), [("accuracy", "no metric 'accuracy'"), ("acc,strict", "no metric 'acc,strict'")]
)
def test_unknown_metric(tmp_path: Path, metric: str, reason: str) -> None:
    choice_task(tmp_path)
    with pytest.raises(TaskError, match=reason) as caught:
        load_tasks(entry(tmp_path, ("letters", metric)), settings(tmp_path), tmp_path / "cache")
    assert "acc, acc_norm" in caught.value.problem.remedy


def test_unknown_task(tmp_path: Path) -> None:
    choice_task(tmp_path)
    with pytest.raises(TaskError, match="task 'leters' is not below"):
        load_tasks(entry(tmp_path, ("leters", "acc")), settings(tmp_path), tmp_path / "cache")


def test_two_definitions_of_a_task(tmp_path: Path) -> None:
    choice_task(tmp_path / "a")
    choice_task(tmp_path / "b")
    with pytest.raises(TaskError, match="defined 2 times"):
        load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path), tmp_path / "cache")


def test_missing_data(tmp_path: Path) -> None:
    choice_task(tmp_path)
    (tmp_path / "letters.jsonl").unlink()
    with pytest.raises(TaskError, match="cannot build task 'letters'"):
        load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("sampling", [{"do_sample": True}, {"do_sample": True, "temperature": 0.7}, {"temperature": 1}])
def test_sampling_is_refused(tmp_path: Path, sampling: dict[str, object]) -> None:
    generation_task(tmp_path, **sampling)
    with pytest.raises(TaskError, match="samples its answers"):
        load_tasks(entry(tmp_path, ("copy", "exact_match")), settings(tmp_path), tmp_path / "cache")


def test_a_task_with_too_few_questions_for_a_split(tmp_path: Path) -> None:
    choice_task(tmp_path)
    kept = (tmp_path / "letters.jsonl").read_text().splitlines(keepends=True)[:1]
    (tmp_path / "letters.jsonl").write_text("".join(kept))
    with pytest.raises(TaskError, match="has no question in the"):
        load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path), tmp_path / "cache")
