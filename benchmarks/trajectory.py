"""The row `trajectory`: one model's walk over its plan, step by step with lm-eval's model, galloping with ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from benchmarks.changes import Source, near
from benchmarks.questions import SPLIT, decisions, suite, write
from benchmarks.rows import Row, peak_mib
from benchmarks.ways import Agreement, Clock, Theirs, resident, say
from sandhi_core.cutoffs import drops_of, within
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import Suite
from sandhi_core.grouping.order import Place, wide_order
from sandhi_core.merging import merge
from sandhi_core.pools.pool import ProfileSettings, SearchSettings
from sandhi_core.records import (
    Accepts,
    Contributor,
    Evaluation,
    Plan,
    PlannedMerge,
    PlannedStep,
    Recipe,
    Slot,
    TaskResult,
    Trajectory,
)  # fmt: skip
from sandhi_core.search import search

SHARE = 0.05
"""How far the made-up other model lies from a single one, of each projection's standard deviation."""


@dataclass
class Merging:
    """Makes a recipe's tensor when a walk first asks for it. `other`: None for the model's own with noise."""

    first: Source
    other: Source | None
    made: dict[str, Tensor] = field(default_factory=dict)

    def plan(self, order: list[Place]) -> Plan:
        steps = [
            PlannedStep(component=p[0], layer=p[1], merges=tuple(map(self._planned, self.first.components[p])))
            for p in order
        ]
        source = self.first.fingerprint
        return Plan(pool="bench", model=self.first.name, fingerprint=source.digest, steps=tuple(steps))

    def _planned(self, slot: Slot) -> PlannedMerge:
        info = self.first.fingerprint.tensor(slot.tensor)
        own = Contributor(model=self.first.name, layer=slot.layer, tensor=slot.tensor, digest=slot.digest)
        name = self.other.name if self.other else f"{self.first.name} with noise"
        others = own.model_copy(update={"model": name})
        recipe = Recipe(
            projection=slot.projection, shape=info.shape, dtype=info.dtype, method="mean", rescale="none",
            contributors=(own, others),
        )  # fmt: skip
        return PlannedMerge(tensor=slot.tensor, projection=slot.projection, nbytes=slot.nbytes, recipe=recipe)

    def shared(self, recipe: Recipe) -> str:
        if recipe.digest not in self.made:
            name = recipe.contributors[0].tensor
            own = self.first.checkpoint.tensor(name)
            other = self.other.checkpoint.tensor(name) if self.other else near(own, SHARE, "other model", name)
            self.made[recipe.digest] = merge(recipe, [own, other], None)
        return recipe.digest

    def reader(self, tensors: Mapping[str, str]) -> Callable[[str], Tensor]:
        """The bytes of tensors that `shared` named."""
        return lambda name: self.made[tensors[name]]


@dataclass
class Walk:
    """One walk and what it took. `taken`: the decisions of every scored set of tensors."""

    trajectory: Trajectory
    seconds: float
    taken: dict[frozenset[tuple[str, str]], list[Any]]
    merging: Merging

    @property
    def accepted(self) -> dict[int, dict[str, str]]:
        return {s.index: s.tensors for s in self.trajectory.steps if s.decision == "accepted"}

    @property
    def ends(self) -> dict[str, str]:
        """All tensors that are changed at its end."""
        return {name: digest for tensors in self.accepted.values() for name, digest in tensors.items()}

    @property
    def each(self) -> float:
        """Evaluations for every accepted step."""
        return self.trajectory.evaluations / max(1, len(self.accepted))

    def told(self, inside: bool, tolerance: float) -> str:
        counts = f"{self.trajectory.evaluations} evaluations for {len(self.accepted)} accepted of "
        counts += f"{len(self.trajectory.steps)} steps ({self.each:.2f} each)"
        return f"{counts}, its end {'within' if inside else 'NOT within'} {tolerance:g} of the original"

    def figures(self, inside: bool) -> dict[str, Any]:
        return {
            "evaluations": self.trajectory.evaluations,
            "steps": len(self.trajectory.steps),
            "accepted": sorted(self.accepted),
            "evaluations_per_accepted": self.each,
            "within_tolerance": inside,
        }


def trajectory(
    pair: tuple[Source, Source | None], tasks: Sequence[str], folder: Path, questions: int, threads: int,
    steps: int | None, tolerance: float,
) -> Row:  # fmt: skip
    """Both walks in full, or the step-by-step one over the first `steps` only. `tolerance`: absolute drop of each
    task's accuracy."""
    first, other = pair
    files = write(folder / "tasks", questions, tasks=tasks, shots=0)

    def ready() -> tuple[Resident, Suite]:
        return resident(first.directory, threads), suite(files, tasks, folder / "cache")

    held, asked = ready()
    plan = Merging(first, other).plan(_order(first, held, asked))
    part = plan.model_copy(update={"steps": plan.steps[:steps]})
    theirs = Theirs(held, asked)
    held.hold({}, first.checkpoint.tensor)
    plain = _walk("theirs", 1, part, Merging(first, other), tolerance, (held, asked), theirs.answers)
    held, asked = ready()
    ours = _walk(
        "ours", "gallop", plan, Merging(first, other), tolerance, (held, asked), lambda: held.answers(asked, SPLIT)
    )
    ends = _end_scores(held, asked, [{}, plain.ends, ours.ends], ours.merging)
    limits = {task.name: tolerance for task in asked.tasks}
    inside = [_within(ends[0], end, limits) for end in ends[1:]]
    return _row(first, plan, (plain, ours), inside, tolerance, theirs.batch)


def _order(first: Source, held: Resident, asked: Suite) -> list[Place]:
    """As the product's planner: by the model's own noise profile, which is not part of what is timed."""
    places, scores = list(first.components), []
    for place in [None, *places]:
        held.hold(*(first.noise(place) if place else ({}, first.checkpoint.tensor)))
        scores.append({task: result.value for task, result in held.answers(asked, SPLIT).items()})
    drops = {
        p: max(drops_of(scores[0], s, dict.fromkeys(s, True)).values()) for p, s in zip(places, scores[1:], strict=True)
    }
    nbytes = {place: sum(slot.nbytes for slot in first.components[place]) for place in places}
    return wide_order(nbytes, drops, ProfileSettings().gate, (first.fingerprint.layers - 1) / 2)


def _walk(
    way: str, stride: Literal["gallop", 1], plan: Plan, merging: Merging, tolerance: float,
    ready: tuple[Resident, Suite], answers: Callable[[], dict[str, TaskResult]],
) -> Walk:  # fmt: skip
    held, asked = ready
    clock, taken = Clock(), dict[frozenset[tuple[str, str]], list[Any]]()

    def score(tensors: dict[str, str], accepts: Accepts | None = None) -> Evaluation:
        held.hold(tensors, merging.reader(tensors))
        evaluation = Evaluation(weights="", context="", split=SPLIT, tasks=answers())
        taken[frozenset(tensors.items())] = decisions(asked)
        return evaluation

    with clock("walk"):
        baseline = score({})
        limits = {task.name: tolerance for task in asked.tasks}
        found = search(plan, SearchSettings(stride=stride), limits, baseline, merging.shared, score)
    say(f"trajectory, {way}: {found.evaluations} evaluations, {clock.spent['walk']:.1f} s")
    return Walk(found, clock.spent["walk"], taken, merging)


def _end_scores(held: Resident, asked: Suite, ends: list[dict[str, str]], merging: Merging) -> list[dict[str, float]]:
    """The scores of sets of changed tensors, all by lm-eval's own model."""
    theirs, found = Theirs(held, asked), []
    for tensors in ends:
        held.hold(tensors, merging.reader(tensors))
        found.append({task: result.value for task, result in theirs.answers().items()})
    return found


def _within(baseline: dict[str, float], end: dict[str, float], limits: dict[str, float]) -> bool:
    return within(drops_of(baseline, end, dict.fromkeys(end, True)), limits)


def _row(first: Source, plan: Plan, walks: tuple[Walk, Walk], inside: list[bool], tolerance: float, batch: int) -> Row:
    plain, ours = walks
    agreed = Agreement()
    for tensors in plain.taken.keys() & ours.taken.keys():
        agreed.add(ours.taken[tensors], plain.taken[tensors])
    walked = len(plain.trajectory.steps)
    share = len(plan.steps) / walked
    same = set(plain.accepted) == {index for index in ours.accepted if index < walked}
    notes = [
        f"stride 1: {plain.told(inside[0], tolerance)}",
        f"gallop: {ours.told(inside[1], tolerance)}",
        f"accepted sets {'equal' if same else 'differ'}; other way's batch size {batch}; starting and loading left out",
    ]
    if share > 1:
        notes.append(f"stride 1 walked {walked} of {len(plan.steps)} steps; its seconds are extrapolated")
    figures = {
        "walks": {"stride 1": plain.figures(inside[0]), "gallop": ours.figures(inside[1])},
        "accepted_sets_equal": same,
        "tolerance": tolerance,
        "seconds_walked": plain.seconds,
    }
    spent = ours.seconds, share * plain.seconds
    against = "stride 1, lm-eval's model in memory"
    return Row("trajectory", first.name, against, *spent, str(agreed), notes, figures, peak_mib())
