"""The report: one HTML file that needs nothing else, with pictures (PNG) and tables (Parquet) beside it."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import polars as pl
from markupsafe import Markup
from pydantic import BaseModel

import sandhi_core
from sandhi_core.files import write_atomic
from sandhi_core.records import digest_of
from sandhi_core.report import notes, page, pictures, style, tables
from sandhi_core.report.data import ReportData, SlotState, shared_holdings, slot_states
from sandhi_core.report.outdated import outdated
from sandhi_core.report.pictures import OF_ONE_MODEL, Picture
from sandhi_core.report.ranks import ranks_tables
from sandhi_core.savings import Holding

PAGE = "report.html"


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
    shown = _pictures(data, states)
    drawn = {}
    for picture in shown:
        figure = picture.draw()
        write_atomic(directory / f"{picture.name}.png", style.png_bytes(figure))
        drawn[picture.name] = Markup(style.inline_svg(figure, picture.name))  # our own drawing: no text in it
    for old in directory.glob(f"{OF_ONE_MODEL}*.png"):
        if old.stem not in drawn:
            old.unlink()
    tables.write_tables(directory, _queryable(data))
    # The page comes last: it is the sign that everything beside it was made from the same records.
    write_atomic(target, _render(data, states, shown, drawn, made_from).encode())
    return target


def _made_from(data: ReportData) -> str:
    """Digest of everything that decides the report's bytes: records, all of this package's code, and what draws."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump(mode="json")
        return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    package = Path(sandhi_core.__file__).parent
    sources = (f for f in package.rglob("*") if f.is_file() and f.suffix != ".pyc")
    code = {str(f.relative_to(package)): hashlib.sha256(f.read_bytes()).hexdigest() for f in sources}
    records = {f.name: plain(getattr(data, f.name)) for f in fields(data)}
    return digest_of([records, code, mpl.__version__, jinja2.__version__, pl.__version__])


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


def _shared(data: ReportData) -> tuple[Holding, ...] | None:
    if data.points is None:
        return None
    alignment = data.pool.deploy.alignment_bytes
    return shared_holdings(data.fingerprints, data.trajectories, data.points.deployed, alignment)


# --- pictures -----------------------------------------------------------------------------------------------


def _pictures(data: ReportData, states: dict[str, tuple[SlotState, ...]]) -> list[Picture]:
    """Those for which there are records, in the order of the page."""
    found = []
    if data.holdouts:
        found.append(pictures.holdout(data.holdouts))
    if data.points is not None:
        found += [pictures.savings(data.points.deployed.savings, data.proof), pictures.pareto(data.points)]
    if any(states.values()):
        found.append(pictures.sharing(states))
    if profiles := [p for p in data.profiles.values() if p.sensitivities]:
        found.append(pictures.sensitivity(*profiles, gate=data.gate))
    return found + [_trajectory(data, model) for model, walk in data.trajectories.items() if walk.steps]


def _trajectory(data: ReportData, model: str) -> Picture:
    walk, held = data.trajectories[model], data.holdouts.get(model)
    budgets = walk.tolerance | data.budgets[model]  # the file may have other tasks by now
    return pictures.trajectory(walk, budgets, None if held is None else held.steps)


# --- the page -----------------------------------------------------------------------------------------------


def _render(
    data: ReportData,
    states: dict[str, tuple[SlotState, ...]],
    shown: list[Picture],
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
        shared=page.shared_table(_shared(data), data.fingerprints.values()),
        ranks=ranks_tables(states),
        ranks_note=notes.RANKS,
        excluded=page.excluded_table(data),
        stock=page.stock_table(data),
        problems=() if data.proof is None else data.proof.problems,
        pictures={p.name: p for p in shown},
        trajectories=[p for p in shown if p.name.startswith(OF_ONE_MODEL)],
        drawn=drawn,
        export=None if data.proof is None else data.proof.export,
        manifest=None if data.proof is None else data.proof.manifest,
    )
