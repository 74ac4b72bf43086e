"""A table for what each stage found, as the UI shows it beside a materialisation; the report's own are in `page`."""

from collections import defaultdict
from collections.abc import Mapping

from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.records import (
    CutoffSet,
    Fingerprint,
    Groups,
    HoldoutScore,
    Plan,
    Profile,
    Scores,
    SharingProof,
    Slot,
    TensorInfo,
    Trajectory,
)
from sandhi_core.report.page import Table, excluded_rows, row
from sandhi_core.words import number, signed, size, yes

MOST_SENSITIVE = 12


def parts_table(found: Fingerprint) -> Table:
    """What the checkpoint's bytes are: projections by shape, and everything else."""
    tensors = {t.name: t for t in found.tensors}
    parts: dict[tuple[str, tuple[int, ...], str], list[TensorInfo]] = defaultdict(list)
    for slot in found.slots:
        tensor = tensors.pop(slot.tensor)
        parts[slot.projection, tensor.shape, tensor.dtype].append(tensor)
    rows = [
        row(part, " x ".join(map(str, shape)), dtype, str(len(held)), size(sum(t.nbytes for t in held)))
        for (part, shape, dtype), held in parts.items()
    ]
    others = tensors.values()
    rows.append(row("all other tensors", "-", "-", str(len(others)), size(sum(t.nbytes for t in others))))
    return Table("What the bytes are", ("part", "shape", "dtype", "tensors", "size"), tuple(rows))


def sensitive_table(profile: Profile) -> Table:
    """The components that noise hurts most, worst first."""
    worst = sorted(profile.sensitivities, key=lambda s: -s.drop)[:MOST_SENSITIVE]
    rows = [row(f"{s.component} {s.layer}", *_scores(s.scores, profile.baseline), number(s.drop)) for s in worst]
    columns = ("component", *(f"{task}: score (change)" for task in profile.baseline), "largest drop")
    return Table("Components that noise hurts most", columns, tuple(rows), "noise was not tried")


def groups_table(groups: Groups) -> Table:
    """Proposed groups by projection and the models that would share."""
    found: dict[tuple[str, tuple[str, ...], str], list[Slot]] = defaultdict(list)
    count: dict[tuple[str, tuple[str, ...], str], int] = defaultdict(int)
    for group in groups.groups:
        models = tuple(dict.fromkeys(slot.model for slot in group.members))
        what = (group.members[0].projection, models, group.recipe.method)
        found[what] += group.members[1:]
        count[what] += 1
    rows = [
        row(projection, ", ".join(models), method, str(count[projection, models, method]), size(_bytes(spared)))
        for (projection, models, method), spared in found.items()
    ]
    columns = ("projection", "models", "method", "groups", "frees at most")
    return Table("Groups, in search order", columns, tuple(rows), "no two models have slots in common")


def left_out_table(groups: Groups) -> Table:
    """Slots in no group, counted by model and reason."""
    return Table("Slots in no group", ("model", "reason", "slots"), excluded_rows([groups]), "none")


def plan_table(plan: Plan) -> Table:
    """The steps to be tried, in order."""
    rows = [
        row(
            str(at),
            f"{step.component} {step.layer}",
            ", ".join(m.projection for m in step.merges),
            ", ".join(sorted({c.model for m in step.merges for c in m.recipe.contributors})),
            size(sum(m.nbytes for m in step.merges)),
        )
        for at, step in enumerate(plan.steps, 1)
    ]
    return Table("Steps in order", ("step", "component", "projections", "made from", "size"), tuple(rows), "no step")


def steps_table(walk: Trajectory) -> Table:
    """Every step with its decision and scores."""
    rows = [
        row(str(s.index + 1), s.label, s.decision, *_scores(s.scores or {}, walk.baseline), str(len(s.tensors)))
        for s in walk.steps
    ]
    what = "component" if any(s.price is None for s in walk.steps) else "price"
    columns = ("step", what, "decision", *(f"{task}: score (change)" for task in walk.baseline), "tensors")
    return Table("Steps as decided on the search split", columns, tuple(rows), "no step")


def cutoffs_table(found: CutoffSet) -> Table:
    """Every scored cutoff with its drops and what it frees."""
    rows = [
        row(
            str(c.steps),
            str(c.accepted),
            *(f"{number(c.scores[task])} ({signed(-c.drops[task])})" for task in found.budgets),
            size(c.freed),
            yes(c.within_budget),
        )
        for c in found.cutoffs
    ]
    tasks = (f"{task}: score (change; budget {budget:g})" for task, budget in found.budgets.items())
    return Table("Cutoffs", ("steps", "accepted", *tasks, "frees at most", "within budget"), tuple(rows))


def looks_table(holdout: HoldoutScore) -> Table:
    """Every cutoff that was tried on unseen questions."""
    rows = [
        row(
            str(look.steps),
            task,
            f"{number(t.original)} to {number(t.merged)}",
            signed(t.difference),
            f"{signed(t.low)} to {signed(t.high)}",
            f"{t.budget:g}",
            yes(t.within_budget),
            yes(t.certified),
        )
        for look in (holdout.original, *holdout.walked)
        for task, t in look.tasks.items()
    ]
    columns = ("steps", "task", "score", "change", "95 % interval", "budget", "within budget", "certified")
    return Table("Cutoffs tried on unseen questions, from safe to bold", columns, tuple(rows))


def processes_table(proof: SharingProof) -> Table:
    """What each process held of its model's weights, from the originals and from the export."""
    exports = {p.model: p for p in proof.memory.exports}
    rows = [
        row(p.model, size(p.pss + p.unmapped), size(e.pss + e.unmapped), size(e.shared), size(e.private))
        for p in proof.memory.originals
        if (e := exports.get(p.model)) is not None
    ]
    columns = ("process", "original, its share", "export, its share", "export: mapped by others too", "export: its own")
    return Table(f"Weights in memory, measured in {proof.memory.engine}", columns, tuple(rows), "not measured")


def servers_table(spec: DeploymentSpec) -> Table:
    """The commands that serve the pool, in starting order."""
    rows = [
        *(row(", ".join(model.model for model in base.models), base.base, base.shell) for base in spec.bases),
        *(row(server.model, server.directory, server.shell) for server in spec.servers),
    ]
    return Table("Servers in starting order", ("models", "directory", "command"), tuple(rows))


def _scores(scores: Scores, baseline: Mapping[str, float]) -> list[str]:
    """By task the score and its change in the metric's own direction; - where it was not scored."""
    return [f"{number(scores[t])} ({signed(scores[t] - base)})" if t in scores else "-" for t, base in baseline.items()]


def _bytes(slots: list[Slot]) -> int:
    return sum(slot.nbytes for slot in slots)
