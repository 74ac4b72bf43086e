"""The boldest assignment that a model can stand on, and safer ones on the way to it, in few evaluations.

A ladder is one model's assignments from safe to bold (`allotment`). One bisection finds where it stops to hold. That
place was found by looking at the search split, so what lies there holds partly by luck; hence the bisection begins
with a margin and ends with none, and everything that held on the way is left to the holdout, which tries it from safe
to bold. The margin is counted in standard errors of the paired change: a task whose answers hardly move needs little.

The holdout stops at the first rung that fails, so it wants small strides near the border and a start far below it:
the gaps that the bisection leaves are filled.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from sandhi_core.assignment import Assignment
from sandhi_core.cutoffs import drops_of, within
from sandhi_core.records import Evaluation, Plan, Scores, Step, Trajectory
from sandhi_core.rungs.allotment import PRICES, Ranks
from sandhi_core.statistics import is_mean, standard_error

MARGINS = (3.0, 2.0, 1.0, 0.0)
"""Standard errors that a drop must stay within tolerance by, one after the other."""

COARSE = 4
"""Rungs (of PRICES an octave) that the end of all margins but the last may be off by."""

FINE = 2
"""Rungs that two which are left to the holdout are apart, from where the largest margin ends up to the boldest; more
where that would take over FILLED of them."""

FILLED = 12
"""Rungs that are scored to fill that gap, at most."""

SAFER = 4
"""Rungs that are left to the holdout below that: the first by COARSE, each next one by twice as many as the last."""

MOST_SCORES = len(MARGINS) * len(PRICES).bit_length() - (len(MARGINS) - 1) * (COARSE.bit_length() - 1) + FILLED + SAFER
"""That a ladder takes at most: a bisection a margin, of which all but the last stop early, and what fills the gaps."""

T = TypeVar("T")


def climb(rungs: int, score: Callable[[int], T], holds: Callable[[T, float], bool]) -> dict[int, T]:
    """What was scored of so many `rungs`, by number. `holds(scored, margin)`, with margins from large to none.

    Where no rung holds that is bolder than one which does not, the last margin ends at the boldest that holds, the
    others no more than COARSE rungs below; otherwise at one that holds and has a neighbour that does not. Then come
    those for the holdout: FINE apart, FILLED at most, from where the largest margin ended that holds anywhere, and
    SAFER below. None is scored twice, and of as many rungs as there are PRICES no more than MOST_SCORES.
    """
    scored: dict[int, T] = {}
    low, ends = -1, list[int]()
    for margin in MARGINS:
        high = min((at for at, found in scored.items() if at > low and not holds(found, margin)), default=rungs)
        while high - low > (COARSE if margin else 1):
            # Among those that are scored already there may be one to go on from without another score.
            at = max((n for n in scored if low < n < high), default=(low + high) // 2)
            if at not in scored:
                scored[at] = score(at)
            if holds(scored[at], margin):
                low = at
            else:
                high = at
        ends.append(low)
    for at in _between(scored, safe=next((end for end in ends if end >= 0), low), bold=low):
        scored[at] = score(at)
    return scored


def _between(scored: Collection[int], safe: int, bold: int) -> list[int]:
    """What is missing of rungs FINE apart (FILLED of them at most) from `bold` down to `safe`, and of SAFER more."""
    missing, at, safer = list[int](), bold, 0
    fine = max(FINE, math.ceil((bold - safe) / FILLED))
    while at > 0 and (at > safe or safer < SAFER):
        gap = fine
        if at <= safe:
            gap = COARSE << safer
            safer += 1
        at = min((n for n in scored if at - gap <= n < at), default=max(0, at - gap))
        if at not in scored:
            missing.append(at)
    return missing


def ladder(
    plan: Plan,
    tolerance: Mapping[str, float],
    baseline: Evaluation,
    rungs: Sequence[tuple[float, Ranks]],
    assigned: Callable[[Ranks], Assignment],
    score: Callable[[Assignment], Evaluation],
) -> Trajectory:
    """One model's trajectory over `rungs` (price and ranks, from safe to bold): a step for everything that was scored,
    each an assignment of the whole model. `tolerance`: task to absolute drop on the search split.

    A bolder rung shares all slots that a safer one does, so that its step overwrites all that came before it.
    """
    higher_is_better = {task: result.higher_is_better for task, result in baseline.tasks.items()}
    assignments: dict[int, Assignment] = {}

    def scored(at: int) -> Evaluation:
        assignments[at] = assigned(rungs[at][1])
        return score(assignments[at])

    def holds(found: Evaluation, margin: float) -> bool:
        drops = drops_of(baseline.scores, found.scores, higher_is_better)
        return within({task: drop + margin * _error(baseline, found, task) for task, drop in drops.items()}, tolerance)

    tried = climb(len(rungs), scored, holds)
    return Trajectory(
        pool=plan.pool,
        model=plan.model,
        plan=plan.digest,
        baseline=baseline.scores,
        higher_is_better=higher_is_better,
        tolerance=dict(tolerance),
        questions={task: len(result.questions) for task, result in baseline.tasks.items()},
        evaluations=len(tried),
        steps=tuple(
            Step(
                index=index,
                price=rungs[at][0],
                decision="accepted" if holds(found, 0.0) else "rejected",
                scores=_finite(found.scores),
                tensors=dict(assignments[at].tensors),
                adjustments=dict(assignments[at].adjustments),
            )
            for index, (at, found) in enumerate(sorted(tried.items()))
        ),
    )


def _error(baseline: Evaluation, found: Evaluation, task: str) -> float:
    """Standard error of the change; nought of a metric that is no mean over questions, which gets no margin."""
    before, after = baseline.tasks[task], found.tasks[task]
    if not (is_mean(before.value, before.questions) and is_mean(after.value, after.questions)):
        return 0.0
    return standard_error(before.questions, after.questions)


def _finite(scores: Scores) -> Scores:
    return {task: value for task, value in scores.items() if math.isfinite(value)}
