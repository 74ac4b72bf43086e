"""How far each model goes along its trajectory, and what the pool gains by it.

Scores are compared with the original's baseline, for each model on its own, never with a step's local
acceptance. Sources: SANDHI (SOSP 2026), operating points, for the named points; Satopaa et al., "Finding a
'Kneedle' in a Haystack" (2011), section III, for the knee.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sandhi_core.pool import Pool
from sandhi_core.records import (
    Cutoff,
    CutoffSet,
    Fingerprint,
    HoldoutScore,
    OperatingPoint,
    OperatingPoints,
    Plan,
    Savings,
    Scores,
    Trajectory,
)
from sandhi_core.savings import savings

EPSILON = 1e-9
"""Slack of every comparison of a drop with a budget, so that 0.98 - 0.96 is within 0.02."""

BUDGETS: Mapping[str, float] = {"B": 0.01, "C": 0.02}
"""The reference's uniform budgets, for metrics that are fractions: one and two points."""

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


def tensors_at(trajectory: Trajectory, steps: int) -> dict[str, str]:
    """Tensor name to shared digest after the first `steps` steps; of two accepted writes the later wins."""
    tensors: dict[str, str] = {}
    for step in trajectory.steps[:steps]:
        if step.decision == "accepted":
            tensors |= step.tensors
    return tensors


def cutoff_set(trajectory: Trajectory, plan: Plan, budgets: Mapping[str, float]) -> CutoffSet:
    """Every cutoff of one model whose weights were scored. `budgets`: task to drop, in its metric's unit.

    A rejected step changes no weights and a step inside an accepted stride was not scored, so neither ends a
    cutoff of its own.
    """
    nbytes = {merge.tensor: merge.nbytes for step in plan.steps for merge in step.merges}
    scored = [(0, trajectory.baseline)]
    scored += [
        (step.index + 1, step.scores)
        for step in trajectory.steps
        if step.decision == "accepted" and step.scores is not None
    ]
    cutoffs = []
    for steps, scores in scored:
        drops = drops_of(trajectory.baseline, scores, trajectory.higher_is_better)
        cutoffs.append(
            Cutoff(
                steps=steps,
                accepted=sum(s.decision == "accepted" for s in trajectory.steps[:steps]),
                scores=scores,
                drops=drops,
                freed=sum(nbytes[name] for name in tensors_at(trajectory, steps)),
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


# --- operating points ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Members:
    """What an operating point is made from, by model name."""

    cutoff_sets: Mapping[str, CutoffSet]
    trajectories: Mapping[str, Trajectory]
    plans: Mapping[str, Plan]
    fingerprints: Mapping[str, Fingerprint]

    def savings(self, steps: Mapping[str, int]) -> Savings:
        assignments = {m: tensors_at(t, steps[m]) for m, t in self.trajectories.items()}
        overhead = sum(self._overhead(model, steps[model]) for model in assignments)
        return savings(assignments, self.fingerprints, overhead)

    def _overhead(self, model: str, steps: int) -> int:
        """Bytes of the adjustments that belong to the writes in force at a cutoff."""
        adjustments: dict[str, int] = {}
        walked = self.trajectories[model].steps[:steps]
        for planned, step in zip(self.plans[model].steps, walked, strict=False):
            if step.decision == "accepted":
                adjustments |= {merge.tensor: merge.adjustment.nbytes for merge in planned.merges}
        return sum(adjustments.values())

    def point(self, name: str, criterion: str, steps: Mapping[str, int]) -> OperatingPoint:
        drops = {m: max(at_most(c.cutoffs, steps[m]).drops.values()) for m, c in self.cutoff_sets.items()}
        return OperatingPoint(
            name=name, criterion=criterion, cutoffs=dict(steps), drops=drops, savings=self.savings(steps)
        )

    def own(self, budgets: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
        """Every model at its own deepest cutoff within `budgets` (model to task to drop)."""
        return {m: deepest_within(c.cutoffs, budgets[m]) for m, c in self.cutoff_sets.items()}

    def common(self, budgets: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
        """The deepest single cutoff at which every model is within `budgets`; a shorter walk ends earlier."""
        candidates = sorted({c.steps for s in self.cutoff_sets.values() for c in s.cutoffs}, reverse=True)
        for steps in candidates:
            reached = {m: at_most(s.cutoffs, steps) for m, s in self.cutoff_sets.items()}
            if all(within(c.drops, budgets[m]) for m, c in reached.items()):
                return {m: c.steps for m, c in reached.items()}
        raise AssertionError("cutoff 0 is the original and within every budget")

    def uniform(self, budget: float) -> dict[str, dict[str, float]]:
        return {m: dict.fromkeys(s.budgets, budget) for m, s in self.cutoff_sets.items()}

    def deployed(self, holdouts: Mapping[str, HoldoutScore]) -> dict[str, int]:
        """Every model as far as the holdout let it go, then back to what is worth it: models in name order, until
        none moves. One that goes back to bytes which another model has as its own can leave a third alone, hence
        the rounds; they end because no model ever goes forth."""
        steps, settled = {m: h.steps for m, h in holdouts.items()}, False
        while not settled:
            before = dict(steps)
            for model in sorted(holdouts):
                steps[model] = self._worth_it(steps, model, holdouts[model])
            settled = steps == before
        return steps

    def _worth_it(self, steps: Mapping[str, int], model: str, holdout: HoldoutScore) -> int:
        """The shallowest cutoff of those that held, up to the model's own in `steps`, that saves the pool most."""
        held = [n for n in holdout.held if n <= steps[model]]
        return max(held, key=lambda n: (self.savings({**steps, model: n}).net, -n))

    def knee(self, budget: float) -> dict[str, int]:
        """Every model at its own cutoff for one budget: that up to `budget` where savings have their knee."""
        cutoffs = [self.own(self.uniform(budget * part)) for part in KNEE_GRID]
        return cutoffs[knee([self.savings(steps).net for steps in cutoffs])]


def operating_points(
    pool: Pool,
    cutoff_sets: Mapping[str, CutoffSet],
    trajectories: Mapping[str, Trajectory],
    plans: Mapping[str, Plan],
    fingerprints: Mapping[str, Fingerprint],
    holdouts: Mapping[str, HoldoutScore],
    budgets: Mapping[str, float] = BUDGETS,
) -> OperatingPoints:
    """The pool's named points; all mappings by model name.

    A is unmerged. For each entry of `budgets` (name to the same absolute drop for all models) there is one
    cutoff for the pool and, with `pm`, one a model; Kpm is the knee up to the largest of them. `pool` is the
    pool file's own budgets. `deployed` is no candidate for the frontier, which compares drops on the search split.

    `deployed` spends no quality for nothing: from the boldest cutoffs that held on the holdout each model steps
    back, one at a time, as far as the pool saves no less for it. That takes no further look, and certificates
    stay valid: testing in a fixed sequence bounds the chance of even one false certificate in the whole walk, so
    any cutoff of the walk may be picked afterwards, on whatever ground (Maurer, Hothorn, Lehmacher 1995).
    """
    members = _Members(cutoff_sets, trajectories, plans, fingerprints)
    points = [members.point("A", "unmerged", dict.fromkeys(cutoff_sets, 0))]
    for name, budget in budgets.items():
        uniform = members.uniform(budget)
        points.append(members.point(name, f"one cutoff, drop <= {budget:g}", members.common(uniform)))
        own = members.own(uniform)
        points.append(members.point(f"{name}pm", f"a cutoff per model, drop <= {budget:g}", own))
    largest = max(budgets.values())
    points.append(members.point("Kpm", f"knee of the savings, drop <= {largest:g}", members.knee(largest)))
    deepest = {m: s.deepest for m, s in cutoff_sets.items()}
    points.append(members.point("pool", "a cutoff per model, the pool file's budgets", deepest))
    return OperatingPoints(
        pool=pool.name,
        points=tuple(points),
        frontier=frontier(points),
        deployed=members.point(
            "deployed",
            "cutoffs that held on the holdout, none bolder than saves bytes",
            members.deployed(holdouts),
        ),
    )


def frontier(points: Sequence[OperatingPoint]) -> tuple[str, ...]:
    """Names of the points that no other beats in net savings or worst drop without losing in the other."""
    measured = [(p.name, p.savings.net, max(p.drops.values())) for p in points]

    def beaten(saved: int, drop: float) -> bool:
        return any(s >= saved and d <= drop and (s, d) != (saved, drop) for _, s, d in measured)

    return tuple(name for name, saved, drop in measured if not beaten(saved, drop))
