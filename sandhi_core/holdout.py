"""How far a model really goes, decided by questions never used before.

The search looks at its questions hundreds of times, so a cutoff within budget there may not be within budget
elsewhere. Here every cutoff gets one look, from safe to bold, and the first that fails ends the walk. As the
order is fixed before any look, testing in sequence needs no correction for the number of looks (Maurer,
Hothorn, Lehmacher 1995; Wiens 2003, Pharmaceutical Statistics 2:211-215).
"""

from collections.abc import Callable, Iterator, Mapping

from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.cutoffs import EPSILON
from sandhi_core.errors import StoreError
from sandhi_core.pools.pool import ModelEntry, TaskBudget
from sandhi_core.records import (
    CutoffSet,
    Evaluation,
    HoldoutScore,
    HoldoutTask,
    Look,
    OperatingPoints,
    Quality,
    TaskResult,
    Trajectory,
)
from sandhi_core.statistics import Paired, is_mean, least_certifiable, paired_interval


def walk_holdout(
    pool: str,
    model: ModelEntry,
    cutoffs: CutoffSet,
    trajectory: Trajectory,
    evaluate: Callable[[Assignment], Evaluation],
    quality: Quality = "point",
) -> HoldoutScore:
    """Walk the cutoffs within budget on the search split until one does not hold on the holdout.

    `evaluate` scores the model on the holdout split with an assignment in place; an empty one is
    the original. The result is the boldest cutoff that held, at worst the original itself (0 steps, no
    look). With `quality` `point` the measured change decides how far the walk goes (`within_budget`); a task is
    `certified` where its one-sided 95 % bound kept the budget here and at every cutoff before. With `certified` that
    decides: then the chance that any model deployed has in truth lost more than its budget is at most 5 % a model,
    however many cutoffs were tried (Learn then Test: Angelopoulos et al. 2021, arXiv:2110.01052, section 4.2).

    Raises EvaluationError where a task has fewer than two questions.
    """
    original = evaluate(Assignment())
    unchanged = {entry.task: _unchanged(entry, original.tasks[entry.task]) for entry in model.tasks}
    boldest = safest = _look(0, original.weights, unchanged)
    walked: list[Look] = []
    for steps, assignment in _distinct(cutoffs, trajectory):
        merged = evaluate(assignment)
        compared = {
            entry.task: _compare(
                entry, original.tasks[entry.task], merged.tasks[entry.task], boldest.tasks[entry.task].certified
            )
            for entry in model.tasks
        }
        walked.append(_look(steps, merged.weights, compared))
        if not walked[-1].holds(quality):
            break
        boldest = walked[-1]
    return HoldoutScore(
        pool=pool,
        model=model.name,
        quality=quality,
        steps=boldest.steps,
        weights=boldest.weights,
        tasks=boldest.tasks,
        original=safest,
        walked=tuple(walked),
    )


def deployed_holdouts(points: OperatingPoints, holdouts: Mapping[str, HoldoutScore]) -> dict[str, HoldoutScore]:
    """What the holdout measured at the cutoffs that are deployed, by model name: what is exported, proved and
    reported is this, not the boldest.

    Raises StoreError where a deployed cutoff is not one that held: the points are of an earlier walk.
    """
    for model, holdout in holdouts.items():
        if points.deployed.cutoffs.get(model) not in holdout.held:
            raise StoreError(
                f"the operating points of {points.pool} were not made from this model's holdout",
                model=model,
                remedy=f"materialise operating_points of {points.pool} again; `sandhi build` runs everything in order",
            )
    return {model: holdout.going(points.deployed.cutoffs[model]) for model, holdout in holdouts.items()}


def _look(steps: int, weights: str, tasks: dict[str, HoldoutTask]) -> Look:
    within = all(task.within_budget for task in tasks.values())
    return Look(steps=steps, within_budget=within, weights=weights, tasks=tasks)


def _distinct(cutoffs: CutoffSet, trajectory: Trajectory) -> Iterator[tuple[int, Assignment]]:
    """Cutoffs worth a look, from safe to bold; going past a rejected step changes nothing."""
    last = Assignment()
    for cutoff in sorted(cutoffs.cutoffs, key=lambda c: c.steps):
        assignment = assignment_at(trajectory, cutoff.steps)
        if cutoff.within_budget and assignment != last:
            yield cutoff.steps, assignment
            last = assignment


def _unchanged(entry: TaskBudget, original: TaskResult) -> HoldoutTask:
    """The original against itself: nothing is estimated, the difference is nought."""
    return _task(entry, original, original, 0.0, Paired(0.0, 0.0, 0.0, 0.0), certifiable=True)


def _compare(entry: TaskBudget, original: TaskResult, merged: TaskResult, certifiable: bool) -> HoldoutTask:
    change = merged.value - original.value
    interval = paired_interval(original.questions, merged.questions, merged.higher_is_better)
    # The interval is of a mean over questions; it certifies nothing of a metric that is none (a corpus F1).
    means = is_mean(original.value, original.questions) and is_mean(merged.value, merged.questions)
    difference = change if merged.higher_is_better else -change
    return _task(entry, original, merged, difference, interval, certifiable and means)


def _task(
    entry: TaskBudget,
    original: TaskResult,
    merged: TaskResult,
    difference: float,
    interval: Paired,
    certifiable: bool,
) -> HoldoutTask:
    return HoldoutTask(
        metric=entry.metric,
        budget=entry.budget,
        original=original.value,
        merged=merged.value,
        difference=difference,
        low=interval.low,
        high=interval.high,
        bound=interval.bound,
        questions=len(merged.questions),
        within_budget=difference >= -entry.budget - EPSILON,
        certified=certifiable and interval.bound >= -entry.budget,
        certifiable=least_certifiable(original.questions, merged.questions),
    )
