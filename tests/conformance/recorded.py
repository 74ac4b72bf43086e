"""A recorded run of the reference as Sandhi's records: checkpoints, profiles, plans, trajectories.

Scores and thresholds become fractions (recorded: percent). What was not recorded (weights, their digests, the
questions) is made up from names or left empty.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from sandhi_core.cutoffs import cutoff_set
from sandhi_core.records import (
    Adjustment,
    Contributor,
    CutoffSet,
    Fingerprint,
    Plan,
    PlannedMerge,
    PlannedStep,
    Profile,
    Recipe,
    Sensitivity,
    Slot,
    Step,
    Trajectory,
    digest_of,
)
from tests.conformance.families import Family, family_of
from tests.synthetic import PROJECTIONS, tensor

Row = dict[str, str]
POINTS = 100.0  # the records count in points
CORRECTION = 16  # bytes a row of a scaled slot: fp32 mean and deviation, as aimed at and as achieved


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def slug(label: str) -> str:
    """A recorded model's name as pool files allow it."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in label)


def contributors(models: str, default: int) -> tuple[tuple[str, int], ...]:
    """The `label:layer` pairs of a proposal, sorted; a label without a layer is at the `default` one."""
    pairs = []
    for part in models.split(","):
        label, _, layer = part.strip().partition(":")
        if label:
            pairs.append((label.strip(), int(layer) if layer.strip().isdigit() else default))
    return tuple(sorted(set(pairs)))


def read_profile(path: Path, label: str) -> Profile:
    """A noise profile. Row -1 is the baseline."""
    rows = read_rows(path)
    (baseline,) = {float(r["score"]) / POINTS for r in rows if int(r["layer"]) < 0}
    found = sorted((int(r["layer"]), r["variant"], float(r["score"]) / POINTS) for r in rows if int(r["layer"]) >= 0)
    task = rows[0]["task"]
    return Profile(
        model=slug(label),
        fingerprint="",
        seeds=(),
        questions={},
        baseline={task: baseline},
        sensitivities=tuple(
            Sensitivity.model_validate(
                {"layer": layer, "component": kind, "scores": {task: score}, "drop": baseline - score}
            )
            for layer, kind, score in found
        ),
    )


@dataclass(frozen=True)
class RecordedModel:
    """One model of a run. `proposals` are its ops rows with their stage, `log` its steps without the baseline."""

    label: str
    family: Family
    profile: Profile | None
    proposals: tuple[tuple[int, Row], ...]
    baseline: float
    log: tuple[Row, ...]

    @property
    def name(self) -> str:
        return slug(self.label)

    @property
    def task(self) -> str:
        return next(iter(self.profile.baseline)) if self.profile else "score"

    def score(self, row: Row) -> float | None:
        """None where the evaluation failed."""
        score = float(row["score"] or "nan") / POINTS
        return score if math.isfinite(score) else None

    def steps_at(self, cutoff: int) -> int:
        """How many steps lie within the reference's cutoff, which counts the step of that index in."""
        return sum(int(row["step_idx"]) <= cutoff for row in self.log)

    @cached_property
    def tolerance(self) -> dict[str, float]:
        return {self.task: max(float(row["threshold"]) for row in self.log if row["threshold"]) / POINTS}

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """All of its own bytes, none like any other model's."""
        slots = [self._slot(layer, projection) for layer in range(self.family.layers) for projection in PROJECTIONS]
        rest = self.family.checkpoint_bytes - sum(s.nbytes for s in slots)
        tensors = [tensor(s.tensor, self.family.shape(s.projection), s.digest) for s in slots]
        tensors.append(tensor("rest", (rest // 2,), digest_of([self.label, "rest"])))
        return Fingerprint(
            model=self.name,
            model_type="recorded",
            layers=self.family.layers,
            dtype="BF16",
            files={},
            tensors=tuple(sorted(tensors, key=lambda t: t.name)),
            slots=tuple(slots),
            private=(),
            rows="",
        )

    @cached_property
    def plan(self) -> Plan:
        """A step for every block of proposals that has a row in the log: neighbours of one stage, layer, component."""
        blocks = groupby(self.proposals, key=lambda p: (p[0], int(p[1]["layer"]), p[1]["component"].split("_")[0]))
        steps = [
            self._step(kind, layer, [row for _, row in block])
            for ((_, layer, kind), block), _ in zip(blocks, self.log, strict=False)
        ]
        return Plan(pool="", model=self.name, fingerprint=self.fingerprint.digest, steps=tuple(steps))

    @cached_property
    def trajectory(self) -> Trajectory:
        steps = []
        for index, (planned, row) in enumerate(zip(self.plan.steps, self.log, strict=True)):
            score = self.score(row)
            steps.append(
                Step(
                    index=index,
                    component=planned.component,
                    layer=planned.layer,
                    decision="accepted" if row["decision"] == "accepted" else "rejected",
                    scores=None if score is None else {self.task: score},
                    tensors={merge.tensor: merge.recipe.digest for merge in planned.merges},
                    adjustments={merge.tensor: _moments(merge) for merge in planned.merges} if scaled(row) else {},
                    scaled=scaled(row),
                )
            )
        return Trajectory(
            pool="",
            model=self.name,
            plan=self.plan.digest,
            baseline={self.task: self.baseline},
            higher_is_better={self.task: True},
            tolerance=self.tolerance,
            questions={},
            evaluations=len(steps) + 1,
            steps=tuple(steps),
        )

    @cached_property
    def cutoffs(self) -> CutoffSet:
        return cutoff_set(self.trajectory, self.plan, self.tolerance)

    def _step(self, kind: str, layer: int, rows: Iterable[Row]) -> PlannedStep:
        merges = []
        for row in rows:
            parts = contributors(row["models"], layer)
            if self.label in {label for label, _ in parts}:
                merges.append(self._merge(layer, row["component"].split("_")[1], parts))
        return PlannedStep.model_validate({"component": kind, "layer": layer, "merges": tuple(merges)})

    def _merge(self, layer: int, projection: str, parts: tuple[tuple[str, int], ...]) -> PlannedMerge:
        slot = self._slot(layer, projection)
        recipe = Recipe(
            projection=projection,
            shape=self.family.shape(projection),
            dtype="BF16",
            method="mean",
            rescale="none",
            contributors=tuple(
                Contributor(model=slug(label), layer=at, tensor=_name(at, projection), digest="") for label, at in parts
            ),
        )
        return PlannedMerge(tensor=slot.tensor, projection=projection, nbytes=slot.nbytes, recipe=recipe)

    def _slot(self, layer: int, projection: str) -> Slot:
        rows, columns = self.family.shape(projection)
        return Slot(
            model=self.name,
            layer=layer,
            projection=projection,
            component=PROJECTIONS[projection],
            tensor=_name(layer, projection),
            digest=digest_of([self.label, layer, projection]),
            nbytes=2 * rows * columns,
            key=f"{projection} {rows}x{columns}",
        )


def _moments(merge: PlannedMerge) -> Adjustment:
    return Adjustment(kind="row_moments", nbytes=CORRECTION * merge.recipe.shape[0])


def scaled(row: Row) -> bool:
    return (row.get("scaled") or "").strip().lower() == "true"


@dataclass(frozen=True)
class RecordedRun:
    """A pool that the reference walked. `results`: the folder with its sweep and operating points, `analysis`: with
    the merge groups of these; either may not be there."""

    name: str
    gate: float  # as a fraction
    models: tuple[RecordedModel, ...]  # by name
    results: Path
    analysis: Path

    def of(self, what: str) -> dict[str, Any]:
        """One kind of record by model name, e.g. `trajectory`."""
        return {m.name: getattr(m, what) for m in self.models}

    def rows(self, file: str) -> list[Row]:
        path = self.results / file
        return read_rows(path) if path.is_file() else []


def recorded_runs(artifact: Path) -> Iterator[RecordedRun]:
    """Every run with a log, by name. Raises ValueError where a model's family is unknown or its log incomplete."""
    for folder in sorted((artifact / "runs").glob("*")):
        logs = {path.parent.name: path for path in sorted(folder.glob("micr/**/steps.csv"))}
        if logs:
            models = [_model(artifact, folder, label, path) for label, path in logs.items()]
            yield RecordedRun(
                name=folder.name,
                gate=_gate(folder),
                models=tuple(sorted(models, key=lambda m: m.name)),
                results=artifact / "results" / folder.name,
                analysis=folder / "analysis" / folder.name,
            )


def _gate(folder: Path) -> float:
    config = folder / "run_config.json"
    settings = json.loads(config.read_text())["settings"] if config.is_file() else {}
    return float(settings.get("baseline_drop_threshold", 5.0)) / POINTS


def _model(artifact: Path, folder: Path, label: str, log: Path) -> RecordedModel:
    measured = artifact / "results" / "profiler" / f"gaussian_{label}.csv"
    profile = read_profile(measured, label) if measured.is_file() else None
    layers = 1 + max(s.layer for s in profile.sensitivities) if profile else None
    rows = read_rows(log)
    baselines = [float(r["score"]) / POINTS for r in rows if int(r["step_idx"]) < 0]
    if not baselines:
        raise ValueError(f"{log}: no row with step_idx -1, so no baseline")
    proposals = [
        (stage, row)
        for stage in (1, 2)
        for path in sorted(folder.glob(f"clustering/**/ops_step{stage}_{label}.csv"))[:1]
        for row in read_rows(path)
        if row["op"] == "merge"
    ]
    return RecordedModel(
        label=label,
        family=family_of(label, layers),
        profile=profile,
        proposals=tuple(proposals),
        baseline=baselines[-1],
        log=tuple(r for r in rows if int(r["step_idx"]) >= 0),
    )


def _name(layer: int, projection: str) -> str:
    block = "self_attn" if PROJECTIONS[projection] == "attn" else "mlp"
    return f"model.layers.{layer}.{block}.{projection}_proj.weight"
