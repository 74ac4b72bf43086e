"""How far each model can go along its trajectory.

Scores are compared with the original's baseline, for each model on its own, never with a step's local
acceptance. Source of the knee: Satopaa et al., "Finding a 'Kneedle' in a Haystack" (2011), section III.
"""

from collections.abc import Iterable, Mapping, Sequence

from sandhi_core.assignment import assignment_at
from sandhi_core.records import Cutoff, CutoffSet, Plan, Scores, Trajectory
from sandhi_core.savings import worth_a_file

EPSILON = 1e-9
"""Slack of every comparison of a drop with a budget, so that 0.98 - 0.96 is within 0.02."""

KNEE_GRID = tuple(i / 40 for i in range(41))
"""Parts of a budget that are tried when a knee is looked for (the reference: 0.05 of 2 points)."""


def drops_of(baseline: Scores, scores: Scores, higher_is_better: Mapping[str, bool]) -> Scores:
    """Per task how much worse `scores` are than `baseline`; negative is better, whatever the direction."""
    return {
        task: before - scores[task] if higher_is_better[task] else scores[task] - before
        for task, before in baseline.items()
    }


def within(drops: Scores, budgets: Mapping[str, float]) -> bool:
    """Whether every task's drop is within its budget; a NaN never is."""
    return all(drops[task] <= budget + EPSILON for task, budget in budgets.items())


def cutoff_set(trajectory: Trajectory, plan: Plan, budgets: Mapping[str, float]) -> CutoffSet:
    """Every cutoff of one model whose weights were scored. `budgets`: task to drop, in its metric's unit.

    A rejected step changes no weights and a step inside an accepted stride was not scored, so neither ends a
    cutoff of its own.
    """
    nbytes = {
        merge.tensor: merge.nbytes if worth_a_file(merge.nbytes, len(merge.recipe.shape) == 1) else 0
        for step in plan.steps
        for merge in step.merges
    }
    scored = [(0, trajectory.baseline)]
    scored += [
        (step.index + 1, step.scores)
        for step in trajectory.steps
        if step.decision == "accepted" and step.scores is not None
    ]
    cutoffs = []
    for steps, scores in scored:
        drops = drops_of(trajectory.baseline, scores, trajectory.higher_is_better)
        assignment = assignment_at(trajectory, steps)
        cutoffs.append(
            Cutoff(
                steps=steps,
                accepted=sum(s.decision == "accepted" for s in trajectory.steps[:steps]),
                scores=scores,
                drops=drops,
                freed=sum(nbytes[name] for name in assignment.tensors) - assignment.overhead,
                within_budget=within(drops, budgets),
            )
        )
    return CutoffSet(
        pool=trajectory.pool,
        model=trajectory.model,
        budgets=dict(budgets),
        cutoffs=tuple(cutoffs),
        deepest=deepest_within(cutoffs, budgets),
        knee=_own_knee(cutoffs, budgets),
    )


def deepest_within(cutoffs: Iterable[Cutoff], budgets: Mapping[str, float]) -> int:
    """The deepest cutoff within budget. Scores are not monotonic: shallower ones may be out of it."""
    return max((c.steps for c in cutoffs if within(c.drops, budgets)), default=0)


def at_most(cutoffs: Iterable[Cutoff], steps: int) -> Cutoff:
    """The deepest scored cutoff that goes no further than `steps`."""
    return max((c for c in cutoffs if c.steps <= steps), key=lambda c: c.steps)


def knee(benefits: Sequence[float]) -> int:
    """Index of the elbow of a curve of benefits at evenly spaced costs: the first point furthest above the
    chord from (first cost, least benefit) to (last cost, most benefit). A flat curve's knee is at its end."""
    low, high = min(benefits), max(benefits)
    last = len(benefits) - 1
    if high <= low:
        return last
    return max(range(len(benefits)), key=lambda i: (benefits[i] - low) / (high - low) - i / last)


def _own_knee(cutoffs: Sequence[Cutoff], budgets: Mapping[str, float]) -> int:
    freed = {c.steps: c.freed for c in cutoffs}
    deepest = [deepest_within(cutoffs, {task: b * part for task, b in budgets.items()}) for part in KNEE_GRID]
    return deepest[knee([freed[steps] for steps in deepest])]
