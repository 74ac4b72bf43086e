"""How a result came about, drawn from records: noise sensitivity, one model's trajectory, the operating points."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

from sandhi_core.records import Component, OperatingPoint, OperatingPoints, Profile, Step, Trajectory
from sandhi_core.report import style
from sandhi_core.words import brief, number

COMPONENTS: tuple[Component, ...] = ("attn", "mlp")
ANNOTATED_LAYERS = 14  # up to so many layers a cell has room for its value
NAMED_STEPS = 24


def layer_axis(axes: Axes, layers: int) -> None:
    """Layers as columns, each tick in the middle of its column."""
    every = max(1, -(-layers // 12))
    axes.set_xlim(0, layers)
    axes.set_xticks(np.arange(0, layers, every) + 0.5, [str(n) for n in range(0, layers, every)])
    axes.tick_params(length=0)
    axes.label_outer()
    for spine in axes.spines.values():
        spine.set_visible(False)


@style.styled
def sensitivity_map(*profiles: Profile, gate: float | None = None) -> Figure:
    """Layer by component, a panel a model: the drop with noise in that component, in the metric's unit.

    All panels have one colour scale. Components that are hurt more than `gate` are framed.
    """
    layers = max(s.layer for p in profiles for s in p.sensitivities) + 1
    worst = max(max(s.drop for s in p.sensitivities) for p in profiles)
    norm = Normalize(0.0, max(worst, gate or 0.0, 1e-9))
    colours = mpl.colormaps["YlOrBr"]
    figure = style.new_figure(0.68 * len(profiles) + 1.1)
    panels = figure.subplots(len(profiles), 1, squeeze=False, sharex=True)[:, 0]
    for axes, profile in zip(panels, profiles, strict=True):
        drops = np.full((2, layers), np.nan)
        for s in profile.sensitivities:
            drops[COMPONENTS.index(s.component), s.layer] = s.drop
        axes.pcolormesh(np.clip(drops, 0.0, None), cmap=colours, norm=norm, edgecolors=style.PAPER, linewidth=1.0)
        _mark_cells(axes, drops, colours, norm, gate, annotated=layers <= ANNOTATED_LAYERS)
        layer_axis(axes, layers)
        axes.set_yticks([0.5, 1.5], COMPONENTS)
        axes.invert_yaxis()
        axes.set_title(style.label(profile.model, 40))
    panels[-1].set_xlabel("layer" if gate is None else f"layer    (framed: drop above the gate of {gate:g})")
    bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=list(panels), location="bottom", shrink=0.6, aspect=30, pad=0.02
    )
    bar.set_label("drop under noise, in the metric's unit")
    bar.outline.set_visible(False)
    return figure


def _mark_cells(
    axes: Axes, drops: np.ndarray, colours: Colormap, norm: Normalize, gate: float | None, *, annotated: bool
) -> None:
    for (row, layer), drop in np.ndenumerate(drops):
        if np.isnan(drop):
            continue
        if annotated:
            red, green, blue, _ = colours(norm(max(drop, 0.0)))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            colour = style.ON_DARK if dark else style.ON_LIGHT
            axes.text(layer + 0.5, row + 0.5, brief(drop), ha="center", va="center", fontsize=8, color=colour)
        if gate is not None and drop > gate:
            frame = Rectangle((layer + 0.06, row + 0.1), 0.88, 0.8, fill=False, edgecolor=style.ON_LIGHT, linewidth=1.2)
            axes.add_patch(frame)


@style.styled
def trajectory_chart(trajectory: Trajectory, budgets: Mapping[str, float], deployed: int | None = None) -> Figure:
    """Scores along one model's trajectory on the search split, a panel a task, with the line that its budget draws.

    `deployed`: how many steps the deployed weights go. Rejected scores far beyond the budget are drawn at the
    edge.
    """
    tasks = list(trajectory.baseline)
    figure = style.new_figure(1.15 + 1.6 * len(tasks))
    panels = figure.subplots(len(tasks), 1, squeeze=False, sharex=True)[:, 0]
    for axes, task in zip(panels, tasks, strict=True):
        _walk(axes, trajectory, task, budgets[task])
        axes.set_title(f"{style.label(trajectory.model, 24)}: {style.label(task, 28)}")
        if deployed is not None:
            axes.axvline(deployed, color=style.GREEN, linewidth=1.4, zorder=1, label="deployed here")
    _step_axis(panels[-1], trajectory.steps)
    shown = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        shown.values(), shown.keys(), loc="outside lower center", ncols=4, columnspacing=1.0, handlelength=1.6
    )
    return figure


def _walk(axes: Axes, trajectory: Trajectory, task: str, budget: float) -> None:
    """One task's scores; the y axis shows what the budget's line decides, not how badly a step failed."""
    baseline = trajectory.baseline[task]
    worse = -1.0 if trajectory.higher_is_better[task] else 1.0
    limit = baseline + worse * budget
    scored = [(s.index + 1, s.scores[task], s.decision) for s in trajectory.steps if s.scores and task in s.scores]
    unscored = [s.index + 1 for s in trajectory.steps if s.decision == "rejected" and task not in (s.scores or {})]
    accepted = [(0, baseline), *((x, y) for x, y, decision in scored if decision == "accepted")]
    rejected = [(x, y) for x, y, decision in scored if decision == "rejected"]
    inside = [limit, *(y for _, y in accepted)]
    room = max(max(inside) - min(inside), budget)
    floor, ceiling = min(inside) - room, max(inside) + room
    near = [(x, y) for x, y in rejected if floor <= y <= ceiling]
    inside += [y for _, y in near]
    low, high = min(inside) - 0.25 * room, max(inside) + 0.25 * room
    _line(axes, limit, f"budget\n{budget:g}", color=style.INK, linestyle=(0, (5, 3)), linewidth=1.2)
    _line(axes, baseline, f"original\n{number(baseline)}", color=style.MUTED, linestyle=":", linewidth=1.0)
    axes.plot(*zip(*accepted, strict=True), "o-", color=style.BLUE, markersize=4.5, linewidth=1.5, label="accepted")
    if near:
        axes.plot(*zip(*near, strict=True), "x", color=style.ORANGE, markersize=5.5, mew=1.5, label="rejected")
    below, above = [x for x, y in rejected if y < floor], [x for x, y in rejected if y > ceiling]
    worst = low if trajectory.higher_is_better[task] else high
    for far, edge, marker, label in (
        (below, low, "v", "rejected, off scale"),
        (above, high, "^", "rejected, off scale"),
        (unscored, worst, "d", "rejected, no score"),
    ):
        if far:
            axes.plot(far, [edge] * len(far), marker, color=style.ORANGE, clip_on=False, label=label)
    axes.set_ylim(low, high)


def _line(axes: Axes, y: float, text: str, **how: Any) -> None:
    """A horizontal line with its name beside it."""
    axes.axhline(y, **how)
    side = blended_transform_factory(axes.transAxes, axes.transData)
    axes.text(1.015, y, text, transform=side, va="center", fontsize=8, color=how["color"])


def _step_axis(axes: Axes, steps: Sequence[Step]) -> None:
    axes.set_xlim(-0.5, len(steps) + 0.5)
    if len(steps) <= NAMED_STEPS:
        names = ["original", *(s.label for s in steps)]
        axes.set_xticks(range(len(names)), names, rotation=90 if steps else 0)
    if any(step.price is not None for step in steps):
        axes.set_xlabel("error that a MiB must take off, of a matrix's outputs")
    elif len(steps) > NAMED_STEPS:
        axes.set_xlabel("steps")


@style.styled
def pareto_chart(points: OperatingPoints) -> Figure:
    """Net savings, in percent of all checkpoint bytes, against any model's worst drop on the search split."""
    every = [*points.points, points.deployed]
    at = {p.name: (_saved(p), max(p.drops.values())) for p in every}
    figure = style.new_figure(3.3)
    axes = figure.subplots()
    frontier = sorted(at[name] for name in points.frontier)
    others = [at[p.name] for p in points.points if p.name not in points.frontier]
    axes.plot(*zip(*frontier, strict=True), "o-", color=style.BLUE, markersize=6, linewidth=1.5, label="frontier")
    if others:
        axes.plot(*zip(*others, strict=True), "o", color=style.MUTED, mfc="none", label="beaten by another")
    axes.plot(*at[points.deployed.name], "*", color=style.GREEN, markersize=15, zorder=3, label="deployed")
    axes.margins(0.14)
    middle = sum(axes.get_xlim()) / 2
    for (x, y), names in _together({p.name: at[p.name] for p in points.points}, axes).items():
        side, offset = ("right", (-8, 5)) if x > middle else ("center", (0, 8))
        axes.annotate(
            ", ".join(names),
            (x, y),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            fontsize=8.5,
            zorder=4,
        )
    axes.grid(True, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("net savings, % of all checkpoint bytes")
    axes.set_ylabel("worst drop, in the metric's unit")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _saved(point: OperatingPoint) -> float:
    return 100 * point.savings.net / point.savings.checkpoint_bytes


def _together(at: Mapping[str, tuple[float, float]], axes: Axes) -> dict[tuple[float, float], list[str]]:
    """Names by place; points so close that their labels would overlap are named together, at the first place.
    The deployed point needs no name: it has a sign of its own."""
    width = axes.get_xlim()[1] - axes.get_xlim()[0]
    height = axes.get_ylim()[1] - axes.get_ylim()[0]
    places: dict[tuple[float, float], list[str]] = {}
    for name, (x, y) in sorted(at.items(), key=lambda item: (item[1], item[0])):
        near = ((a, b) for a, b in places if abs(x - a) < 0.12 * width and abs(y - b) < 0.08 * height)
        places.setdefault(next(near, (x, y)), []).append(name)
    return places
