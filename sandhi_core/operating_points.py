"""What the pool gains when every model goes so far along its trajectory, and which point is deployed.

Source of the named points: SANDHI (SOSP 2026), operating points, as its artifact derives them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandhi_core.assignment import assignment_at
from sandhi_core.cutoffs import KNEE_GRID, at_most, deepest_within, knee, within
from sandhi_core.pools.pool import Pool
from sandhi_core.records import (
    CutoffSet,
    Fingerprint,
    HoldoutScore,
    OperatingPoint,
    OperatingPoints,
    Savings,
    Trajectory,
)
from sandhi_core.savings import PAGE_ALIGNED, savings

BUDGETS: Mapping[str, float] = {"B": 0.01, "C": 0.02}
"""The reference's uniform budgets, for metrics that are fractions: one and two points."""


@dataclass(frozen=True)
class _Members:
    """What an operating point is made from, by model name."""

    cutoff_sets: Mapping[str, CutoffSet]
    trajectories: Mapping[str, Trajectory]
    fingerprints: Mapping[str, Fingerprint]
    alignment: int = PAGE_ALIGNED

    def savings(self, steps: Mapping[str, int]) -> Savings:
        assigned = {m: assignment_at(t, steps[m]) for m, t in self.trajectories.items()}
        return savings(assigned, self.fingerprints, self.alignment)

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

    def deployed(self, holdouts: Mapping[str, HoldoutScore], kept: Mapping[str, int]) -> dict[str, int]:
        """Every model as far as the holdout let it go, then back to what is worth it: models in name order, until
        none moves. One that goes back to bytes which another model has as its own can leave a third alone, hence
        the rounds; they end because no model ever goes forth. Those in `kept` stay where they are."""
        steps, settled = {m: h.steps for m, h in holdouts.items()} | dict(kept), False
        while not settled:
            before = dict(steps)
            for model in sorted(holdouts.keys() - kept.keys()):
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
    fingerprints: Mapping[str, Fingerprint],
    holdouts: Mapping[str, HoldoutScore],
    budgets: Mapping[str, float] = BUDGETS,
    earlier: OperatingPoints | None = None,
) -> OperatingPoints:
    """The pool's named points; all mappings by model name.

    A is unmerged. For each entry of `budgets` (name to the same absolute drop for all models) there is one
    cutoff for the pool and, with `pm`, one a model; Kpm is the knee up to the largest of them. `pool` is the
    pool file's own budgets. `deployed` is no candidate for the frontier, which compares drops on the search split.

    `deployed` spends no quality for nothing: from the boldest cutoffs that held on the holdout each model steps
    back, one at a time, as far as the pool saves no less for it. That takes no further look, and certificates
    stay valid: testing in a fixed sequence bounds the chance of even one false certificate in the whole walk, so
    any cutoff of the walk may be picked afterwards, on whatever ground (Maurer, Hothorn, Lehmacher 1995).

    `earlier` are the pool's points before models joined, if any: where nothing else happened, every other model stays
    deployed as it was, though a newcomer may make another of its cutoffs worth more; the next regrouping takes that.
    """
    members = _Members(cutoff_sets, trajectories, fingerprints, pool.deploy.alignment_bytes)
    looks = {model: score.digest for model, score in holdouts.items()}
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
            members.deployed(holdouts, _kept(earlier, looks, pool.deploy.alignment_bytes)),
        ),
        holdouts=looks,
        alignment=pool.deploy.alignment_bytes,
    )


def _kept(earlier: OperatingPoints | None, looks: Mapping[str, str], alignment: int) -> Mapping[str, int]:
    """The cutoffs that stay deployed: all of `earlier`, if models have joined since and nothing else has changed."""
    if earlier is None or earlier.alignment != alignment or not earlier.holdouts.items() <= looks.items():
        return {}
    return {model: earlier.deployed.cutoffs[model] for model in earlier.holdouts}


def frontier(points: Sequence[OperatingPoint]) -> tuple[str, ...]:
    """Names of the points that no other beats in net savings or its worst drop without losing in the other."""
    measured = [(p.name, p.savings.net, max(p.drops.values())) for p in points]

    def beaten(saved: int, drop: float) -> bool:
        return any(s >= saved and d <= drop and (s, d) != (saved, drop) for _, s, d in measured)

    return tuple(name for name, saved, drop in measured if not beaten(saved, drop))
