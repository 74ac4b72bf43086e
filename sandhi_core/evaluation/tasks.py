"""Tasks as lm-eval defines them: built once in a process, their requests reused for every set of weights."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from sandhi_core.errors import EvaluationError, TaskError
from sandhi_core.evaluation.splits import split_of
from sandhi_core.evaluation.taskfiles import find_task, local_data_files, task_identity
from sandhi_core.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Split, TaskResult

SPLITS: tuple[Split, ...] = ("profile", "search", "holdout")
GENERATION = "generate_until"


@dataclass(frozen=True)
class Question:
    """One document with its requests, in lm-eval's order. Requests are shared by all models of a process."""

    document: Mapping[str, Any]
    requests: tuple[Instance, ...]


@dataclass(frozen=True)
class SuiteTask:
    """One task of a model: how it is asked, and how answers become the metric."""

    name: str
    metric: str
    filter: str
    higher_is_better: bool
    aggregate: Callable[[list[Any]], Any]
    task: Any  # lm-eval's
    questions: Mapping[Split, tuple[Question, ...]]

    def result(self, split: Split) -> TaskResult:
        """The metric from the responses that the split's requests hold now.

        Raises EvaluationError where a question has no single finite number.
        """
        questions = self.questions[split]
        requests = [request for question in questions for request in question.requests]
        for ensemble in self.task._filters:
            if ensemble.name == self.filter:
                ensemble.apply(requests)
        values = [self._value(question) for question in questions]
        value = float(self.aggregate(values))
        return TaskResult(value=value, higher_is_better=self.higher_is_better, questions=tuple(values))

    def _value(self, question: Question) -> float:
        answers = [request.filtered_resps[self.filter] for request in question.requests]
        value = self.task.process_results(question.document, answers)[self.metric]
        if not isinstance(value, (bool, int, float)):
            raise EvaluationError(
                f"metric {self.metric!r} of task {self.name!r} gives no number for a question",
                remedy="choose a metric with one number a question, such as acc or exact_match",
            )
        return float(value)


@dataclass(frozen=True)
class Suite:
    """All tasks of one model. `identity` digests everything that decides what is asked."""

    tasks: tuple[SuiteTask, ...]
    identity: str

    def questions(self, split: Split) -> dict[str, int]:
        """Questions of a split, by task."""
        return {task.name: len(task.questions[split]) for task in self.tasks}

    def requests(self, split: Split) -> dict[str, list[Instance]]:
        """A split's requests by their type, in fixed order, without earlier responses."""
        found: dict[str, list[Instance]] = defaultdict(list)
        for task in self.tasks:
            for question in task.questions[split]:
                for request in question.requests:
                    request.resps.clear()
                    request.filtered_resps.clear()
                    found[request.request_type].append(request)
        return found


def load_tasks(entry: ModelEntry, settings: EvaluationSettings, cache_directory: Path) -> Suite:
    """The tasks of one model. `cache_directory` is where the datasets library converts local data files.

    Raises TaskError for a task or metric that does not exist, that samples, or that has no questions.
    """
    include = None if settings.include_path is None else Path(settings.include_path)
    tasks = tuple(_suite_task(include, wanted, settings, cache_directory) for wanted in entry.tasks)
    identities = [task_identity(include, wanted.task) for wanted in entry.tasks]
    return Suite(tasks, "\n".join(identities))


def _suite_task(
    include: Path | None, wanted: TaskBudget, settings: EvaluationSettings, cache_directory: Path
) -> SuiteTask:
    identity = task_identity(include, wanted.task)  # part of the key: an edited task is built anew
    task, questions = _built(include, wanted.task, settings, cache_directory, identity)
    metric, _, filter_name = wanted.metric.partition(",")
    filters = [ensemble.name for ensemble in task._filters]
    aggregation = task.aggregation()
    if metric not in aggregation or (filter_name and filter_name not in filters):
        offered = ", ".join(sorted(aggregation)) + (f"; filters: {', '.join(filters)}" if len(filters) > 1 else "")
        raise TaskError(f"task {wanted.task!r} has no metric {wanted.metric!r}", remedy=f"choose one of: {offered}")
    return SuiteTask(
        wanted.task,
        metric,
        filter_name or filters[0],
        bool(task.higher_is_better()[metric]),
        aggregation[metric],
        task,
        questions,
    )


@cache
def _built(
    include: Path | None, name: str, settings: EvaluationSettings, cache_directory: Path, identity: str
) -> tuple[Any, Mapping[Split, tuple[Question, ...]]]:
    """lm-eval's task with all its requests built, and its questions by split."""
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        task = _lm_eval_task(include, name, cache_directory)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=settings.seed)
        task.build_all_requests()
    except TaskError:
        raise
    except Exception as error:  # task files and their functions can fail in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TaskError(
            f"lm-eval cannot build task {name!r}: {reason}",
            file=str(find_task(include, name) or "") or None,
            remedy="correct the task file or its data; `lm_eval validate` checks task files",
        ) from error
    _refuse_sampling(name, task.instances)
    return task, _split(name, task.instances, settings)


def _lm_eval_task(include: Path | None, name: str, cache_directory: Path) -> Any:
    path = find_task(include, name)
    if path is not None:
        config = load_yaml(path)
        dataset = dict(config.get("dataset_kwargs") or {})
        if "data_files" in dataset:
            # lm-eval would look for them below the current directory.
            dataset["data_files"] = local_data_files(dataset["data_files"], path.parent)
            dataset["cache_dir"] = str(cache_directory)
            config["dataset_kwargs"] = dataset
        return ConfigurableTask(config=config)
    manager = TaskManager()
    if name not in manager.all_subtasks:
        where = f"below {include} and among lm-eval's own" if include else "among lm-eval's own"
        kind = "is a group of tasks" if name in manager.all_tasks else f"is not {where}"
        raise TaskError(
            f"task {name!r} {kind}",
            remedy="name a single task, and set evaluation.include_path to its folder",
        )
    return manager.load([name])["tasks"][name]


def _refuse_sampling(name: str, requests: Iterable[Instance]) -> None:
    """A search compares scores to single questions; sampled answers would differ with the same weights."""
    for request in requests:
        if request.repeats != 1:
            raise TaskError(f"task {name!r} repeats its requests", remedy="set repeats to 1 in the task")
        if request.request_type == GENERATION:
            settings = request.args[1]
            if settings.get("do_sample") or (settings.get("temperature") or 0) > 0:
                raise TaskError(
                    f"task {name!r} samples its answers",
                    remedy="set do_sample to false and temperature to 0 in the task's generation_kwargs",
                )


def _split(
    name: str, requests: Iterable[Instance], settings: EvaluationSettings
) -> Mapping[Split, tuple[Question, ...]]:
    by_document: dict[int, list[Instance]] = defaultdict(list)
    for request in requests:
        by_document[request.doc_id].append(request)
    splits: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    for _, asked in sorted(by_document.items()):
        question = Question(asked[0].doc, tuple(sorted(asked, key=lambda r: r.idx)))
        splits[split_of(question.document, settings.seed, settings.splits)].append(question)
    for split, questions in splits.items():
        if not questions:
            raise TaskError(
                f"task {name!r} has no question in the {split} split of its {len(by_document)}",
                remedy="use a task with more questions, or a larger share for the split",
            )
    return {split: tuple(questions) for split, questions in splits.items()}
