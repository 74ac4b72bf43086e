"""The head of a page that is not of the pool file as it stands."""

from dataclasses import replace
from pathlib import Path

from sandhi_core.report import ReportData, write_report
from sandhi_core.report.outdated import outdated
from tests.report.conftest import MEMBERS
from tests.report.test_html import Page


def test_a_page_of_the_pool_as_its_file_stands_has_no_such_head(data: ReportData, tmp_path: Path) -> None:
    assert outdated(data) == ()
    assert 'id="outdated"' not in write_report(tmp_path, data).read_text()


def test_models_that_came_and_went_are_named(data: ReportData, tmp_path: Path) -> None:
    first, *others = data.pool.models
    renamed = (first.model_copy(update={"name": "newcomer"}), *others)
    found = ReportData(pool=data.pool.model_copy(update={"models": renamed}), manifest=data.manifest)
    page = Page(write_report(tmp_path, found).read_text())
    assert "This is not the pool as its file stands" in page.words
    assert f"not in the export: newcomer.Models of the export that are no longer in the pool file: {first.name}." in (
        page.words
    )


def test_a_task_that_the_file_names_since_is_not_measured(data: ReportData, tmp_path: Path) -> None:
    first, *others = data.pool.models
    other = first.model_copy(update={"tasks": (first.tasks[0].model_copy(update={"task": "another"}),)})
    found = replace(data, pool=data.pool.model_copy(update={"models": (other, *others)}))
    rows = Page(write_report(tmp_path, found).read_text()).table("Every model on questions")
    assert (rows[0]["task"], rows[0]["original"]) == ("another", "not measured")


def test_stages_are_named_with_the_models_that_they_are_of(data: ReportData) -> None:
    everybody = tuple(("checkpoint", m.name) for m in MEMBERS)
    found = replace(
        data,
        never=(("trajectory", "demo.sorter"), ("deployment", "demo")),
        stale=(*everybody, ("groups", "demo.h96-bf16")),
        waiting=(("plan", "demo.sorter"), ("plan", "demo.roman")),
    )
    assert outdated(found) == (
        "Never ran: trajectory of sorter; deployment.",
        "Stale: checkpoint of all models; groups of demo.h96-bf16.",
        "Made from what is stale, and may change with it: plan of sorter, roman.",
    )
