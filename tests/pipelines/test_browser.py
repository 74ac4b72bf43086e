"""What people look at, in a real browser: the UI that `make ui` starts, on a root that was built, and the report."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from assets.stages import STAGE_ASSETS
from sandhi_core.catalogue import load_catalogue
from sandhi_core.graph import STAGES
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import Line, until_it_answers

pytestmark = pytest.mark.slow

PATIENCE = 120_000  # milliseconds, on a machine that does much else
CHROMIUM = os.environ.get("SANDHI_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
# Nothing of what Chromium would fetch for itself; a sandbox of its own it cannot have as root.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skips where there is no Chromium. Where there must be one (CI) it fails: skips go unnoticed."""
    if CHROMIUM is None:
        absent = "no browser: install the package `chromium`, or set SANDHI_BROWSER"
        (pytest.fail if os.environ.get("CI") or os.environ.get("SANDHI_REQUIRE_BROWSER") else pytest.skip)(absent)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET, timeout=PATIENCE)
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tiny_line: Line) -> Iterator[str]:
    """The UI on the pool's root, with its daemon, until the tests of this module are done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = tiny_line.pool.with_name("ui.log")
    environment = {k: v for k, v in os.environ.items() if k != "DAGSTER_HOME"}
    with (
        log.open("w") as out,
        subprocess.Popen(
            [sys.executable, "-m", "pipelines.ui", "--port", port],
            cwd=CHECKOUT,
            env=environment | {"SANDHI_HOME": str(tiny_line.root), "SANDHI_POOLS": str(tiny_line.pool)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            with log.open() as told:
                text = ""
                while "Serving dagster-webserver" not in text:
                    assert process.poll() is None, text
                    text += told.read(4096)
            until_it_answers(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """A page of the UI that asks nobody else for anything and meets no error of its own."""
    context = browser.new_context(viewport={"width": 1400, "height": 950}, base_url=address)
    context.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda asked: errors.append(asked.url) if "://127.0.0.1:" not in asked.url else None)
    yield opened
    context.close()
    assert [e for e in errors if not e.startswith(("data:", "blob:"))] == []


def test_the_graph_shows_every_stage_in_its_part(page: Page) -> None:
    phases = list(dict.fromkeys(stage.phase for stage in STAGE_ASSETS.values()))
    drawn = page.locator("svg foreignObject")
    page.goto("/asset-groups")
    for phase in phases:
        expect(drawn.get_by_text(phase, exact=True).first).to_be_visible()
    page.goto(f"/asset-groups?expanded={','.join(f'global@global:{phase}' for phase in phases)}")
    for stage in STAGES:
        expect(drawn.get_by_text(stage, exact=True).first).to_be_visible()
    expect(page.get_by_text("Join the Dagster community")).to_have_count(0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_partition_of_each_stage_has_something_to_look_at(page: Page, tiny_line: Line, stage: str) -> None:
    key = load_catalogue([tiny_line.pool]).keys(STAGES[stage].scope)[0]
    page.goto(f"/assets/{stage}?view=partitions&partition={key}")
    expect(page.get_by_text("Latest materialization")).to_be_visible()
    expect(page.get_by_text("Show schema").first).to_be_visible()  # of the stage's table
    expect(page.get_by_text("peak resident bytes", exact=True)).to_be_attached()


@pytest.mark.parametrize(
    "stage, key, alt",
    [
        ("profile", "a", "Drop with noise"),
        ("trajectory", "tiny.a", "accepted on the search split"),
        ("holdout", "tiny.a", "Change on the holdout"),
        ("operating_points", "tiny", "Savings against worst drop"),
        ("merged_weights", "tiny", "Layer by projection"),
        ("sharing_proof", "tiny", "of checkpoints"),
    ],
)
def test_a_picture_is_there_to_be_seen_and_said(page: Page, stage: str, key: str, alt: str) -> None:
    page.goto(f"/assets/{stage}?view=partitions&partition={key}")
    page.get_by_text("[Show Markdown]").first.click()
    picture = page.locator(f"img[alt*='{alt}']")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.naturalWidth") > 500


def test_a_failed_check_says_what_to_do(page: Page) -> None:
    page.goto("/assets/sharing_proof?view=checks&checkDetail=measured_as_deployed")
    expect(page.get_by_text("the pool is deployed on vLLM: name the Python of a vLLM")).to_be_visible()
    page.goto("/assets/sharing_proof?view=checks&checkDetail=bytes_on_disk")
    expect(page.get_by_text("bytes verified on disk").first).to_be_visible()


def test_a_partition_is_materialised_by_clicking(page: Page, tiny_line: Line) -> None:
    record = tiny_line.root / "records" / "operating_points" / "tiny.json"
    before, written = record.read_bytes(), record.stat().st_mtime_ns
    page.goto("/assets/operating_points?view=partitions&partition=tiny")
    page.locator("button", has_text="Materialize").first.click()
    expect(page.get_by_text("Launch runs to materialize operating_points")).to_be_visible()
    page.locator("button", has_text="Launch 1 run").click()
    page.locator("a[href*='/runs/']", has_text=re.compile("^View$")).click()  # of the notice that it was launched
    expect(page.get_by_text("Success", exact=True).first).to_be_visible(timeout=4 * PATIENCE)  # its process loads torch
    assert record.stat().st_mtime_ns > written and record.read_bytes() == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_can_be_read_by_everyone(browser: Browser, tiny_line: Line, scheme: Any, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(Path(tiny_line.result["report"]).as_uri())
    for closed in page.locator("details").all():
        closed.evaluate("details => details.open = true")
    found = Axe().run(page).response
    assert len(found["passes"]) > 15
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    for drawing in page.get_by_role("img").all():
        box = drawing.bounding_box()
        assert box is not None and box["height"] > 60 and drawing.get_attribute("aria-label")
    assert len(asked) == 1
    context.close()
