"""Figures are read back from their artists: what is drawn is what the records say."""

import re
from collections.abc import Callable
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from sandhi_core.records import Step
from sandhi_core.report import figures, outcome, style
from sandhi_core.report.data import ReportData, slot_states

PNG = b"\x89PNG\r\n\x1a\n"


def texts(figure: Figure) -> set[str]:
    return {t.get_text() for t in figure.findobj(mpl.text.Text)} - {""}


def every_figure(data: ReportData) -> dict[str, Callable[[], Figure]]:
    points = data.points
    assert points is not None
    states = slot_states(data.fingerprints, data.plans, data.trajectories, points.deployed)
    return {
        "sensitivity": lambda: figures.sensitivity_map(*data.profiles.values(), gate=0.05),
        "trajectory": lambda: figures.trajectory_chart(data.trajectories["inflector"], data.budgets["inflector"], 3),
        "pareto": lambda: figures.pareto_chart(points),
        "holdout": lambda: outcome.holdout_chart(data.holdouts),
        "bytes": lambda: outcome.bytes_chart(points.deployed.savings, data.proof),
        "sharing": lambda: outcome.sharing_map(states),
    }


FIGURES = ("sensitivity", "trajectory", "pareto", "holdout", "bytes", "sharing")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_the_same_bytes_every_time_and_needs_nothing_else(data: ReportData, name: str) -> None:
    draw = every_figure(data)[name]
    first, second = draw(), draw()
    png, svg = style.png_bytes(first), style.inline_svg(first, name)
    assert png.startswith(PNG)
    assert (png, svg) == (style.png_bytes(second), style.inline_svg(second, name))
    assert svg.startswith("<svg") and svg.endswith("</svg>")
    assert not re.search(r"https?://|<!|<\?|<text|xmlns|NaN", svg)
    identifiers = re.findall(r'\sid="([^"]+)"', svg)
    assert identifiers and all(i.startswith(f"{name}-") for i in identifiers)
    assert len(set(identifiers)) == len(identifiers)
    for target in re.findall(r'(?:url\(|href=")([^)"]+)', svg):
        assert target.removeprefix("#") in identifiers or target.startswith("data:image/png;base64,")
    assert not any(light in svg for light, _ in style.PALETTE.values())
    assert "var(--ink)" in svg


def test_drawing_leaves_the_callers_settings_alone(data: ReportData) -> None:
    before = dict(mpl.rcParams)
    style.png_bytes(every_figure(data)["pareto"]())
    assert dict(mpl.rcParams) == before


def test_sensitivity_is_drawn_at_its_layer_and_component(data: ReportData) -> None:
    profile = data.profiles["converter"]
    figure = figures.sensitivity_map(profile, gate=0.1)
    (mesh,) = figure.axes[0].collections
    drawn = np.asarray(mesh.get_array()).reshape(2, 6)
    for s in profile.sensitivities:
        assert drawn[("attn", "mlp").index(s.component), s.layer] == pytest.approx(max(s.drop, 0.0))
    frames = [p for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    framed = {(int(p.get_x()), int(p.get_y())) for p in frames}
    expected = {(s.layer, ("attn", "mlp").index(s.component)) for s in profile.sensitivities if s.drop > 0.1}
    assert framed == expected and expected


def test_models_of_different_depth_share_one_scale(data: ReportData) -> None:
    figure = figures.sensitivity_map(data.profiles["sorter"], data.profiles["roman"])
    first, second = (axes.collections[0] for axes in figure.axes[:2])
    assert first.get_clim() == second.get_clim()
    assert {"sorter", "roman"} <= {axes.get_title(loc="left") for axes in figure.axes}


def places(drawn: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(drawn.get_xydata())]


def line(figure: Figure, label: str, panel: int = 0) -> list[tuple[float, float]]:
    (found,) = [x for x in figure.axes[panel].get_lines() if x.get_label() == label]
    return places(found)


def test_a_walk_shows_scores_budget_and_what_failed(data: ReportData) -> None:
    walk = data.trajectories["chemist"]
    figure = figures.trajectory_chart(walk, data.budgets["chemist"], deployed=11)
    scored = [s for s in walk.steps if s.scores is not None]
    accepted = [(s.index + 1, s.scores["formula"]) for s in scored if s.decision == "accepted" and s.scores]
    assert line(figure, "accepted") == [(0, walk.baseline["formula"]), *accepted]
    rejected = {s.index + 1 for s in scored if s.decision == "rejected"}
    drawn = {x for label in ("rejected", "rejected, off scale") for x, _ in line(figure, label)}
    assert drawn == rejected and len(rejected) == 3
    levels = {round(places(x)[0][1], 6) for x in figure.axes[0].get_lines()}
    assert round(walk.baseline["formula"] - 0.02, 6) in levels
    assert line(figure, "deployed here")[0][0] == 11


@pytest.mark.parametrize(("task", "panel", "worst"), [("past_tense", 0, min), ("calibration", 1, max)])
def test_what_was_rejected_without_a_score_stands_at_the_worse_edge(
    data: ReportData, task: str, panel: int, worst: Callable[[tuple[float, float]], float]
) -> None:
    walk = data.trajectories["inflector"]
    early = {"decision": "rejected", "scores": None}
    steps = [s.model_copy(update=early) if s.index in (1, 7) else s for s in walk.steps]
    figure = figures.trajectory_chart(walk.model_copy(update={"steps": tuple(steps)}), data.budgets["inflector"])
    edge = worst(figure.axes[panel].get_ylim())
    assert list(walk.baseline)[panel] == task and line(figure, "rejected, no score", panel) == [(2, edge), (8, edge)]


def test_a_budget_of_a_metric_where_lower_is_better_lies_above(data: ReportData) -> None:
    walk = data.trajectories["inflector"]
    figure = figures.trajectory_chart(walk, data.budgets["inflector"])
    levels = {round(places(x)[0][1], 6) for x in figure.axes[1].get_lines()}
    assert round(walk.baseline["calibration"] + 0.015, 6) in levels
    assert "deployed here" not in texts(figure)


def test_a_model_without_steps_still_has_a_chart(data: ReportData) -> None:
    figure = figures.trajectory_chart(data.trajectories["roman"], data.budgets["roman"])
    assert style.png_bytes(figure).startswith(PNG)
    assert len(line(figure, "accepted")) == 1


def test_long_walks_count_their_steps(data: ReportData) -> None:
    walk = data.trajectories["sorter"]
    steps = tuple(
        Step(index=i, component="mlp", layer=i, decision="accepted", scores=walk.baseline, tensors={})
        for i in range(60)
    )
    figure = figures.trajectory_chart(walk.model_copy(update={"steps": steps}), data.budgets["sorter"])
    assert figure.axes[-1].get_xlabel() == "steps"
    assert len(line(figure, "accepted")) == 61


def test_the_pareto_chart_names_every_point(data: ReportData) -> None:
    assert data.points is not None
    figure = figures.pareto_chart(data.points)
    named = {name for text in texts(figure) for name in text.split(", ")}
    assert {p.name for p in data.points.points} <= named
    assert len(line(figure, "frontier")) == len(data.points.frontier)
    saved = data.points.deployed.savings
    assert line(figure, "deployed")[0][0] == pytest.approx(100 * saved.net / saved.checkpoint_bytes)


def test_the_holdout_chart_counts_in_budgets(data: ReportData) -> None:
    task = data.holdouts["sorter"].tasks["sort_words"]
    broken = task.model_copy(update={"difference": -0.09, "within_budget": False, "certified": False})
    holdouts = {"sorter": data.holdouts["sorter"].model_copy(update={"tasks": {"sort_words": broken}})}
    figure = outcome.holdout_chart(holdouts)
    assert {"out of budget", "-0.090 of 0.02"} <= texts(figure)
    assert "within budget" not in texts(figure)
    axes = figure.axes[0]
    marks = {x.get_marker(): places(x) for x in axes.get_lines() if x.get_marker() in "<>oX" and len(places(x))}
    ((mark, ((x, _),)),) = marks.items()
    assert mark == "<" and axes.get_xlim()[0] < x < -1  # it lost 4.5 budgets: drawn at the edge, not out of sight


def test_bytes_that_were_not_verified_are_not_drawn(data: ReportData) -> None:
    assert data.points is not None and data.proof is not None
    claimed = texts(outcome.bytes_chart(data.points.deployed.savings, None))
    assert "claimed" in claimed and not any("verified" in t for t in claimed)
    assert {"verified\non disk", "verified\nin memory"} <= texts(
        outcome.bytes_chart(data.points.deployed.savings, data.proof)
    )


def test_the_sharing_map_has_a_cell_a_slot(data: ReportData) -> None:
    figure = every_figure(data)["sharing"]()
    cells = [len(axes.patches) for axes in figure.axes]
    assert cells == [len(f.slots) for f in data.fingerprints.values()]
    assert {"own: no partner", "identical from the start, kept once"} <= texts(figure)
    assert "merged, but no other model kept it" not in texts(figure)


@pytest.mark.parametrize("name", ["$\\frac{$", "任务 🧪", "a" * 400, "<b>&amp;", "x\u202ey", "--> <!--"])
def test_any_task_name_can_be_drawn(data: ReportData, name: str) -> None:
    walk = data.trajectories["roman"]
    renamed = walk.model_copy(update={"baseline": {name: 0.958}, "higher_is_better": {name: True}})
    figure = figures.trajectory_chart(renamed, {name: 0.02})
    assert style.png_bytes(figure).startswith(PNG)
    assert "<!--" not in style.inline_svg(figure, "x")
    held = data.holdouts["inflector"]
    tasks = {name: held.tasks["past_tense"], "other": held.tasks["calibration"]}
    assert style.png_bytes(outcome.holdout_chart({"m": held.model_copy(update={"tasks": tasks})})).startswith(PNG)


def test_pictures_drawn_outside_of_the_house_style_take_any_name(data: ReportData) -> None:
    # The UI's metadata saves figures by itself, with whatever settings are then in force.
    holdout = data.holdouts["inflector"]
    tasks = {"$x": holdout.tasks["past_tense"], "$y$": holdout.tasks["calibration"]}
    figure = outcome.holdout_chart({"m": holdout.model_copy(update={"tasks": tasks})})
    figure.canvas.draw()
    assert any("$y$" in t for t in texts(figure))


def test_labels_are_short_and_drawable() -> None:
    assert style.label("a" * 40, 10) == "a" * 9 + "…"
    assert style.label("任x") == "\ufffdx"
    assert style.label("plain-name_1.0") == "plain-name_1.0"


def test_the_palette_can_be_told_apart() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for theme in (0, 1):
        colours = {name: both[theme] for name, both in style.PALETTE.items()}
        for name in ("ink", "muted", "blue", "orange", "green"):  # WCAG 2.2, 1.4.3: text on the page
            assert contrast(colours[name], colours["paper"]) >= 4.5
    assert len({light for light, _ in style.PALETTE.values()}) == len(style.PALETTE)


def test_partial_records_are_enough(data: ReportData) -> None:
    assert data.points is not None
    lone = replace(data, plans={}, trajectories={}, holdouts={})
    found = slot_states(lone.fingerprints, lone.plans, lone.trajectories, data.points.deployed)
    assert style.png_bytes(outcome.sharing_map(found)).startswith(PNG)


def test_a_score_far_off_the_scale_is_drawn_at_its_own_edge(data: ReportData) -> None:
    walk = data.trajectories["roman"]
    steps = tuple(
        Step(index=i, component="mlp", layer=i, decision="rejected", scores={"roman_numerals": y}, tensors={})
        for i, y in enumerate((0.2, 1.7))
    )
    figure = figures.trajectory_chart(walk.model_copy(update={"steps": steps}), data.budgets["roman"])
    low, high = figure.axes[0].get_ylim()
    marks = {x.get_marker(): places(x) for x in figure.axes[0].get_lines() if x.get_marker() in ("v", "^")}
    assert marks == {"v": [(1, low)], "^": [(2, high)]}
