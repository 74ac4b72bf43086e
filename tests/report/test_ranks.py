"""Where residuals lie, as the page tells it."""

from dataclasses import replace
from pathlib import Path

from sandhi_core.records import Adjustment
from sandhi_core.report import ReportData, write_report
from tests.report.conftest import tensor_name
from tests.report.test_html import Page

LOW = Adjustment(kind="low_rank", nbytes=100, rank=12, down="a", up="b")
ROWS = Adjustment(kind="affine", nbytes=10, scale="s", shift="t")
BOTH = Adjustment(kind="affine", nbytes=110, rank=4, down="a", up="b", scale="s", shift="t")
ADDED = {(3, "gate"): LOW, (3, "up"): ROWS, (3, "down"): BOTH}


def corrected(data: ReportData) -> ReportData:
    """The same, had the sorter corrected three of the matrices that it accepted first."""
    walk = data.trajectories["sorter"]
    first = walk.steps[0]
    added = {tensor_name(*place): adjustment for place, adjustment in ADDED.items()}
    assert added.keys() == first.tensors.keys()
    steps = (first.model_copy(update={"adjustments": added}), *walk.steps[1:])
    return replace(data, trajectories={**data.trajectories, "sorter": walk.model_copy(update={"steps": steps})})


def test_every_rank_has_its_place(data: ReportData, tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, corrected(data)).read_text())
    rows = {row["layer"]: row for row in page.table("sorter: 3 of 42 matrices corrected, ranks 0 to 12")}
    assert list(rows) == ["0", "1", "2", "3", "4", "5"]
    assert list(rows["3"]) == ["layer", "q", "k", "v", "o", "gate", "up", "down"]
    assert [rows["3"][p] for p in ("gate", "up", "down")] == ["12", "0 s", "4 s"]
    assert rows["3"]["q"] == "-" and rows["4"]["gate"] == "0" and rows["5"]["k"] == "="  # kept, as it is, identical
    assert not [caption for caption in page.tables if caption.startswith("ranker:")]  # it corrects nothing
    assert "it also scales and shifts its rows" in page.words.replace("\n", " ")


def test_a_pool_without_residuals_is_told_of_no_ranks(data: ReportData, tmp_path: Path) -> None:
    assert "Residuals by layer" not in write_report(tmp_path, data).read_text()
