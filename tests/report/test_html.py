"""The page as a browser's parser sees it."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sandhi_core.pools.pool import TaskBudget
from sandhi_core.report import ReportData, style, write_report

VOID = {"meta", "link", "br", "img", "input", "hr"}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}$\\frac{&amp;'


class Page(HTMLParser):
    """Elements with their attributes, table cells by caption, and a check that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.words = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows = self.tables[f"table {len(self.tables)}"] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] in ("th", "td"):
            self._rows[-1][-1] += text
        elif self._open and self._open[-1] == "caption":
            self.tables[text] = self.tables.pop(next(n for n, rows in self.tables.items() if rows is self._rows))
        if not self._open or self._open[-1] not in ("style", "script"):
            self.words += text

    def table(self, caption: str) -> list[dict[str, str]]:
        head, *rows = next(rows for name, rows in self.tables.items() if name.startswith(caption))
        return [dict(zip(head, row, strict=False)) for row in rows]


@pytest.fixture(scope="module")
def written(data: ReportData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), data)


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text())


def test_everything_lies_beside_the_page(data: ReportData, written: Path) -> None:
    names = {f.name for f in written.parent.iterdir()}
    walks = {f"trajectory-{m}.png" for m, t in data.trajectories.items() if t.steps}
    pictures = {f"{n}.png" for n in ("holdout", "bytes", "pareto", "sharing", "sensitivity")} | walks
    tables = {f"{n}.parquet" for n in ("profiles", "steps", "sweeps", "points")}
    assert names == {"report.html"} | pictures | tables
    assert len(walks) == 5
    assert all((written.parent / p).read_bytes()[:4] == b"\x89PNG" for p in pictures)


def test_the_page_asks_for_nothing_from_elsewhere(written: Path, page: Page) -> None:
    text = written.read_text()
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert not {"script", "link", "iframe", "object", "img", "base"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value is not None and value.startswith(("#", "data:image/png;base64,"))
            assert not name.startswith("on")


def test_identifiers_are_unique_and_pictures_are_said_in_words(data: ReportData, page: Page) -> None:
    identifiers = [a["id"] for _, a in page.elements if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    assert page.elements[0] == ("html", {"lang": "en"})
    drawings = [a for _, a in page.elements if a.get("role") == "img"]
    assert len(drawings) == 10
    assert all(a["aria-label"] for a in drawings)
    assert any("converter most in layer 0 attn (0.45)" in str(a["aria-label"]) for a in drawings)


def test_one_glance_tells_what_was_saved_and_at_what_quality(data: ReportData, page: Page) -> None:
    assert data.proof is not None
    share = f"{100 * data.proof.verified_disk / data.proof.checkpoint_bytes:.1f} %"
    start = page.words[page.words.index("Pool demo") : page.words.index("Quality on unseen")]
    assert share in start
    assert "6 of 6" in start and "3 of 6" in start and "passed" in start


def test_every_model_and_task_has_its_row(page: Page) -> None:
    rows = page.table("Every model on questions never used before")
    assert [(r["model"], r["task"]) for r in rows][3:5] == [
        ("inflector", "past_tense"),
        ("inflector", "calibration"),
    ]
    assert len(rows) == 7
    assert rows[0] == {
        "model": "sorter", "task": "sort_words", "metric": "acc", "original": "0.959", "merged": "0.948",
        "change": "-0.011", "95 % interval": "-0.019 to -0.003", "budget": "0.02", "within budget": "yes",
        "certified": "yes", "certifiable from": "0.0067",
    }  # fmt: skip


def test_claimed_and_verified_bytes_are_told_apart(data: ReportData, page: Page) -> None:
    assert data.proof is not None
    rows = {r["what"]: r["in bytes"].replace(",", "") for r in page.table("The pool's bytes")}
    assert rows == {
        "all checkpoints": str(data.proof.checkpoint_bytes),
        "exact duplicates": str(data.proof.duplicates),
        "claimed": str(data.proof.claimed),
        "verified on disk": str(data.proof.verified_disk),
        "verified in memory": str(data.proof.verified_memory),
    }


def test_the_other_tables_are_there(data: ReportData, page: Page) -> None:
    assert data.points is not None
    points = [r["point"] for r in page.table("Operating points")]
    assert points == [*(p.name for p in data.points.points), "deployed"]
    walks = {r["model"]: r for r in page.table("Every model's trajectory")}
    assert (walks["chemist"]["accepted"], walks["chemist"]["rejected"]) == ("9", "3")
    assert walks["ranker"]["holdout looks"] == str(len(data.holdouts["ranker"].walked))
    shared = page.table("Tensors that several models hold")
    assert {"where": "5 attn", "tensors": "k", "models": "chemist, converter, inflector, ranker, sorter",
            "how": "identical", "frees": "64.00 KiB"} in shared  # fmt: skip
    excluded = page.table("Slots in no group")
    assert {"model": "roman", "reason": "no other model's slot agrees", "slots": "28"} in excluded


def test_an_empty_table_of_a_finished_pool_is_not_said_to_fill(data: ReportData, tmp_path: Path) -> None:
    nothing = {key: groups.model_copy(update={"excluded": ()}) for key, groups in data.groups.items()}
    page = Page(write_report(tmp_path / "finished", replace(data, groups=nothing)).read_text())
    assert [list(row.values()) for row in page.table("Slots in no group")] == [["none"]]
    page = Page(write_report(tmp_path / "early", ReportData(pool=data.pool)).read_text())
    assert [list(row.values()) for row in page.table("Slots in no group")] == [["nothing here yet"]]


@pytest.mark.parametrize(
    "word", ["Bpm", "Kpm", "Knee:", "Holdout looks:", "Certified:", "cutoff that was tried before"]
)
def test_words_of_the_tables_are_explained(page: Page, word: str) -> None:
    notes = page.words.replace("\n", " ")
    assert word in notes and "corrections" not in notes


def test_the_same_records_give_the_same_bytes(data: ReportData, written: Path, tmp_path: Path) -> None:
    again = write_report(tmp_path, data)
    for file in sorted(written.parent.iterdir()):
        assert (again.parent / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_page_that_is_up_to_date_is_left_alone(data: ReportData, tmp_path: Path) -> None:
    early = ReportData(pool=data.pool)
    path = write_report(tmp_path, early)
    before = path.stat().st_mtime_ns
    assert write_report(tmp_path, early).stat().st_mtime_ns == before
    assert write_report(tmp_path, replace(early, holdouts=data.holdouts)).stat().st_mtime_ns != before
    assert "6 of 6" in path.read_text()


def test_pictures_of_models_that_left_are_removed(data: ReportData, tmp_path: Path) -> None:
    (tmp_path / "trajectory-gone.png").write_bytes(b"old")
    (tmp_path / "mine.png").write_bytes(b"kept")
    write_report(tmp_path, ReportData(pool=data.pool))
    assert {f.name for f in tmp_path.glob("*.png")} == {"mine.png"}


def test_a_pool_without_any_record_says_so(data: ReportData, tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, ReportData(pool=data.pool)).read_text())
    assert not [a for _, a in page.elements if a.get("role") == "img"]
    assert {r["original"] for r in page.table("Every model on questions")} == {"not measured"}
    assert {r["size"] for r in page.table("The pool's bytes")} == {"not measured"}
    assert "0 of 6" in page.words and "6 models not measured" in page.words
    assert "passed" not in page.words


def test_without_a_proof_bytes_are_only_claimed(data: ReportData, tmp_path: Path) -> None:
    page = Page(
        write_report(tmp_path, replace(data, proof=None, manifest=None, profiles={}, trajectories={})).read_text()
    )
    rows = {r["what"]: r["size"] for r in page.table("The pool's bytes")}
    assert rows["verified on disk"] == rows["verified in memory"] == "not measured"
    assert rows["claimed"] != "not measured"
    assert "claimed and not verified" in page.words
    assert ("class", "tile open") in {item for _, a in page.elements for item in a.items()}


def test_a_failed_proof_says_why(data: ReportData, tmp_path: Path) -> None:
    assert data.proof is not None
    failed = data.proof.model_copy(update={"passed": False, "problems": ("model <x>: digest differs",)})
    small = ReportData(pool=data.pool, proof=failed)
    page = Page(write_report(tmp_path, small).read_text())
    assert "Why the proof failed" in page.words
    assert "model <x>: digest differs" in page.words
    assert "failed" in page.words and "passed" not in page.words


def test_a_model_out_of_budget_is_marked(data: ReportData, tmp_path: Path) -> None:
    task = data.holdouts["roman"].tasks["roman_numerals"].model_copy(update={"within_budget": False})
    broken = data.holdouts["roman"].model_copy(update={"tasks": {"roman_numerals": task}})
    page = Page(
        write_report(tmp_path, ReportData(pool=data.pool, holdouts={**data.holdouts, "roman": broken})).read_text()
    )
    assert "5 of 6" in page.words
    assert page.table("Every model on questions")[-1]["within budget"] == "no"


def test_hostile_names_stay_text(data: ReportData, tmp_path: Path) -> None:
    entry = data.pool.models[0].model_copy(update={"tasks": (TaskBudget(task=HOSTILE, metric=HOSTILE, budget=0.02),)})
    pool = data.pool.model_copy(update={"models": (entry,)})
    task = data.holdouts["sorter"].tasks["sort_words"]
    walk = data.trajectories["sorter"]
    scores = [s.model_copy(update={"scores": s.scores and {HOSTILE: 0.95}}) for s in walk.steps]
    hostile = ReportData(
        pool=pool,
        holdouts={"sorter": data.holdouts["sorter"].model_copy(update={"tasks": {HOSTILE: task}})},
        trajectories={"sorter": walk.model_copy(update={
            "baseline": {HOSTILE: 0.96}, "higher_is_better": {HOSTILE: True}, "steps": tuple(scores)})},
    )  # fmt: skip
    path = write_report(tmp_path, hostile)
    page = Page(path.read_text())
    assert page.table("Every model on questions")[0]["task"] == HOSTILE
    assert not {"script", "img"} & {tag for tag, _ in page.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "alert(1)</script>" not in path.read_text() and "{{ 7*7 }}" in page.words


def test_both_themes_define_every_colour(written: Path) -> None:
    text = written.read_text()
    light, dark = text[text.index(":root") :].split("prefers-color-scheme: dark", 1)
    for name, (on_light, on_dark) in style.PALETTE.items():
        assert f"--{name}: {on_light};" in light
        assert f"--{name}: {on_dark};" in dark[:1000]
