"""The operating points of a recorded run by Sandhi's own rules, beside the recorded ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sandhi_core.assignment import assignment_at
from sandhi_core.cutoffs import at_most
from sandhi_core.operating_points import operating_points
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.records import CutoffSet, Fingerprint, OperatingPoint, OperatingPoints, Trajectory
from sandhi_core.savings import savings
from tests.conformance.recorded import POINTS, RecordedRun, Row
from tests.synthetic import holdout


def pool_of(run: RecordedRun) -> Pool:
    models = tuple(
        ModelEntry(
            name=m.name,
            path=f"/recorded/{m.name}",
            tasks=(TaskBudget(task=m.task, metric="acc", budget=m.tolerance[m.task]),),
        )
        for m in run.models
    )
    return Pool(name=run.name, models=models)


def budgets_of(run: RecordedRun) -> dict[str, float]:
    """Name to drop of the points that are a budget for the whole pool, as the report words them."""
    found = {}
    for row in run.rows("report.csv"):
        if budget := re.fullmatch(r"acc drop <= ([0-9.]+)%", row["criterion"]):
            found[row["point"]] = float(budget[1]) / POINTS
    return found or {"B": 0.01, "C": 0.02}


def points_of(run: RecordedRun) -> OperatingPoints:
    """All named points. Nothing was recorded on questions never used before, so no model may be deployed merged."""
    return operating_points(
        pool_of(run),
        run.of("cutoffs"),
        run.of("trajectory"),
        run.of("fingerprint"),
        {m.name: holdout(m.name, []) for m in run.models},
        budgets_of(run),
    )


def sweep(
    cutoff_sets: Mapping[str, CutoffSet],
    trajectories: Mapping[str, Trajectory],
    fingerprints: Mapping[str, Fingerprint],
) -> tuple[OperatingPoint, ...]:
    """What the pool saves and loses at one cutoff for all models, from the first step to the last of the longest walk;
    a shorter walk ends earlier."""
    found = []
    for steps in range(1, max(len(t.steps) for t in trajectories.values()) + 1):
        reached = {m: at_most(s.cutoffs, steps) for m, s in cutoff_sets.items()}
        cutoffs = {m: cutoff.steps for m, cutoff in reached.items()}
        found.append(
            OperatingPoint(
                name=str(steps),
                criterion=f"one cutoff, {steps} steps",
                cutoffs=cutoffs,
                drops={m: max(cutoff.drops.values()) for m, cutoff in reached.items()},
                savings=savings({m: assignment_at(t, cutoffs[m]) for m, t in trajectories.items()}, fingerprints),
            )
        )
    return tuple(found)


def sweep_of(run: RecordedRun) -> tuple[OperatingPoint, ...]:
    return sweep(run.of("cutoffs"), run.of("trajectory"), run.of("fingerprint"))


@dataclass(frozen=True)
class Compared:
    """One row of a run's report beside ours. Percentages are of the bytes of all checkpoints."""

    row: Row
    ours: OperatingPoint

    @property
    def recorded(self) -> float:
        return float(self.row["savings_pct"])

    @property
    def net(self) -> float:
        return 100 * self.ours.savings.net / self.ours.savings.checkpoint_bytes

    @property
    def gross(self) -> float:
        return 100 * self.ours.savings.freed / self.ours.savings.checkpoint_bytes


def compared(run: RecordedRun) -> list[Compared]:
    """Every row of report.csv with the point of ours that goes by the same criterion."""
    named = {p.name: p for p in points_of(run).points}
    for row in run.rows("report.csv"):
        if target := re.fullmatch(r"mem savings ~ ([0-9.]+)%", row["criterion"]):
            share = float(target[1]) / 100
            named[row["point"]] = min(
                sweep_of(run), key=lambda p: abs(p.savings.net / p.savings.checkpoint_bytes - share)
            )
    return [Compared(row, named[row["point"]]) for row in run.rows("report.csv")]


def reached(run: RecordedRun, point: OperatingPoint) -> dict[str, float]:
    """Every model's score at a point, in points as recorded."""
    cutoffs = {m.name: at_most(m.cutoffs.cutoffs, point.cutoffs[m.name]) for m in run.models}
    return {name: POINTS * min(cutoff.scores.values()) for name, cutoff in cutoffs.items()}
