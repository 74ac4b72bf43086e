"""Tables that people query: profiles, steps and sweeps, as polars frames and as Parquet files."""

import io
from collections.abc import Mapping
from pathlib import Path

import polars as pl

from sandhi_core.files import write_atomic
from sandhi_core.records import CutoffSet, OperatingPoints, Profile, Trajectory

_TEXT, _INT, _REAL, _BOOL = pl.String(), pl.Int64(), pl.Float64(), pl.Boolean()

# Schemas are spelt out so that a table without rows has the same columns as any other.
_PROFILES = {
    "model": _TEXT,
    "layer": _INT,
    "component": _TEXT,
    "task": _TEXT,
    "baseline": _REAL,
    "score": _REAL,
    "drop": _REAL,
}
_STEPS = {
    "model": _TEXT,
    "step": _INT,
    "component": _TEXT,
    "layer": _INT,
    "price": _REAL,
    "decision": _TEXT,
    "tensors": _INT,
    "residual_bytes": _INT,
    "task": _TEXT,
    "baseline": _REAL,
    "score": _REAL,
}
_SWEEPS = {
    "model": _TEXT,
    "steps": _INT,
    "accepted": _INT,
    "freed": _INT,
    "task": _TEXT,
    "budget": _REAL,
    "score": _REAL,
    "drop": _REAL,
    "within_budget": _BOOL,
}
_POINTS = {
    "point": _TEXT,
    "criterion": _TEXT,
    "model": _TEXT,
    "steps": _INT,
    "drop": _REAL,
    "pool_saved": _INT,
    "pool_bytes": _INT,
    "frontier": _BOOL,
}


def profiles_table(profiles: Mapping[str, Profile]) -> pl.DataFrame:
    """A row a model, component and task; `drop` is the component's largest of all tasks."""
    rows = [
        (p.model, s.layer, s.component, task, p.baseline[task], score, s.drop)
        for p in profiles.values()
        for s in p.sensitivities
        for task, score in s.scores.items()
    ]
    return pl.DataFrame(rows, schema=_PROFILES, orient="row")


def steps_table(trajectories: Mapping[str, Trajectory]) -> pl.DataFrame:
    """A row a model, step and task; `score` is null where a stride accepted the step without scoring it, and where
    scoring ended before there was one. A walk's steps have a component and a layer, a ladder's a price."""
    rows = [
        (
            t.model,
            s.index,
            s.component,
            s.layer,
            s.price,
            s.decision,
            len(s.tensors),
            sum(adjustment.nbytes for adjustment in s.adjustments.values()),
            task,
            baseline,
            (s.scores or {}).get(task),
        )
        for t in trajectories.values()
        for s in t.steps
        for task, baseline in t.baseline.items()
    ]
    return pl.DataFrame(rows, schema=_STEPS, orient="row")


def sweeps_table(cutoffs: Mapping[str, CutoffSet]) -> pl.DataFrame:
    """A row a model, cutoff and task; `freed`: bytes of the model's own slots; `within_budget`: all tasks."""
    rows = [
        (s.model, c.steps, c.accepted, c.freed, task, s.budgets[task], score, c.drops[task], c.within_budget)
        for s in cutoffs.values()
        for c in s.cutoffs
        for task, score in c.scores.items()
    ]
    return pl.DataFrame(rows, schema=_SWEEPS, orient="row")


def points_table(points: OperatingPoints | None) -> pl.DataFrame:
    """A row an operating point and model, the deployed point last; bytes are the whole pool's."""
    every = [] if points is None else [*points.points, points.deployed]
    frontier = () if points is None else points.frontier
    rows = [
        (
            p.name,
            p.criterion,
            model,
            steps,
            p.drops[model],
            p.savings.net,
            p.savings.checkpoint_bytes,
            p.name in frontier,
        )
        for p in every
        for model, steps in p.cutoffs.items()
    ]
    return pl.DataFrame(rows, schema=_POINTS, orient="row")


def write_tables(directory: Path, tables: Mapping[str, pl.DataFrame]) -> None:
    """Write each table as `NAME.parquet`."""
    for name, table in tables.items():
        buffer = io.BytesIO()
        table.write_parquet(buffer)
        write_atomic(directory / f"{name}.parquet", buffer.getvalue())
