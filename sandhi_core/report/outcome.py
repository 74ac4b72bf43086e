"""What came out, drawn from records: quality on unseen questions, bytes, and who shares what."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.transforms import blended_transform_factory

from sandhi_core.records import HoldoutScore, HoldoutTask, ProcessMemory, Savings, SharingProof
from sandhi_core.report import style
from sandhi_core.report.data import SlotState, State
from sandhi_core.report.figures import ANNOTATED_LAYERS, layer_axis
from sandhi_core.words import percent, signed, size

HIDDEN_BEYOND = 2.5  # budgets; wider intervals are cut there, so that the budget's line stays in sight


@style.styled
def holdout_chart(holdouts: Mapping[str, HoldoutScore]) -> Figure:
    """A row a model and task: change on questions never used before, with its 95 % interval, in budgets.

    0 is the original, -1 the whole budget, so that tasks with different metrics stand beside each other.
    """
    rows = [(model, name, task) for model, h in holdouts.items() for name, task in h.tasks.items()]
    figure = style.new_figure(1.25 + 0.36 * len(rows))
    axes = figure.subplots()
    reach = max([1.3, *(min(abs(v) / t.budget, HIDDEN_BEYOND) for _, _, t in rows for v in (t.low, t.high))])
    axes.axvspan(-10 * HIDDEN_BEYOND, -1, color=style.EMPTY, zorder=0, linewidth=0)
    axes.axvline(-1, color=style.INK, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.axvline(0, color=style.MUTED, linestyle=":", linewidth=1.0)
    side = blended_transform_factory(axes.transAxes, axes.transData)
    axes.text(1.02, -0.62, "change of budget", transform=side, va="bottom", fontsize=8, color=style.MUTED)
    for y, (_, _, task) in enumerate(rows):
        colour = style.BLUE if task.within_budget else style.ORANGE
        axes.hlines(y, task.low / task.budget, task.high / task.budget, color=colour, linewidth=2)
        marker = "o" if task.within_budget else "X"
        face = colour if task.certified or not task.within_budget else style.PAPER
        change = task.difference / task.budget
        edge = max(-reach, min(change, reach))
        if edge != change:  # a mark out of sight would look like a model that was not measured
            marker = ">" if change > 0 else "<"
        axes.plot(edge, y, marker, color=colour, mfc=face, mew=1.6, markersize=7)
        axes.text(
            1.02,
            y,
            f"{signed(task.difference)} of {task.budget:g}",
            transform=side,
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(rows)), [_row_label(holdouts, model, task) for model, task, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(-reach * 1.08, reach * 1.08)
    axes.set_xlabel("change in budgets: 0 is the original, -1 the whole budget")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _holdout_legend(figure, [task for _, _, task in rows])
    return figure


def _row_label(holdouts: Mapping[str, HoldoutScore], model: str, task: str) -> str:
    several = len(holdouts[model].tasks) > 1
    return f"{style.label(model, 18)}\n{style.label(task, 18)}" if several else style.label(model, 18)


def _holdout_legend(figure: Figure, tasks: Sequence[HoldoutTask]) -> None:
    marks = [
        ("within budget, certified at 95 %", "o", style.BLUE, style.BLUE, any(t.certified for t in tasks)),
        (
            "within budget",
            "o",
            style.BLUE,
            style.PAPER,
            any(t.within_budget and not t.certified for t in tasks),
        ),
        ("out of budget", "X", style.ORANGE, style.ORANGE, any(not t.within_budget for t in tasks)),
    ]
    for text, marker, colour, face, present in marks:
        if present:
            axes = figure.axes[0]
            axes.plot([], [], marker, color=colour, mfc=face, mew=1.6, markersize=7, label=text)
    figure.legend(loc="outside lower center", ncols=2)


@style.styled
def bytes_chart(savings: Savings, proof: SharingProof | None) -> Figure:
    """Bytes before and after: what is claimed, what the files hold, what running processes hold."""
    before = savings.checkpoint_bytes
    bars = [("checkpoints\nas they were", before, before), ("claimed", before - savings.net, before)]
    if proof is not None:
        bars.append(("verified\non disk", proof.checkpoint_bytes - proof.verified_disk, proof.checkpoint_bytes))
        loaded = _held(proof.memory.originals)
        bars.append(("processes with\noriginals", loaded, loaded))
        bars.append(("verified\nin memory", loaded - proof.verified_memory, loaded))
    figure = style.new_figure(0.75 + 0.45 * len(bars))
    axes = figure.subplots()
    side = blended_transform_factory(axes.transAxes, axes.transData)
    for y, (_, after, whole) in enumerate(bars):
        original = after == whole
        axes.barh(y, after, color=style.MUTED if original else style.BLUE, height=0.62)
        axes.barh(y, whole - after, left=after, color=style.EMPTY, edgecolor=style.LINE, height=0.62)
        text = size(after) if original else f"{size(after)}\n{percent(whole - after, whole)} saved"
        axes.text(1.02, y, text, transform=side, va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, max(whole for _, _, whole in bars))
    axes.tick_params(axis="both", length=0, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [
        Patch(color=style.BLUE, label="held after sharing"),
        Patch(fc=style.EMPTY, ec=style.LINE, label="saved"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def _held(processes: Sequence[ProcessMemory]) -> int:
    return sum(p.pss + p.unmapped for p in processes)


STATES: Mapping[State, tuple[str, str, str]] = {  # fill, colour of the sign, words
    "shared": (style.BLUE, style.PAPER, "merged, shared by so many models; +: with a residual of its own"),
    "duplicate": (style.GREEN, style.PAPER, "identical from the start, kept once"),
    "alone": (style.ORANGE, style.PAPER, "merged, but no other model kept it"),
    "kept": (style.EMPTY, style.MUTED, "own: a merged one was tried or planned, not kept"),
    "excluded": (style.PAPER, style.MUTED, "own: no partner"),
}


@style.styled
def sharing_map(states: Mapping[str, Sequence[SlotState]]) -> Figure:
    """Layer by projection, a panel a model: what became of every slot, how many models hold its tensor."""
    layers = max(s.slot.layer for slots in states.values() for s in slots) + 1
    rows = {model: list(dict.fromkeys(s.slot.projection for s in slots)) for model, slots in states.items()}
    heights = [len(names) for names in rows.values()]
    present = [s for s in STATES if any(slot.state == s for slots in states.values() for slot in slots)]
    figure = style.new_figure(0.6 + sum(0.16 * h + 0.28 for h in heights) + 0.2 * len(present))
    panels = figure.subplots(len(states), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axes, (model, slots) in zip(panels, states.items(), strict=True):
        for slot in slots:
            place = (slot.slot.layer + 0.03, rows[model].index(slot.slot.projection) + 0.05)
            fill, ink, _ = STATES[slot.state]
            edge = {"ec": style.LINE, "lw": 0.7} if slot.state == "excluded" else {"lw": 0}
            axes.add_patch(Rectangle(place, 0.94, 0.9, fc=fill, **edge))
            if layers <= ANNOTATED_LAYERS:
                many = f"{len(slot.holders)}{'+' if slot.added else ''}"
                sign = {"shared": many, "duplicate": "=", "alone": "1"}.get(slot.state, "")
                x, y = place[0] + 0.47, place[1] + 0.47
                axes.text(x, y, sign, ha="center", va="center", fontsize=7.5, color=ink, fontweight="bold")
        layer_axis(axes, layers)
        axes.set_ylim(len(rows[model]), 0)
        axes.set_yticks([i + 0.5 for i in range(len(rows[model]))], rows[model], fontsize=7.5)
        axes.set_title(style.label(model, 40))
    panels[-1].set_xlabel("layer")
    handles = [Patch(fc=STATES[s][0], ec=style.LINE, label=STATES[s][2]) for s in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=1)
    return figure
