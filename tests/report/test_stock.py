"""How far a plan of adapters is complete, as the page tells it."""

from dataclasses import replace
from html import unescape
from pathlib import Path

from sandhi_core.adapters import stock_plan
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.layout import DEPLOYMENT
from sandhi_core.pools.pool import Adapters
from sandhi_core.records import ExportedModel
from sandhi_core.report import ReportData, page, write_report
from sandhi_core.words import size
from tests.adapted import adapted_case
from tests.deployed import deployed


def asked(data: ReportData) -> ReportData:
    """The pool, had it asked for adapters."""
    deploy = data.pool.deploy.model_copy(update={"adapters": Adapters(max_rank=8)})
    return replace(data, pool=data.pool.model_copy(update={"deploy": deploy}))


def planned(data: ReportData) -> ReportData:
    """The same, exported with a plan: a twin of the first model makes a base of the two."""
    assert data.manifest is not None
    models: dict[str, ExportedModel] = dict(data.manifest.models)
    first = next(iter(models))
    models["twin"] = models[first]
    manifest = data.manifest.model_copy(update={"models": models, "stock": stock_plan(models, 8)})
    return replace(asked(data), manifest=manifest)


def test_a_pool_that_asks_for_no_adapters_is_told_nothing_of_them(data: ReportData, tmp_path: Path) -> None:
    assert page.stock_table(data) is None
    assert "Stock adapters" not in [tile.title for tile in page.summary(data)]
    assert "Stock adapters" not in write_report(tmp_path, data).read_text()


def test_the_page_names_every_model_and_why_it_is_none(data: ReportData, tmp_path: Path) -> None:
    found = planned(data)
    assert found.manifest is not None and found.manifest.stock is not None
    table = page.stock_table(found)
    assert table is not None
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows.keys() == found.manifest.models.keys()
    (base,) = found.manifest.stock.bases
    assert rows["twin"][:2] == [base.directory, "the base itself"]
    for name, why in found.manifest.stock.ordinary.items():
        assert rows[name][3:5] == [why.reason, why.first or "-"]
    tile = page.summary(found)[-1]
    assert (tile.title, tile.value) == ("Stock adapters", f"2 of {len(rows)}")
    assert tile.detail == "models are adapters of 1 base, for stock servers"
    text = write_report(tmp_path, found).read_text()
    assert base.directory in text and 'id="stock"' in text


def test_the_page_tells_what_engines_hold_beside_what_is_claimed(data: ReportData, tmp_path: Path) -> None:
    root = deployed(adapted_case(tmp_path / "case"))
    spec = DeploymentSpec.parse((root / DEPLOYMENT).read_bytes())
    assert spec.stock_memory is not None
    found = replace(planned(data), deployment=spec)
    text = unescape(write_report(tmp_path / "report", found).read_text())
    stock = text[text.index('id="stock"') :]
    for nbytes in (spec.claims.claimed, spec.memory.weights_bytes_before, spec.stock_memory.weights_bytes):
        assert size(nbytes) in stock
    assert "vLLM keeps buffers for every adapter" in stock and "its answers were not scored" in stock
    (rounding,) = spec.rounding
    assert f"Quality was {rounding}." in text[text.index('id="quality"') : text.index('id="bytes"')]


def test_before_an_export_nothing_is_measured(data: ReportData) -> None:
    found = replace(asked(data), manifest=None)
    table = page.stock_table(found)
    assert table is not None and table.rows == () and page.summary(found)[-1].tone == "open"
