"""Ends the scoring of a candidate as soon as nothing that is still unanswered could get it accepted.

Unanswered questions count as right, so the score is at most what it would be then; the decision about that bound is
made by the very function that decides about scores, and by lm-eval's own mean, so no rounding can set them apart.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_fn, mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.filters.custom import CustomFilter
from lm_eval.filters.decontamination import DecontaminationFilter

from sandhi_core.evaluation.packing import Pack
from sandhi_core.evaluation.tasks import Suite, SuiteTask
from sandhi_core.records import Accepts, Evaluation, Scores, Split, TaskResult

RIGHT_OR_WRONG: Mapping[str, frozenset[str]] = {
    "loglikelihood": frozenset({"acc"}),
    "multiple_choice": frozenset({"acc", "acc_norm", "acc_bytes", "acc_mutual_info", "exact_match"}),
    "generate_until": frozenset({"exact_match"}),
}
"""By lm-eval's output type: metrics for which its own code gives every question 0 or 1."""


def bounded(task: SuiteTask) -> bool:
    """Whether a question of the task counts 0 or 1 whatever the model answers, each on its own, and the metric is their
    mean. Asked of lm-eval's own code only: a task's own functions may do anything."""
    asked = task.task
    return (
        task.higher_is_better
        and task.aggregate is mean
        and task.metric in RIGHT_OR_WRONG.get(asked.OUTPUT_TYPE, ())
        and getattr(asked.process_results, "__func__", None) is ConfigurableTask.process_results
        and asked.config.process_results is None
        and (asked.OUTPUT_TYPE != "generate_until" or asked._metric_fn_list[task.metric] is exact_match_fn)
        and all(_each_on_its_own(make()) for e in asked._filters if e.name == task.filter for make in e.filters)
    )


def _each_on_its_own(applied: object) -> bool:
    return type(applied).__module__.startswith("lm_eval.filters.") and not isinstance(
        applied, CustomFilter | DecontaminationFilter
    )


def best(suite: Suite, at_most: Scores) -> Scores:
    """The best scores that are possible where those of some tasks are at most `at_most`."""
    return {task.name: math.inf if task.higher_is_better else -math.inf for task in suite.tasks} | at_most


class AbandonedError(Exception):
    """Scoring was ended: the scores would not be accepted. `at_most`: what they are at most, of tasks that have such a
    bound."""

    def __init__(self, at_most: dict[str, TaskResult]) -> None:
        super().__init__("the scores would not be accepted")
        self.at_most = at_most


class Watch:
    """Follows one evaluation of a split, and ends it when `accepts` refuses the best scores that are still possible.
    `original`: the original's evaluation of the same split."""

    def __init__(self, suite: Suite, split: Split, original: Evaluation, accepts: Accepts) -> None:
        self._suite = suite
        self._accepts = accepts
        self._unanswered = {id(r) for task in suite.tasks for q in task.questions[split] for r in q.requests}
        self._tasks = {task.name: task for task in suite.tasks if bounded(task)}
        self._questions = {name: task.questions[split] for name, task in self._tasks.items()}
        self._values = {name: [1.0] * len(questions) for name, questions in self._questions.items()}
        self._originally = {name: original.tasks[name].questions for name in self._tasks}
        self._places = {
            id(request): (name, number)
            for name, questions in self._questions.items()
            for number, question in enumerate(questions)
            for request in question.requests
        }

    def originally(self, request: Instance) -> float:
        """What the request's question counts in the original's score; 1 where wrong answers end nothing."""
        place = self._places.get(id(request))
        return 1.0 if place is None else self._originally[place[0]][place[1]]

    def answered(self, requests: Sequence[Instance]) -> None:
        """`requests` hold their responses now. Raises AbandonedError; EvaluationError as SuiteTask.values does."""
        fresh = {id(request) for request in requests} & self._unanswered
        self._unanswered -= fresh
        if not self._unanswered:  # nothing to save any more, and scores say more than a bound
            return
        touched: dict[str, set[int]] = defaultdict(set)
        for place in (self._places[one] for one in fresh if one in self._places):
            touched[place[0]].add(place[1])
        for name, numbers in touched.items():
            self._count(name, sorted(numbers))
        at_most = {name: float(mean(values)) for name, values in self._values.items()}
        if touched and not self._accepts(best(self._suite, at_most)):
            raise AbandonedError(
                {name: TaskResult(value=v, higher_is_better=True, questions=()) for name, v in at_most.items()}
            )

    def _count(self, name: str, numbers: Sequence[int]) -> None:
        """Let those of the questions that are answered in full count what they do."""
        questions = self._questions[name]
        whole = [n for n in numbers if not any(id(r) in self._unanswered for r in questions[n].requests)]
        if whole:
            for number, value in zip(whole, self._tasks[name].values([questions[n] for n in whole]), strict=True):
                self._values[name][number] = value


@dataclass(frozen=True)
class Following:
    """A watch on requests that are answered pack by pack; `asked` by the numbers that packs have for them."""

    watch: Watch
    asked: Sequence[Instance]

    def order(self, packs: Sequence[Pack]) -> list[int]:
        """First the packs in which the original answers least right: what it gets wrong, a candidate hardly gets right,
        so that the bound sinks soonest."""
        right = [[self.watch.originally(self.asked[number]) for number, *_ in pack.requests] for pack in packs]
        return sorted(range(len(packs)), key=lambda at: sum(right[at]) / len(right[at]))

    def heard(self, answers: Mapping[int, tuple[float, bool]]) -> None:
        """By number of the request."""
        for number, answer in answers.items():
            self.asked[number].resps[:] = [answer]
        self.watch.answered([self.asked[number] for number in answers])
