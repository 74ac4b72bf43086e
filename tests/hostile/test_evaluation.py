"""Tasks, models and score logs that are wrong: refused with the reason, or scored as wrong, never as a traceback."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks import TaskManager

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import CheckpointError, EvaluationError, StoreError, TaskError
from sandhi_core.evaluation import requests
from sandhi_core.evaluation.evaluator import Evaluator, Weights, score_directory
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.taskfiles import find_task, local_data_files, task_identity
from sandhi_core.evaluation.tasks import SuiteTask, load_tasks
from sandhi_core.pools.pool import ModelEntry
from sandhi_core.records import Evaluation, TaskResult
from tests.evaluation.local_tasks import choice_task, entry, generation_task, settings
from tests.evaluation.test_evaluator import Q_PROJ, evaluator, replaced
from tests.models import edit_tensors, tiny_llama


def load(folder: Path, task: str = "letters", metric: str = "acc", **changes: Any) -> SuiteTask:
    asked = entry(folder, (task, metric))
    (task_,) = load_tasks(asked, settings(folder, **changes), folder.parent / "cache").tasks
    return task_


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return choice_task(tmp_path / "tasks")


def scorer(tmp_path: Path, model: Path, asked: ModelEntry | None = None, **changes: Any) -> Evaluator:
    choice_task(tmp_path / "tasks")
    return evaluator(tmp_path, model, asked or entry(model, ("letters", "acc")), **changes)


# --- tasks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["accuracy", "acc,strict", ""])
def test_unknown_metric(folder: Path, metric: str) -> None:
    wanted = entry(folder, ("letters", "acc")).tasks[0].model_copy(update={"metric": metric})
    asked = entry(folder, ("letters", "acc")).model_copy(update={"tasks": (wanted,)})
    with pytest.raises(TaskError, match=f"no metric '{metric}'") as caught:
        load_tasks(asked, settings(folder), folder / "cache")
    assert "acc, acc_norm" in caught.value.problem.remedy


def test_a_metric_without_a_direction(folder: Path) -> None:
    choice_task(folder, metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": None}])
    with pytest.raises(TaskError, match="whether more or less of metric 'acc' is better"):
        load(folder)


def test_a_metric_without_an_aggregation(folder: Path) -> None:
    choice_task(folder, metric_list=[{"metric": "acc", "aggregation": "meen", "higher_is_better": True}])
    with pytest.raises(TaskError, match="aggregates metric 'acc' by nothing"):
        load(folder)


def test_unknown_task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_own_tasks", lambda: TaskManager(include_defaults=False))
    with pytest.raises(TaskError, match=r"task 'leters' is neither below .* nor among lm-eval's own"):
        load(folder, "leters")


@pytest.mark.parametrize(("written", "remedy"), [("leters", "did you mean letters?"), ("arc", "name a single task")])
def test_a_mistyped_task_is_told_what_was_meant(
    folder: Path, monkeypatch: pytest.MonkeyPatch, written: str, remedy: str
) -> None:
    choice_task(folder)
    monkeypatch.setattr(requests, "_own_tasks", lambda: TaskManager(include_defaults=False))
    with pytest.raises(TaskError) as caught:
        load(folder, written)
    assert caught.value.problem.remedy.startswith(remedy)


def test_a_group_of_tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = folder.parent / "own"
    choice_task(own)
    (own / "all.yaml").write_text("group: everything\ntask: [letters]\n")
    monkeypatch.setattr(requests, "_own_tasks", lambda: TaskManager(include_path=str(own), include_defaults=False))
    with pytest.raises(TaskError, match="'everything' is a group of tasks"):
        load(folder, "everything")


def test_two_definitions_of_a_task(tmp_path: Path) -> None:
    choice_task(tmp_path / "tasks" / "a")
    choice_task(tmp_path / "tasks" / "b")
    with pytest.raises(TaskError, match="defined 2 times") as caught:
        load(tmp_path / "tasks")
    assert caught.value.problem.file == str(tmp_path / "tasks" / "b" / "letters.yaml")


@pytest.mark.parametrize("text", ["task: letters\nmetric_list: [\n", "task: letters\n\ttabs: 1\n"])
def test_task_files_that_are_no_yaml(folder: Path, text: str) -> None:
    (folder / "letters.yaml").write_text(text)
    with pytest.raises(TaskError, match=r"task file cannot be read: .* line") as caught:
        load(folder)
    assert caught.value.problem.file == str(folder / "letters.yaml")


def test_broken_files_of_other_tasks_do_not_matter(folder: Path) -> None:
    (folder / "other.yaml").write_text("task: others\nmetric_list: [\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00task: letters\n")
    (folder / "list.yaml").write_text("- task: letters\n")
    assert find_task(folder, "letters") == folder / "letters.yaml"
    load(folder)


@pytest.mark.parametrize(
    ("include", "reason"),
    [("nothing.yaml", "No such file"), ("letters.yaml", "Include cycle"), (".", "Is a directory")],
)
def test_includes_that_lead_nowhere(folder: Path, include: str, reason: str) -> None:
    (folder / "letters.yaml").write_text(f"include: {include}\ntask: letters\n")
    with pytest.raises(TaskError, match=reason):
        load(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"doc_to_text": "{{query"},
        {"doc_to_text": "{{no_such_column}}", "doc_to_target": "{{1 / 0}}"},
        {"output_type": "divination"},
        {"test_split": "no_such_split"},
    ],
)
def test_tasks_that_lm_eval_cannot_build(folder: Path, change: dict[str, Any]) -> None:
    choice_task(folder, **change)
    with pytest.raises(TaskError, match="task 'letters'") as caught:
        load(folder)
    assert caught.value.problem.file == str(folder / "letters.yaml")


@pytest.mark.parametrize("function", ["nowhere.text", "broken.text", "helpers.missing", "helpers.fails"])
def test_functions_that_are_missing_or_fail(folder: Path, function: str) -> None:
    (folder / "broken.py").write_text("def text(doc:\n")
    (folder / "helpers.py").write_text("def fails(doc):\n    raise SystemError\n")
    text = (folder / "letters.yaml").read_text().replace("'{{query}}'", f"!function {function}")
    (folder / "letters.yaml").write_text(text)
    with pytest.raises(TaskError, match="task 'letters'"):
        load(folder)


def test_a_module_that_ends_the_process(folder: Path) -> None:
    (folder / "helpers.py").write_text("raise SystemExit(3)\n")
    text = (folder / "letters.yaml").read_text().replace("'{{query}}'", "!function helpers.text")
    (folder / "letters.yaml").write_text(text)
    with pytest.raises(TaskError, match=r"task 'letters': its code ended the process \(SystemExit: 3\)") as caught:
        load(folder)
    assert caught.value.problem.file == str(folder / "letters.yaml")


@pytest.mark.parametrize("content", ["\n\n", "{not json\n", '["a list"]\n'])
def test_broken_data(folder: Path, content: str) -> None:
    (folder / "letters.jsonl").write_text(content)
    with pytest.raises(TaskError, match="task 'letters'"):
        load(folder)


@pytest.mark.parametrize("loader", ["json", "csv", "parquet", "text"])
def test_an_empty_data_file(folder: Path, loader: str) -> None:
    choice_task(folder, dataset_path=loader)
    (folder / "letters.jsonl").write_text("")
    with pytest.raises(TaskError, match=r"data file 'letters.jsonl' is empty") as caught:
        load(folder)
    assert caught.value.problem.file == str(folder / "letters.jsonl")


@pytest.mark.parametrize("sampling", [{"do_sample": True}, {"do_sample": True, "temperature": 0.7}, {"temperature": 1}])
def test_sampling_is_refused(tmp_path: Path, sampling: dict[str, object]) -> None:
    generation_task(tmp_path / "tasks", **sampling)
    with pytest.raises(TaskError, match="samples its answers"):
        load(tmp_path / "tasks", "copy", "exact_match")


def test_repeated_requests_are_refused(folder: Path) -> None:
    choice_task(folder, repeats=2)
    with pytest.raises(TaskError, match="repeats its requests"):
        load(folder)


def test_a_task_with_too_few_questions_for_a_split(folder: Path) -> None:
    kept = (folder / "letters.jsonl").read_text().splitlines(keepends=True)[:1]
    (folder / "letters.jsonl").write_text("".join(kept))
    with pytest.raises(TaskError, match=r"no question in the \w+ split of its 1"):
        load(folder)


# --- models -------------------------------------------------------------------------------------------------


def test_a_metric_of_no_single_number(tmp_path: Path) -> None:
    folder = choice_task(
        tmp_path / "tasks", metric_list=[{"metric": "f1", "aggregation": "f1", "higher_is_better": True}]
    )
    model = tiny_llama(tmp_path / "model")
    scored = evaluator(tmp_path, model, entry(model, ("letters", "f1")))
    with pytest.raises(EvaluationError, match="metric 'f1' of task 'letters' gives no finite number"):
        scored.evaluate("search", Weights("w"))
    assert folder.is_dir() and scored.evaluations == 0


def test_a_metric_that_fails_on_an_answer(tmp_path: Path) -> None:
    folder, model = choice_task(tmp_path / "tasks"), tiny_llama(tmp_path / "model")
    (folder / "helpers.py").write_text("def judge(doc, results):\n    raise RuntimeError('no verdict')\n")
    with (folder / "letters.yaml").open("a") as f:
        f.write("process_results: !function helpers.judge\n")
    with pytest.raises(EvaluationError, match="cannot judge the answers to task 'letters': no verdict") as caught:
        evaluator(tmp_path, model, entry(model, ("letters", "acc"))).evaluate("search", Weights("w"))
    assert caught.value.problem.model == "m"


def test_weights_that_answer_with_nan_are_wrong_and_an_original_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    scored = scorer(tmp_path, model)
    broken = scored.evaluate("search", replaced("nan", {Q_PROJ: torch.full((32, 32), torch.nan)}))
    assert broken.tasks["letters"].value == 0.0
    assert set(broken.tasks["letters"].questions) == {0.0}
    assert scored.evaluate("search", Weights("w")).tasks["letters"].value > 0.0  # and nothing lingers
    before = fingerprint(Checkpoint.open(model, "m"), tmp_path / "scans")
    edit_tensors(model, lambda tensors: tensors[Q_PROJ].fill_(torch.nan))
    again = Evaluator(
        model,
        before,
        entry(model, ("letters", "acc")),
        settings(tmp_path / "tasks"),
        scored._log,
        tmp_path / "cache",
    )
    with pytest.raises(EvaluationError, match=r"the original answers \d+ questions of task 'letters' with NaN"):
        again.evaluate("profile", Weights("w"))
    assert again.evaluations == 0


def test_nan_has_no_worst_value_where_less_is_better(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    choice_task(tmp_path / "tasks", metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": False}])
    scored = evaluator(tmp_path, model, entry(model, ("letters", "acc")))
    with pytest.raises(EvaluationError, match="no worst value"):
        scored.evaluate("search", replaced("nan", {Q_PROJ: torch.full((32, 32), torch.nan)}))


def test_a_replacement_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    scored = scorer(tmp_path, tiny_llama(tmp_path / "model"))
    with pytest.raises(EvaluationError, match="shape"):
        scored.evaluate("search", replaced("w", {Q_PROJ: torch.ones(4, 4)}))
    with pytest.raises(EvaluationError, match="no parameter"):
        scored.evaluate("search", replaced("v", {"nothing": torch.ones(4, 4)}))


def test_a_model_that_is_not_held_as_the_file_is(tmp_path: Path) -> None:
    """A square matrix that transformers transposes as it loads would fit, and be scored as something else."""
    scored = scorer(tmp_path, tiny_llama(tmp_path / "model"))
    scored.evaluate("search", Weights("w"))
    assert scored.resident is not None
    with torch.no_grad():
        parameter = scored.resident.model.get_parameter(Q_PROJ)
        parameter.copy_(parameter.T.clone())
    with pytest.raises(EvaluationError, match="does not hold this tensor as the file does"):
        scored.evaluate("search", replaced("v", {Q_PROJ: torch.ones(32, 32)}))


def test_a_checkpoint_without_one_of_its_tensors(tmp_path: Path) -> None:
    """transformers would make it up, with a warning."""
    model = tiny_llama(tmp_path / "model")
    edit_tensors(model, lambda tensors: tensors.pop(Q_PROJ))
    choice_task(tmp_path / "tasks")
    with pytest.raises(CheckpointError, match="random numbers") as caught:
        score_directory(
            model, entry(model, ("letters", "acc")), settings(tmp_path / "tasks"), "search", tmp_path / "cache"
        )
    assert caught.value.problem.tensor == Q_PROJ


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_a_directory_that_transformers_cannot_load(tmp_path: Path, file: str, damage: str) -> None:
    model = tiny_llama(tmp_path / "model")
    content = (model / file).read_bytes()
    (model / file).unlink()
    if damage != "missing":
        (model / file).write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    with pytest.raises((CheckpointError, EvaluationError)) as caught:
        Resident(model, "m", settings(tmp_path))
    assert caught.value.problem.model == "m" and caught.value.problem.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot load the model"):
        Resident(tiny_llama(tmp_path / "model"), "m", settings(tmp_path, device="cuda:3"))


def test_a_device_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    scored = scorer(tmp_path, tiny_llama(tmp_path / "model"))
    scored.evaluate("search", Weights("w"))
    assert scored.resident is not None
    monkeypatch.setattr(scored.resident.scorer, "answer", full)
    with pytest.raises(EvaluationError, match=r"no memory left .*batch_tokens, which is 8192"):
        scored.evaluate("holdout", Weights("w"))


def test_documents_that_are_no_json_are_refused(folder: Path) -> None:
    rows = [json.dumps({"query": f"{i}", "choices": ["a", "b"], "gold": 0, "x": None if i else 1e400}) for i in (0, 1)]
    (folder / "letters.jsonl").write_text("\n".join(rows))
    with pytest.raises(TaskError, match=r"not plain JSON|cannot build"):
        load(folder)


# --- the score log ------------------------------------------------------------------------------------------


def scored(weights: str) -> Evaluation:
    result = TaskResult(value=0.5, higher_is_better=True, questions=(0.0, 1.0))
    return Evaluation(weights=weights, context="c", split="search", tasks={"t": result})


@pytest.mark.parametrize("line", [b"{}\n", b"\n", b"null\n", b"\x00\x00\n", b'{"weights": "a"}\n', b"\xff\xfe\n"])
def test_a_line_that_is_no_evaluation(tmp_path: Path, line: bytes) -> None:
    ScoreLog(tmp_path / "log").add(scored("a"))
    with (tmp_path / "log").open("ab") as f:
        f.write(line)
    with pytest.raises(StoreError, match="is not an evaluation"):
        ScoreLog(tmp_path / "log")


def written(folder: Path, weights: str) -> bytes:
    """A log of these evaluations that nothing happened to."""
    undisturbed = ScoreLog(folder / "undisturbed")
    for one in weights:
        undisturbed.add(scored(one))
    return (folder / "undisturbed").read_bytes()


def test_what_a_power_failure_leaves_at_the_end_is_dropped(tmp_path: Path) -> None:
    """A file that grew before its data were written ends in zeros."""
    ScoreLog(tmp_path / "log").add(scored("a"))
    with (tmp_path / "log").open("ab") as f:
        f.write(bytes(5000))
    log = ScoreLog(tmp_path / "log")
    log.add(scored("b"))
    assert (tmp_path / "log").read_bytes() == written(tmp_path, "ab")


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    log = ScoreLog(tmp_path / "nowhere" / "log")
    with pytest.raises(StoreError, match="cannot be written: No such file"):
        log.add(scored("a"))
    assert log.get("a", "c") is None


def test_a_disk_that_fills_within_a_line(tmp_path: Path) -> None:
    log = ScoreLog(tmp_path / "log")
    log.add(scored("a"))
    size = (tmp_path / "log").stat().st_size
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, unlimited[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written: No space left"):
            log.add(scored("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert (tmp_path / "log").stat().st_size == size + 10
    assert ScoreLog(tmp_path / "log").get("b", "c") is None
    log.add(scored("b"))
    assert (tmp_path / "log").read_bytes() == written(tmp_path, "ab")


@pytest.mark.parametrize("loader", ["json", "csv", "parquet", "text"])
@pytest.mark.parametrize("name", ["letters.jsonl", "l*.jsonl", "../elsewhere/none", ""])
def test_data_beside_the_current_directory_is_not_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, name: str
) -> None:
    files = {"data_files": {"test": [name]}}
    folder = choice_task(tmp_path / "tasks", dataset_path=loader, dataset_kwargs=files)
    (tmp_path / "elsewhere").mkdir()
    (folder / "letters.jsonl").rename(tmp_path / "elsewhere" / "letters.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    for look in (lambda: load(folder), lambda: task_identity(folder, "letters")):
        with pytest.raises(TaskError, match=re.escape(f"{name!r} is not beside it")) as caught:
            look()
        assert caught.value.problem.file == str(folder)


@pytest.mark.parametrize(
    ("path", "name"), [("someone/repository", "data/test.parquet"), ("json", "https://example.org/letters.jsonl")]
)
def test_data_that_is_not_local_need_not_be_beside_the_task(tmp_path: Path, path: str, name: str) -> None:
    files = {"data_files": {"test": name}}
    folder = choice_task(tmp_path, dataset_path=path, dataset_kwargs=files)
    assert local_data_files(folder / "letters.yaml") == {"test": name}
    assert task_identity(folder, "letters")


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_an_include_path_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    if kind == "file":
        (tmp_path / "tasks").write_text("")
    with pytest.raises(TaskError, match="include_path is no folder"):
        load_tasks(entry(tmp_path, ("letters", "acc")), settings(tmp_path / "tasks"), tmp_path / "cache")


def test_questions_that_do_not_fit_the_model(tmp_path: Path) -> None:
    choice_task(tmp_path / "tasks")
    scored = scorer(tmp_path, tiny_llama(tmp_path / "model", max_position_embeddings=2))
    with pytest.raises(EvaluationError, match="the questions of task 'letters' cannot be scored: Assertion") as caught:
        scored.evaluate("search", Weights("w"))
    assert caught.value.problem.model == "m"
