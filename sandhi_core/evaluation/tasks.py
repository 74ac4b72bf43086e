"""The tasks of one model: their questions by split, and how answers become a metric."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.registry import HIGHER_IS_BETTER_REGISTRY

from sandhi_core.errors import EvaluationError, TaskError
from sandhi_core.evaluation.requests import Question, ask
from sandhi_core.evaluation.splits import split_of
from sandhi_core.evaluation.taskfiles import task_identity
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Split, TaskResult

SPLITS: tuple[Split, ...] = ("profile", "search", "holdout")


@dataclass(frozen=True)
class SuiteTask:
    """One task of a model. `identity` digests everything that decides what is asked."""

    name: str
    metric: str
    filter: str
    higher_is_better: bool
    aggregate: Callable[[list[Any]], Any]
    task: Any  # lm-eval's
    questions: Mapping[Split, tuple[Question, ...]]
    identity: str

    def result(self, split: Split) -> TaskResult:
        """The metric from the responses that the split's requests hold now. A question to which the model's
        response is NaN counts as wrong: 0.

        Raises EvaluationError where a question has no single finite number, or a NaN has no such meaning.
        """
        values = self.values(self.questions[split])
        with self._guarded():
            value = float(self.aggregate(values))
        return TaskResult(value=value, higher_is_better=self.higher_is_better, questions=tuple(values))

    def values(self, questions: Sequence[Question]) -> list[float]:
        """One value a question, from the responses that its requests hold now. Raises as `result` does."""
        with self._guarded():
            for ensemble in self.task._filters:
                if ensemble.name == self.filter:
                    ensemble.apply([request for question in questions for request in question.requests])
            return [self._value(question) for question in questions]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except EvaluationError:
            raise
        except (Exception, SystemExit) as error:  # a task's own functions can fail in any way
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EvaluationError(
                f"lm-eval cannot judge the answers to task {self.name!r}: {reason}",
                remedy="correct the task's filters and metrics",
            ) from error

    def nan_answers(self, split: Split) -> int:
        """Questions of which a response is NaN."""
        return sum(map(_has_nan, self.questions[split]))

    def _value(self, question: Question) -> float:
        if _has_nan(question):
            return self._worst()
        answers = [request.filtered_resps[self.filter] for request in question.requests]
        value = self.task.process_results(question.document, answers)[self.metric]
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            raise EvaluationError(
                f"metric {self.metric!r} of task {self.name!r} gives no finite number for a question",
                remedy="choose a metric with one number a question, such as acc or exact_match",
            )
        return float(value)

    def _worst(self) -> float:
        # 0 of lm-eval's own metrics; of a task's own metric (a log-likelihood, say) it may be the best.
        if not (self.higher_is_better and self.metric in HIGHER_IS_BETTER_REGISTRY):
            raise EvaluationError(
                f"the model answers task {self.name!r} with NaN, and metric {self.metric!r} has no worst value",
                remedy="score in float32, or by a metric of lm-eval's own of which more is better",
            )
        return 0.0


@dataclass(frozen=True)
class Suite:
    """All tasks of one model."""

    tasks: tuple[SuiteTask, ...]

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

    Raises TaskError for a task or metric that does not exist, that samples, or that has no questions; StoreError where
    `cache_directory` cannot be written.
    """
    return Suite(tuple(_suite_task(wanted, settings, cache_directory) for wanted in entry.tasks))


def _suite_task(wanted: TaskBudget, settings: EvaluationSettings, cache_directory: Path) -> SuiteTask:
    include = None if settings.include_path is None else Path(settings.include_path)
    identity = task_identity(include, wanted.task)
    asked = ask(include, wanted.task, settings.seed, cache_directory, identity)
    metric, filter_name = _metric(wanted, asked.task)
    return SuiteTask(
        wanted.task,
        metric,
        filter_name,
        _higher_is_better(wanted, metric, asked.task),
        asked.task.aggregation()[metric],
        asked.task,
        _split(wanted.task, asked.questions, settings),
        f"{identity} {asked.digest}",
    )


def _metric(wanted: TaskBudget, task: Any) -> tuple[str, str]:
    """Metric and filter of `metric` or `metric,filter`, as lm-eval writes it; the first filter by default."""
    metric, _, filter_name = wanted.metric.partition(",")
    filters = [ensemble.name for ensemble in task._filters]
    metrics = task.aggregation()
    if metric not in metrics or (filter_name and filter_name not in filters):
        offered = ", ".join(sorted(metrics)) + (f"; filters: {', '.join(filters)}" if len(filters) > 1 else "")
        raise TaskError(f"task {wanted.task!r} has no metric {wanted.metric!r}", remedy=f"choose one of: {offered}")
    if not callable(metrics[metric]):
        raise TaskError(
            f"task {wanted.task!r} aggregates metric {metric!r} by nothing that lm-eval knows",
            remedy="set its aggregation in the task's metric_list, to mean for example",
        )
    return metric, filter_name or filters[0]


def _higher_is_better(wanted: TaskBudget, metric: str, task: Any) -> bool:
    direction = task.higher_is_better().get(metric)
    if not isinstance(direction, bool):
        raise TaskError(
            f"task {wanted.task!r} does not say whether more or less of metric {metric!r} is better",
            remedy="set higher_is_better for it in the task's metric_list",
        )
    return direction


def _split(
    name: str, questions: Sequence[Question], settings: EvaluationSettings
) -> Mapping[Split, tuple[Question, ...]]:
    splits: dict[Split, list[Question]] = {split: [] for split in SPLITS}
    for question in questions:
        splits[split_of(question.document, settings.seed, settings.splits)].append(question)
    for split, found in splits.items():
        if not found:
            raise TaskError(
                f"task {name!r} has no question in the {split} split of its {len(questions)}",
                remedy="use a task with more questions, or a larger share for the split",
            )
    return {split: tuple(found) for split, found in splits.items()}


def _has_nan(question: Question) -> bool:
    """Whether a log-likelihood is NaN, which lm-eval's argmax would take for the first choice."""
    responses = (response for request in question.requests for response in request.resps)
    numbers = (response[0] if isinstance(response, tuple) else response for response in responses)
    return any(isinstance(number, float) and math.isnan(number) for number in numbers)
