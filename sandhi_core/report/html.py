"""The report: one HTML file that needs nothing else, with pictures (PNG) and tables (Parquet) beside it."""

import hashlib
import importlib.resources
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import BaseModel

from sandhi_core.files import write_atomic
from sandhi_core.records import OperatingPoints, Savings, SharingProof, digest_of
from sandhi_core.report import figures, notes, outcome, page, style, tables
from sandhi_core.report.data import ReportData, SlotState, slot_states
from sandhi_core.report.outdated import outdated
from sandhi_core.report.ranks import ranks_tables
from sandhi_core.words import count, percent, size

PAGE = "report.html"
_OF_ONE_MODEL = "trajectory-"


@dataclass(frozen=True)
class Picture:
    """A figure to be drawn; `alt` says in words what it shows, for those who cannot see it."""

    name: str
    title: str
    alt: str
    draw: Callable[[], Figure]


def write_report(directory: Path, data: ReportData) -> Path:
    """Write `report.html`, every picture as PNG and every table as Parquet; returns the page's path.

    The same records give the same bytes; a page that was made from them already is left as it is. Pictures of
    models that are no longer in the pool are removed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    made_from = _made_from(data)
    target = directory / PAGE
    if target.is_file() and f'content="{made_from}"' in target.read_text(errors="replace")[:2000]:
        return target
    states = _states(data)
    pictures = _pictures(data, states)
    drawn = {}
    for picture in pictures:
        figure = picture.draw()
        write_atomic(directory / f"{picture.name}.png", style.png_bytes(figure))
        drawn[picture.name] = Markup(style.inline_svg(figure, picture.name))  # our own drawing: no text in it
    for old in directory.glob(f"{_OF_ONE_MODEL}*.png"):
        if old.stem not in drawn:
            old.unlink()
    tables.write_tables(directory, _queryable(data))
    # The page comes last: it is the sign that everything beside it was made from the same records.
    write_atomic(target, _render(data, states, pictures, drawn, made_from).encode())
    return target


def _made_from(data: ReportData) -> str:
    """Digest of everything that decides the report's bytes: records, this package, and what draws for it."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump(mode="json")
        return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    sources = importlib.resources.files(__package__).iterdir()
    code = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sources if f.is_file()}
    records = {f.name: plain(getattr(data, f.name)) for f in fields(data)}
    return digest_of([records, code, mpl.__version__, jinja2.__version__])


def _queryable(data: ReportData) -> dict[str, Any]:
    return {
        "profiles": tables.profiles_table(data.profiles),
        "steps": tables.steps_table(data.trajectories),
        "sweeps": tables.sweeps_table(data.cutoffs),
        "points": tables.points_table(data.points),
    }


def _states(data: ReportData) -> dict[str, tuple[SlotState, ...]]:
    if data.points is None:
        return {}
    alignment = data.pool.deploy.alignment_bytes
    return slot_states(data.fingerprints, data.plans, data.trajectories, data.points.deployed, alignment)


# --- pictures -----------------------------------------------------------------------------------------------


def _pictures(data: ReportData, states: dict[str, tuple[SlotState, ...]]) -> list[Picture]:
    """Those for which there are records, in the order of the page."""
    pictures = []
    if data.holdouts:
        pictures.append(_holdout(data))
    if data.points is not None:
        pictures += [_bytes(data.points.deployed.savings, data.proof), _pareto(data.points)]
    if any(states.values()):
        pictures.append(_sharing(states))
    if any(p.sensitivities for p in data.profiles.values()):
        pictures.append(_sensitivity(data))
    return pictures + [_trajectory(data, model) for model, walk in data.trajectories.items() if walk.steps]


def _holdout(data: ReportData) -> Picture:
    used = [f"{m} used {-100 * t.difference / t.budget:.0f} % of its budget for {name}"
            for m, h in data.holdouts.items() for name, t in h.tasks.items()]  # fmt: skip
    alt = f"Change on the holdout with 95 % intervals, in budgets: {'; '.join(used)}."
    holdouts = data.holdouts
    return Picture("holdout", "Quality on unseen questions", alt, lambda: outcome.holdout_chart(holdouts))


def _bytes(saved: Savings, proof: SharingProof | None) -> Picture:
    share = percent(saved.net, saved.checkpoint_bytes)
    alt = f"Of {size(saved.checkpoint_bytes)} of checkpoints {share} are claimed as saved"
    if proof is not None:
        alt += f", {size(proof.verified_disk)} verified on disk and {size(proof.verified_memory)} in memory"
    return Picture("bytes", "Bytes before and after", alt + ".", lambda: outcome.bytes_chart(saved, proof))


def _pareto(points: OperatingPoints) -> Picture:
    named = [f"{p.name} saves {percent(p.savings.net, p.savings.checkpoint_bytes)} at a worst drop of "
             f"{max(p.drops.values()):.3g}" for p in (*points.points, points.deployed)]  # fmt: skip
    alt = f"Savings against worst drop on the search split: {'; '.join(named)}."
    return Picture("pareto", "Savings against quality", alt, lambda: figures.pareto_chart(points))


def _sharing(states: dict[str, tuple[SlotState, ...]]) -> Picture:
    shared = [f"{m} shares {sum(s.state in ('shared', 'duplicate') for s in slots)} of {len(slots)}"
              for m, slots in states.items()]  # fmt: skip
    alt = f"Layer by projection for every model: {'; '.join(shared)} slots."
    return Picture("sharing", "Who shares what", alt, lambda: outcome.sharing_map(states))


def _sensitivity(data: ReportData) -> Picture:
    profiles = [p for p in data.profiles.values() if p.sensitivities]
    worst = {p.model: max(p.sensitivities, key=lambda s: s.drop) for p in profiles}
    most = [f"{m} most in layer {s.layer} {s.component} ({s.drop:.3g})" for m, s in worst.items()]
    alt = f"Drop with noise in each layer's attention and MLP: {'; '.join(most)}."
    return Picture(
        "sensitivity", "Sensitivity to noise", alt, lambda: figures.sensitivity_map(*profiles, gate=data.gate)
    )


def _trajectory(data: ReportData, model: str) -> Picture:
    walk = data.trajectories[model]
    accepted = sum(s.decision == "accepted" for s in walk.steps)
    alt = f"{model}: {accepted} of {count(len(walk.steps), 'step')} accepted on the search split."
    held = data.holdouts.get(model)
    deployed = None if held is None else held.steps
    budgets = walk.tolerance | data.budgets[model]  # the file may have other tasks by now
    return Picture(
        f"{_OF_ONE_MODEL}{model}",
        f"Trajectory of {model}",
        alt,
        lambda: figures.trajectory_chart(walk, budgets, deployed),
    )


# --- the page -----------------------------------------------------------------------------------------------


def _render(
    data: ReportData,
    states: dict[str, tuple[SlotState, ...]],
    pictures: list[Picture],
    drawn: Mapping[str, Markup],
    made_from: str,
) -> str:
    loader = jinja2.PackageLoader("sandhi_core.report", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        pool=data.pool,
        made_from=made_from,
        palette=style.PALETTE,
        outdated=outdated(data),
        tiles=page.summary(data),
        models=page.models_table(data),
        bytes=page.bytes_table(data),
        points=page.points_table(data),
        steps=page.trajectories_table(data),
        shared=page.shared_table(states),
        ranks=ranks_tables(states),
        ranks_note=notes.RANKS,
        excluded=page.excluded_table(data),
        stock=page.stock_table(data),
        problems=() if data.proof is None else data.proof.problems,
        pictures={p.name: p for p in pictures},
        trajectories=[p for p in pictures if p.name.startswith(_OF_ONE_MODEL)],
        drawn=drawn,
        export=None if data.proof is None else data.proof.export,
        manifest=None if data.proof is None else data.proof.manifest,
    )
