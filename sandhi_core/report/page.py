"""The rows of a report's tables and its first sentences: records turned into words, before any markup."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sandhi_core.adapters import summary as stock_summary
from sandhi_core.records import Fingerprint, Groups, HoldoutTask, OperatingPoint, Trajectory
from sandhi_core.report import notes
from sandhi_core.report.data import ReportData
from sandhi_core.savings import Holding
from sandhi_core.words import NOT_MEASURED, count, number, percent, signed, size, yes

Tone = Literal["good", "bad", "open", "plain"]
NOTHING_YET = "nothing here yet"


@dataclass(frozen=True)
class Cell:
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Table:
    """Of each row the first cell is its header. `empty` is what stands there without rows, `notes` below them."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str = NOTHING_YET
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tile:
    """One figure of the summary, with what it is and what it means."""

    title: str
    value: str
    detail: str
    tone: Tone


def row(*cells: str | Cell) -> tuple[Cell, ...]:
    return tuple(c if isinstance(c, Cell) else Cell(c) for c in cells)


def summary(data: ReportData) -> tuple[Tile, ...]:
    """What was saved and at what quality, each only as far as it has been measured."""
    return (
        _bytes_tile(data),
        _memory_tile(data),
        _quality_tile(data),
        _certified_tile(data),
        _proof_tile(data),
        *_stock_tile(data),
    )


def _bytes_tile(data: ReportData) -> Tile:
    proof, points = data.proof, data.points
    if proof is not None:
        text = f"{size(proof.verified_disk)} of {size(proof.checkpoint_bytes)}, verified on disk"
        return Tile(
            "Saved",
            percent(proof.verified_disk, proof.checkpoint_bytes),
            text,
            "good" if proof.passed else "bad",
        )
    if points is not None:
        saved = points.deployed.savings
        text = f"{size(saved.net)} of {size(saved.checkpoint_bytes)}, claimed and not verified"
        return Tile("Saved", percent(saved.net, saved.checkpoint_bytes), text, "open")
    return Tile("Saved", NOT_MEASURED, "operating points have not been made", "open")


def _memory_tile(data: ReportData) -> Tile:
    if data.proof is None:
        return Tile("In memory", NOT_MEASURED, "no processes have been compared", "open")
    saved = data.proof.verified_memory
    before = sum(p.pss + p.unmapped for p in data.proof.memory.originals)
    engine = data.proof.memory.engine.partition(" (")[0]  # how it was started is for the record
    text = f"{size(saved)} of {size(before)}, measured in processes of {engine}"
    return Tile("In memory", percent(saved, before), text, "good" if data.proof.passed else "bad")


def _quality_tile(data: ReportData) -> Tile:
    total = len(data.pool.models)
    held = sum(all(t.within_budget for t in h.tasks.values()) for h in data.holdouts.values())
    detail = "models within budget on questions never used before"
    if not data.complete:
        detail = f"{detail}; {count(total - len(data.holdouts), 'model')} not measured"
        return Tile("Quality", f"{held} of {total}", detail, "open" if held == len(data.holdouts) else "bad")
    return Tile("Quality", f"{held} of {total}", detail, "good" if held == total else "bad")


def _certified_tile(data: ReportData) -> Tile:
    total = len(data.pool.models)
    held = sum(all(t.certified for t in h.tasks.values()) for h in data.holdouts.values())
    return Tile("Certified", f"{held} of {total}", "models whose budget holds at 95 % confidence", "plain")


def _proof_tile(data: ReportData) -> Tile:
    proof = data.proof
    if proof is None:
        return Tile("Proof", NOT_MEASURED, "nothing may be deployed yet", "open")
    asked = sum(proof.questions_checked.values())
    equal = sum(proof.questions_equal.values())
    text = f"{count(proof.tensors_checked, 'tensor')} re-read; {equal} of {asked} answers equal what was scored"
    return Tile("Proof", "passed" if proof.passed else "failed", text, "good" if proof.passed else "bad")


def _stock_tile(data: ReportData) -> tuple[Tile, ...]:
    """How far the plan of adapters is complete, where the pool asks for it."""
    if data.pool.deploy.adapters is None:
        return ()
    if data.manifest is None or data.manifest.stock is None:
        return (Tile("Stock adapters", NOT_MEASURED, "nothing has been exported", "open"),)
    plan = stock_summary(data.manifest.stock)
    detail = f"models are adapters of {count(len(plan['bases']), 'base')}, for stock servers"
    value = f"{plan['complete']} of {plan['models']}"
    return (Tile("Stock adapters", value, detail, "plain" if plan["ordinary"] else "good"),)


def stock_table(data: ReportData) -> Table | None:
    """A row a model: the base it is an adapter of, or why it is none. None where the pool asks for no adapters."""
    if data.pool.deploy.adapters is None:
        return None
    plan = None if data.manifest is None else data.manifest.stock
    columns = ("model", "adapter of", "largest rank", "adapter's bytes", "no adapter, because it", "first", "in all")
    rows = []
    for base in plan.bases if plan else ():
        for model, adapter in base.adapters.items():
            rank = str(adapter.rank) if adapter.directory else "the base itself"
            rows.append(row(model, base.directory, rank, f"{adapter.nbytes:,}", "-", "-", "-"))
    for model, why in plan.ordinary.items() if plan else ():
        whole = f"{why.count:,} ({size(why.nbytes)})" if why.count else "-"
        rows.append(row(model, "-", "-", "-", why.reason, why.first or "-", whole))
    said = (*notes.STOCK, *_engines(data))
    return Table("Models as adapters that stock servers take", columns, tuple(rows), notes=said)


def _engines(data: ReportData) -> tuple[str, ...]:
    spec = data.deployment
    if spec is None or spec.stock_memory is None or not spec.bases:
        return ()
    before, kept = spec.memory.weights_bytes_before, spec.stock_memory.weights_bytes
    return (notes.engines(spec.claims.claimed, before, kept),)


def models_table(data: ReportData) -> Table:
    """A row a model and task: the original against what is deployed, on the holdout."""
    columns = (
        "model",
        "task",
        "metric",
        "original",
        "merged",
        "change",
        "95 % interval",
        "budget",
        "within budget",
        "certified",
        "certifiable from",
    )
    rows = []
    for model in data.pool.models:
        holdout = data.holdouts.get(model.name)
        for entry in model.tasks:
            if holdout is None or entry.task not in holdout.tasks:
                gaps = [Cell(NOT_MEASURED, "open"), *(Cell("-") for _ in range(3))]
                rows.append(row(model.name, entry.task, entry.metric, *gaps, f"{entry.budget:g}", "-", "-", "-"))
                continue
            rows.append(row(model.name, entry.task, entry.metric, *_measured(holdout.tasks[entry.task])))
    return Table(
        "Every model on questions never used before (holdout)",
        columns,
        tuple(rows),
        notes=(*notes.scored(data.deployment.rounding if data.deployment else ()), *notes.QUALITY),
    )


def _measured(task: HoldoutTask) -> tuple[Cell, ...]:
    within = Cell(yes(task.within_budget), "good" if task.within_budget else "bad")
    interval = f"{signed(task.low)} to {signed(task.high)}"
    return row(
        number(task.original),
        number(task.merged),
        signed(task.difference),
        interval,
        f"{task.budget:g}",
        within,
        Cell(yes(task.certified), "good" if task.certified else "plain"),
        f"{task.certifiable:.2g}",
    )


def bytes_table(data: ReportData) -> Table:
    """Claimed, verified on disk, verified in memory: never one for another."""
    saved = None if data.points is None else data.points.deployed.savings
    proof = data.proof
    whole = saved.checkpoint_bytes if saved else sum(f.nbytes for f in data.fingerprints.values())
    found = [
        ("all checkpoints", whole if saved or data.fingerprints else None),
        ("exact duplicates", saved.duplicates if saved else None),
        *([("added by residuals", saved.overhead)] if saved and saved.overhead else []),
        ("claimed", saved.net if saved else None),
        ("verified on disk", proof.verified_disk if proof else None),
        ("verified in memory", proof.verified_memory if proof else None),
    ]
    rows = [
        row(name, Cell(NOT_MEASURED, "open"), "-", "-")
        if n is None
        else row(name, size(n), f"{n:,}", percent(n, whole))
        for name, n in found
    ]
    return Table("The pool's bytes", ("what", "size", "in bytes", "of all checkpoints"), tuple(rows), notes=notes.BYTES)


def points_table(data: ReportData) -> Table:
    columns = ("point", "criterion", "saved", "of checkpoints", "worst drop", "frontier")
    rows = []
    if data.points is not None:
        rows = [_point(p, yes(p.name in data.points.frontier)) for p in data.points.points]
        rows.append(_point(data.points.deployed, "-"))
    return Table("Operating points; drops on the search split", columns, tuple(rows), notes=notes.POINTS)


def _point(p: OperatingPoint, frontier: str) -> tuple[Cell, ...]:
    saved = p.savings
    share = percent(saved.net, saved.checkpoint_bytes)
    return row(p.name, p.criterion, size(saved.net), share, number(max(p.drops.values())), frontier)


def trajectories_table(data: ReportData) -> Table:
    """How each model got where it is."""
    columns = (
        "model",
        "layers",
        "size",
        "steps",
        "accepted",
        "rejected",
        "evaluations",
        "deepest in budget",
        "knee",
        "deployed",
        "holdout looks",
    )
    rows = []
    for model in [m.name for m in data.pool.models]:
        print_, walk = data.fingerprints.get(model), data.trajectories.get(model)
        cut, holdout = data.cutoffs.get(model), data.holdouts.get(model)
        rows.append(
            row(
                model,
                str(print_.layers) if print_ else "-",
                size(print_.nbytes) if print_ else "-",
                *(_walked(walk) if walk else ("-", "-", "-", "-")),
                *((str(cut.deepest), str(cut.knee)) if cut else ("-", "-")),
                *((str(holdout.steps), str(len(holdout.walked))) if holdout else ("-", "-")),
            )
        )
    return Table("Every model's trajectory; depths in steps", columns, tuple(rows), notes=notes.TRAJECTORIES)


def _walked(walk: Trajectory) -> tuple[str, str, str, str]:
    accepted = sum(s.decision == "accepted" for s in walk.steps)
    return str(len(walk.steps)), str(accepted), str(len(walk.steps) - accepted), str(walk.evaluations)


def shared_table(shared: Sequence[Holding] | None, fingerprints: Iterable[Fingerprint]) -> Table:
    """Who holds the same tensors (report.data.shared_holdings; None before they are known): layer and component by set
    of models."""
    slots = {slot.tensor: slot for fingerprint in fingerprints for slot in fingerprint.slots}
    found: dict[tuple[str, int, tuple[str, ...], bool], list[Holding]] = {}
    for holding in shared or ():
        slot = slots.get(holding.name)
        what, layer = (slot.component, slot.layer) if slot else ("vector" if holding.vector else "vocabulary", -1)
        found.setdefault((what, layer, holding.models, bool(holding.merged)), []).append(holding)
    rows = [
        row(
            what if layer < 0 else f"{layer} {what}",
            ", ".join(slots[h.name].projection if h.name in slots else h.name for h in held),
            ", ".join(models),
            "merged" if merged else "identical",
            size(sum(h.freed for h in held)),
        )
        for (what, layer, models, merged), held in sorted(found.items(), key=lambda item: (item[0][1], item[0]))
    ]
    columns = ("where", "tensors", "models", "how", "frees")
    return Table("Tensors that several models hold", columns, tuple(rows), _empty(shared is not None))


def excluded_table(data: ReportData) -> Table:
    """Slots that were never proposed, counted by reason."""
    grouped = all(model.name in data.plans for model in data.pool.models)  # plans are made from the groups
    rows = excluded_rows(data.groups.values())
    return Table("Slots in no group", ("model", "reason", "slots"), rows, _empty(grouped), (notes.SLOTS,))


def excluded_rows(groups: Iterable[Groups]) -> tuple[tuple[Cell, ...], ...]:
    counts = Counter((e.model, e.reason) for g in groups for e in g.excluded)
    return tuple(row(model, reason, str(n)) for (model, reason), n in sorted(counts.items()))


def _empty(known: bool) -> str:
    """What stands in an empty table, and whether it is known to stay empty."""
    return "none" if known else NOTHING_YET
