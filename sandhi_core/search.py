"""Merge, check, roll back: how far one model can walk its plan within its tolerance (SANDHI, MICR).

Nothing is undone: a rejected trial is simply not adopted. The walk is a pure function of the plan and of the
scores it is given, so a walk that was killed repeats itself from the score log up to where it stopped.

Three parts: `_Walk.next_trial` says what to try, `_Rule` what is accepted, `search` is the loop.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from sandhi_core.cutoffs import drops_of, within
from sandhi_core.pools.pool import SearchSettings
from sandhi_core.records import Accepts, Evaluation, Plan, PlannedStep, Recipe, Scores, Step, Trajectory

Score = Callable[[dict[str, str], Accepts | None], Evaluation | None]
"""The original's weights with these tensors (name to shared digest; all that is accepted and tried) to an
evaluation. Where it is told what will be accepted it may give None instead: abandoned, the scores would be refused."""


@dataclass(frozen=True)
class _Rule:
    """Accepts scores within `tolerance` of a floor. `original`: the floor is the original's baseline, so that
    drift cannot add up. `reference` (SANDHI): the worst of the baseline and of every score accepted."""

    tolerance: Mapping[str, float]
    higher_is_better: Mapping[str, bool]
    floor: Scores
    sinks: bool

    def accepts(self, scores: Scores) -> bool:
        return within(drops_of(self.floor, scores, self.higher_is_better), self.tolerance)

    def after(self, accepted: Scores) -> "_Rule":
        """The rule for whatever follows an accepted evaluation."""
        if not self.sinks:
            return self
        worse = {task: min if up else max for task, up in self.higher_is_better.items()}
        return replace(self, floor={t: worse[t](before, accepted[t]) for t, before in self.floor.items()})


@dataclass(frozen=True)
class _Failed:
    """A trial that was rejected: that many steps beyond the decided ones, and its scores (None: abandoned)."""

    size: int
    scores: Scores | None


@dataclass(frozen=True)
class _Walk:
    """Where a walk is. While `failed` is set, the step that made that trial fail is looked for within it."""

    rule: _Rule
    longest: int  # stride that a gallop may reach
    decided: tuple[Step, ...] = ()
    stride: int = 1
    failed: _Failed | None = None

    @property
    def accepted(self) -> tuple[Step, ...]:
        return tuple(s for s in self.decided if s.decision == "accepted")

    def next_trial(self, remaining: int) -> tuple[int, _Failed | None]:
        """How many steps to try at once, and the trial that this repeats, whose outcome is known."""
        if self.failed is None:
            return min(self.stride, remaining), None
        if self.failed.size > 1:
            return self.failed.size // 2, None
        # A trial that was abandoned may hold after all where the floor has sunk since.
        known = self.failed.scores is not None or not self.rule.sinks
        return 1, self.failed if known else None

    def after(self, steps: Sequence[Step], scores: Scores | None) -> "_Walk":
        """The walk with a trial of `steps` judged by its `scores`."""
        if scores is not None and self.rule.accepts(scores):
            *inner, last = steps
            left = self.failed.size - len(steps) if self.failed is not None else 0
            return replace(
                self,
                rule=self.rule.after(scores),
                decided=(*self.decided, *inner, last.model_copy(update={"scores": scores})),
                stride=1 if self.failed is not None else min(2 * self.stride, self.longest),
                failed=replace(self.failed, size=left) if self.failed is not None and left else None,
            )
        if len(steps) > 1:
            return replace(self, failed=_Failed(len(steps), scores))
        finite = None if scores is None else {task: value for task, value in scores.items() if math.isfinite(value)}
        rejected = steps[0].model_copy(update={"decision": "rejected", "scores": finite})
        return replace(self, decided=(*self.decided, rejected), stride=1, failed=None)


def search(
    plan: Plan,
    settings: SearchSettings,
    tolerance: Mapping[str, float],
    baseline: Evaluation,
    shared: Callable[[Recipe], str],
    score: Score,
) -> Trajectory:
    """Walk `plan`. `tolerance`: task to absolute drop on the search split. `shared` makes a recipe's tensor
    and gives its digest; it is asked for a step's recipes when that step is first tried.

    `stride: 1` scores every step. `gallop` tries 1, 2, 4, ... steps at once while that holds and bisects a
    trial that does not, down to one step that fails on top of what was accepted. Every accepted prefix that
    was scored is within tolerance; where damage only adds up, both strides decide alike. NaN is never
    accepted. With early rejection `score` is told what will be accepted; the decisions are the same.
    """
    higher_is_better = {task: result.higher_is_better for task, result in baseline.tasks.items()}
    rule = _Rule(tolerance, higher_is_better, baseline.scores, sinks=settings.accept == "reference")
    walk = _Walk(rule, longest=1 if settings.stride == 1 else max(len(plan.steps), 1))
    ready: list[Step] = []  # steps whose shared tensors exist
    evaluations = 0
    while len(walk.decided) < len(plan.steps):
        done = len(walk.decided)
        size, known = walk.next_trial(len(plan.steps) - done)
        ready += [_step(i, plan.steps[i], shared) for i in range(len(ready), done + size)]
        trial = ready[done : done + size]
        if known is None:
            accepts = walk.rule.accepts if settings.early_rejection else None
            scores = _scored((*walk.accepted, *trial), score, accepts)
            evaluations += 1
        else:
            scores = known.scores
        walk = walk.after(trial, scores)
    return Trajectory(
        pool=plan.pool,
        model=plan.model,
        plan=plan.digest,
        baseline=baseline.scores,
        higher_is_better=higher_is_better,
        tolerance=dict(tolerance),
        questions={task: len(result.questions) for task, result in baseline.tasks.items()},
        evaluations=evaluations,
        steps=walk.decided,
    )


def _step(index: int, planned: PlannedStep, shared: Callable[[Recipe], str]) -> Step:
    return Step(
        index=index,
        component=planned.component,
        layer=planned.layer,
        decision="accepted",
        scores=None,
        tensors={merge.tensor: shared(merge.recipe) for merge in planned.merges},
    )


def _scored(steps: Sequence[Step], score: Score, accepts: Accepts | None) -> Scores | None:
    tensors = {name: digest for step in steps for name, digest in step.tensors.items()}
    evaluation = score(tensors, accepts)
    # With early rejection no refused scores are recorded, so that the record does not depend on what was scored before.
    if evaluation is None or (accepts is not None and not accepts(evaluation.scores)):
        return None
    return evaluation.scores
