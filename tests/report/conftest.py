"""A finished pool made of records alone: five specialists of six layers and an outsider of other width."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from sandhi_core.assignment import assignment_at
from sandhi_core.cutoffs import cutoff_set
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.layout import make_manifest
from sandhi_core.operating_points import operating_points
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.records import (
    Component,
    Contributor,
    Exclusion,
    Fingerprint,
    Group,
    Groups,
    HoldoutScore,
    HoldoutTask,
    Look,
    MemoryComparison,
    Plan,
    PlannedMerge,
    PlannedStep,
    ProcessMemory,
    Profile,
    Recipe,
    Sensitivity,
    SharingProof,
    Slot,
    Step,
    TensorInfo,
    Trajectory,
    digest_of,
)
from sandhi_core.report.data import ReportData

PROJECTIONS: dict[Component, tuple[str, ...]] = {"attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}


@dataclass(frozen=True)
class Member:
    """`sensitive`: how much noise hurts its attention, MLPs less. `rejects`: places it does not give up."""

    name: str
    tasks: tuple[tuple[str, str, float], ...]  # task, metric, budget
    baseline: float
    sensitive: float
    rejects: frozenset[tuple[str, int]]
    certified: bool = False
    width: int = 128
    layers: int = 6


MEMBERS = (
    Member("sorter", (("sort_words", "acc", 0.02),), 0.963, 0.31, frozenset({("attn", 2), ("attn", 3)}), True),
    Member("ranker", (("largest_number", "acc", 0.02),), 0.912, 0.12, frozenset({("attn", 0)})),
    Member("converter", (("unit_conversion", "acc", 0.03),), 0.884, 0.45, frozenset({("attn", 1), ("mlp", 0)})),
    Member(
        "inflector",
        (("past_tense", "acc_norm", 0.02), ("calibration", "brier_score", 0.015)),
        0.987,
        0.08,
        frozenset(),
        True,
    ),
    Member("chemist", (("formula", "acc", 0.02),), 0.841, 0.22, frozenset({("mlp", 5), ("attn", 4), ("attn", 5)})),
    Member("roman", (("roman_numerals", "acc", 0.02),), 0.958, 0.27, frozenset(), True, width=96, layers=4),
)
GROUP = tuple(m for m in MEMBERS if m.width == 128)


def tensor(name: str, shape: tuple[int, ...], owner: str) -> TensorInfo:
    nbytes = 2 * math.prod(shape)
    digest = digest_of([owner, name, shape])
    return TensorInfo(
        name=name,
        file="model.safetensors",
        dtype="BF16",
        shape=shape,
        nbytes=nbytes,
        digest=digest,
        mean=0.0,
        std=0.02,
        constant_rows=0,
    )


def tensor_name(layer: int, projection: str) -> str:
    part = "self_attn" if projection in PROJECTIONS["attn"] else "mlp"
    return f"model.layers.{layer}.{part}.{projection}_proj.weight"


def shape_of(member: Member, projection: str) -> tuple[int, int]:
    wide = 3 * member.width
    shapes = {
        "k": (member.width // 2, member.width),
        "v": (member.width // 2, member.width),
        "gate": (wide, member.width),
        "up": (wide, member.width),
        "down": (member.width, wide),
    }
    return shapes.get(projection, (member.width, member.width))


def fingerprint(member: Member) -> Fingerprint:
    # The group's embedding and last k are the base's, byte for byte: exact duplicates.
    base = "base" if member in GROUP else member.name
    tensors = [tensor("model.embed_tokens.weight", (768, member.width), base)]
    slots = []
    for layer in range(member.layers):
        for component, projections in PROJECTIONS.items():
            for projection in projections:
                frozen = (layer, projection) == (5, "k")
                info = tensor(
                    tensor_name(layer, projection),
                    shape_of(member, projection),
                    base if frozen else member.name,
                )
                tensors.append(info)
                key = digest_of([projection, info.shape])
                slots.append(
                    Slot(
                        model=member.name,
                        layer=layer,
                        projection=projection,
                        component=component,
                        tensor=info.name,
                        digest=info.digest,
                        nbytes=info.nbytes,
                        key=key,
                    )
                )
    return Fingerprint(
        model=member.name,
        model_type="llama",
        layers=member.layers,
        dtype="BF16",
        files={},
        tensors=tuple(sorted(tensors, key=lambda t: t.name)),
        slots=tuple(slots),
        private=(),
        rows=digest_of(member.name),
    )


def profile(member: Member) -> Profile:
    def drop(component: str, layer: int) -> float:
        edge = 1.0 if layer in (0, member.layers - 1) else 0.4
        return round(member.sensitive * edge * (1.0 if component == "attn" else 0.35) - 0.01 * layer, 4)

    task, _, _ = member.tasks[0]
    sensitivities = tuple(
        Sensitivity(
            layer=layer,
            component=component,
            scores={task: member.baseline - drop(component, layer)},
            drop=drop(component, layer),
        )
        for layer in range(member.layers)
        for component in PROJECTIONS
    )
    return Profile(
        model=member.name,
        fingerprint=digest_of(member.name),
        seeds=(1234,),
        questions={task: 300},
        baseline={task: member.baseline},
        sensitivities=sensitivities,
    )


def recipe(fingerprints: dict[str, Fingerprint], layer: int, projection: str) -> Recipe:
    name = tensor_name(layer, projection)
    contributors = tuple(
        Contributor(model=m.name, layer=layer, tensor=name, digest=fingerprints[m.name].tensor(name).digest)
        for m in sorted(GROUP, key=lambda m: m.name)
    )
    shape = shape_of(GROUP[0], projection)
    return Recipe(
        projection=projection,
        shape=shape,
        dtype="BF16",
        method="mean",
        rescale="none",
        contributors=contributors,
    )


def plan(member: Member, fingerprints: dict[str, Fingerprint]) -> Plan:
    places: list[tuple[Component, int]] = [(c, n) for c in ("mlp", "attn") for n in (3, 2, 4, 1, 0, 5)]
    steps = []
    for component, layer in places if member in GROUP else []:
        recipes = [recipe(fingerprints, layer, p) for p in PROJECTIONS[component] if (layer, p) != (5, "k")]
        merges = tuple(
            PlannedMerge(tensor=tensor_name(layer, r.projection), projection=r.projection, nbytes=r.nbytes, recipe=r)
            for r in recipes
        )
        steps.append(PlannedStep(component=component, layer=layer, merges=merges))
    return Plan(pool="demo", model=member.name, fingerprint=fingerprints[member.name].digest, steps=tuple(steps))


def trajectory(member: Member, planned: Plan) -> Trajectory:
    higher = {task: metric != "brier_score" for task, metric, _ in member.tasks}
    baseline = {task: member.baseline if higher[task] else 0.124 for task, _, _ in member.tasks}
    tolerance = {task: budget for task, _, budget in member.tasks}
    lost, steps = 0.0, []
    for index, step in enumerate(planned.steps):
        rejected = (step.component, step.layer) in member.rejects
        decision: Literal["accepted", "rejected"] = "rejected" if rejected else "accepted"
        now = lost + (0.9 + 2 * (index % 4) if rejected else 0.09 - 0.05 * (index % 3))  # in budgets
        lost = lost if rejected else now
        scores = {t: baseline[t] + (-1 if higher[t] else 1) * now * tolerance[t] for t in baseline}
        scored = rejected or index in (0, 2, 3) or index > 5  # a gallop does not score inside its strides
        tensors = {merge.tensor: merge.recipe.digest for merge in step.merges}
        steps.append(
            Step(
                index=index,
                component=step.component,
                layer=step.layer,
                decision=decision,
                scores=scores if scored else None,
                tensors=tensors,
            )
        )
    return Trajectory(
        pool="demo",
        model=member.name,
        plan=planned.digest,
        baseline=baseline,
        higher_is_better=higher,
        tolerance=tolerance,
        questions=dict.fromkeys(baseline, 300),
        evaluations=len(steps) + 1,
        steps=tuple(steps),
    )


def holdout(member: Member, walk: Trajectory) -> HoldoutScore:
    ends = [s.index + 1 for s in walk.steps if s.decision == "accepted" and s.scores is not None]
    cutoffs = ends[:-2] if member.name == "ranker" else ends
    original = look(member, walk, 0, 0.0)
    looks = [look(member, walk, n, -0.55) for n in cutoffs]
    boldest = (original, *looks)[-1]
    if cutoffs != ends:
        looks.append(look(member, walk, ends[-2], -1.4))
    return HoldoutScore(
        pool="demo",
        model=member.name,
        steps=boldest.steps,
        weights=boldest.weights,
        tasks=boldest.tasks,
        original=original,
        walked=tuple(looks),
    )


def look(member: Member, walk: Trajectory, steps: int, used: float) -> Look:
    """A cutoff at which the model's scores change by `used` budgets."""
    tasks = {}
    for task, metric, budget in member.tasks:
        change = used * budget
        spread = (0.4 if member.certified else 1.3) * budget if steps else 0.0
        original = walk.baseline[task] - 0.004
        merged = original + (change if walk.higher_is_better[task] else -change)
        tasks[task] = HoldoutTask(
            metric=metric,
            budget=budget,
            original=original,
            merged=merged,
            difference=change,
            low=change - spread,
            high=change + spread,
            bound=change - 0.84 * spread,
            questions=400,
            within_budget=used >= -1,
            certified=member.certified and used >= -1,
            certifiable=0.0067,
        )
    return Look(steps=steps, within_budget=used >= -1, weights=digest_of([member.name, steps]), tasks=tasks)


def groups(fingerprints: dict[str, Fingerprint]) -> dict[str, Groups]:
    names = [m.name for m in GROUP]
    proposed = [
        Group(
            recipe=recipe(fingerprints, n, p),
            members=tuple(next(s for s in fingerprints[m].slots if (s.layer, s.projection) == (n, p)) for m in names),
        )
        for n in range(6)
        for c in ("mlp", "attn")
        for p in PROJECTIONS[c]
        if (n, p) != (5, "k")
    ]
    excluded = [Exclusion(model=m, layer=5, projection="k", reason="exact duplicate") for m in names]
    alone = [
        Exclusion(model="roman", layer=s.layer, projection=s.projection, reason="no other model's slot agrees")
        for s in fingerprints["roman"].slots
    ]
    shared = Groups(pool="demo", key="h128-bf16", models=tuple(names), groups=tuple(proposed), excluded=tuple(excluded))
    outsider = Groups(pool="demo", key="h96-bf16", models=("roman",), groups=(), excluded=tuple(alone))
    return {"demo.h128-bf16": shared, "demo.h96-bf16": outsider}


def memory(original: dict[str, int], saved: int) -> MemoryComparison:
    def processes(share: float) -> tuple[ProcessMemory, ...]:
        return tuple(
            ProcessMemory(
                model=m, rss=n, pss=round(n * share), shared=0, private=n, private_dirty=0, unmapped=4096, whole=n
            )
            for m, n in original.items()
        )

    left = 1 - saved / sum(original.values())
    return MemoryComparison(
        engine="transformers", shared=saved, saved=saved, originals=processes(1.0), exports=processes(left)
    )


def make_data(members: tuple[Member, ...] = MEMBERS) -> ReportData:
    pool = Pool(
        name="demo",
        models=tuple(
            ModelEntry(
                name=m.name,
                path=f"/models/{m.name}",
                tasks=tuple(TaskBudget(task=t, metric=metric, budget=b) for t, metric, b in m.tasks),
            )
            for m in members
        ),
    )
    prints = {m.name: fingerprint(m) for m in members}
    plans = {m.name: plan(m, prints) for m in members}
    walks = {m.name: trajectory(m, plans[m.name]) for m in members}
    sets = {m.name: cutoff_set(walks[m.name], plans[m.name], walks[m.name].tolerance) for m in members}
    walked = {m.name: holdout(m, walks[m.name]) for m in members}
    points = operating_points(pool, sets, walks, prints, walked)
    holdouts = deployed_holdouts(points, walked)
    merged = {m: assignment_at(walks[m], points.deployed.cutoffs[m]) for m in walks}
    manifest = make_manifest(
        "demo", "deployed", prints, merged, {m: h.weights for m, h in holdouts.items()}, "hardlink"
    )
    saved = points.deployed.savings
    in_memory = saved.net - 3 * 4096
    proof = SharingProof(
        pool="demo",
        export="exports/demo/0123456789abcdef",
        manifest=manifest.digest,
        passed=True,
        problems=(),
        tensors_checked=sum(len(f.tensors) for f in prints.values()),
        questions_checked=dict.fromkeys(walks, 400),
        questions_equal=dict.fromkeys(walks, 400),
        checkpoint_bytes=saved.checkpoint_bytes,
        duplicates=saved.duplicates,
        claimed=saved.net,
        verified_disk=saved.net,
        verified_memory=in_memory,
        memory=memory({m: f.nbytes for m, f in prints.items()}, in_memory),
    )
    return ReportData(
        pool=pool,
        fingerprints=prints,
        profiles={m.name: profile(m) for m in members},
        groups=groups(prints),
        plans=plans,
        trajectories=walks,
        cutoffs=sets,
        holdouts=holdouts,
        points=points,
        manifest=manifest,
        proof=proof,
    )


@pytest.fixture(scope="session")
def data() -> ReportData:
    return make_data()
