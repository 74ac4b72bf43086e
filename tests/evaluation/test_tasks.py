"""Tasks: found by name, identified by content, built from any directory."""

import json
import os
import shutil
from pathlib import Path

import pytest
from lm_eval.tasks import TaskManager

from sandhi_core.evaluation import requests
from sandhi_core.evaluation.requests import ask
from sandhi_core.evaluation.taskfiles import task_files, task_identity
from sandhi_core.evaluation.tasks import SPLITS, load_tasks
from tests.evaluation.local_tasks import QUESTIONS, choice_task, entry, included_task, settings


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
    included_task(tmp_path)
    names = [str(path.relative_to(tmp_path)) for path in task_files(tmp_path, "second")]
    assert names == ["below/second.yaml", "below/../first.yaml", "below/helpers.py", "below/../first.jsonl"]
    assert task_files(tmp_path, "arc_easy") == ()


def test_data_files_stand_beside_the_file_that_states_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    included_task(tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)
    suite = load_tasks(entry(tmp_path, ("second", "acc")), settings(tmp_path / "tasks"), tmp_path / "cache")
    assert suite.tasks[0].questions["search"][0].requests[0].args[0].startswith("Really ")


def test_patterns_of_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice_task(tmp_path / "tasks", dataset_kwargs={"data_files": {"test": ["lett*.jsonl"]}})
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in task_files(tmp_path / "tasks", "letters")] == ["letters.yaml", "letters.jsonl"]
    suite = load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path / "tasks"), tmp_path / "cache")
    assert sum(sum(suite.questions(split).values()) for split in SPLITS) == QUESTIONS


@pytest.mark.parametrize("file", ["below/second.yaml", "first.yaml", "first.jsonl", "below/helpers.py"])
def test_identity_follows_content_of_every_file(tmp_path: Path, file: str) -> None:
    included_task(tmp_path)
    before = task_identity(tmp_path, "second")
    assert task_identity(tmp_path, "second") == before
    with (tmp_path / file).open("a") as f:
        f.write("# changed\n" if file != "first.jsonl" else json.dumps({"query": "new"}) + "\n")
    assert task_identity(tmp_path, "second") != before


def test_identity_does_not_depend_on_the_place(tmp_path: Path) -> None:
    included_task(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert task_identity(tmp_path / "a", "second") == task_identity(tmp_path / "b", "second")


def test_an_edited_task_is_built_anew_in_the_same_process(tmp_path: Path) -> None:
    choice_task(tmp_path)
    asked = entry(tmp_path, ("letters", "acc"))
    (first,) = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    choice_task(tmp_path, doc_to_text="Again {{query}}")
    (second,) = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    assert first.identity != second.identity
    assert second.questions["search"][0].requests[0].args[0].startswith("Again ")


def test_edited_data_of_the_same_time_and_size_are_read_anew(tmp_path: Path) -> None:
    """The datasets library would find its earlier copy: it goes by path and time."""
    choice_task(tmp_path)
    asked, data = entry(tmp_path, ("letters", "acc")), tmp_path / "letters.jsonl"
    load_tasks(asked, settings(tmp_path), tmp_path / "cache")
    times = (data.stat().st_atime_ns, data.stat().st_mtime_ns)
    data.write_text(data.read_text().replace(" then", " next"))
    os.utime(data, ns=times)
    (task,) = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    assert all(q.document["query"].endswith(" next") for split in SPLITS for q in task.questions[split])


def test_a_task_that_shuffles_is_the_same_in_every_process(tmp_path: Path) -> None:
    """As lm_eval.simple_evaluate seeds the global generators, so that choices stand where it has them."""
    choice_task(tmp_path)
    (tmp_path / "shuffle.py").write_text(
        "import random\n\n\ndef text(doc):\n    return doc['query'] + str(random.random())\n"
    )
    (tmp_path / "shuffled.yaml").write_text(
        "include: letters.yaml\ntask: shuffled\ndoc_to_text: !function shuffle.text\n"
    )
    asked = entry(tmp_path, ("shuffled", "acc"))
    (first,) = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    ask.cache_clear()
    (second,) = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    assert first.identity == second.identity
    assert first.questions is not second.questions


def test_tasks_that_lm_eval_knows_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = choice_task(tmp_path / "own")
    monkeypatch.setattr(requests, "_own_tasks", lambda: TaskManager(include_path=str(folder), include_defaults=False))
    monkeypatch.chdir(folder)  # as lm-eval finds data files
    (tmp_path / "none").mkdir()
    suite = load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path / "none"), tmp_path / "cache")
    assert sum(sum(suite.questions(split).values()) for split in SPLITS) == QUESTIONS


def test_tags_and_python_classes(tmp_path: Path) -> None:
    choice_task(tmp_path, tag="crew")
    (tmp_path / "own.py").write_text(
        "from lm_eval.api.task import ConfigurableTask\n\n\n"
        "class Own(ConfigurableTask):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config={k: v for k, v in config.items() if k != 'class'})\n"
        "    def doc_to_text(self, doc, *args):\n"
        "        return 'Own ' + doc['query']\n"
    )
    (tmp_path / "own.yaml").write_text("include: letters.yaml\ntask: own\nclass: !function own.Own\n")
    asked = entry(tmp_path, ("letters", "acc"), ("own", "acc"))
    tagged, own = load_tasks(asked, settings(tmp_path), tmp_path / "cache").tasks
    assert own.questions["search"][0].requests[0].args[0].startswith("Own ")
    assert not tagged.questions["search"][0].requests[0].args[0].startswith("Own ")
