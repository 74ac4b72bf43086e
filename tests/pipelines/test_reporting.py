"""Whatever is said of a built pool is said of the cutoffs that are deployed."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from pipelines.reporting import report, report_pool
from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import PoolError, UsageError
from tests.pipelines.conftest import PoolWriter, built, sandhi
from tests.synthetic import holdout, points_at


class Walks(HTMLParser):
    """The deployed steps by model, from the page's table of walks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data.strip()

    @property
    def deployed(self) -> dict[str, str]:
        ((place, header),) = [(i, r) for i, r in enumerate(self.rows) if "holdout looks" in r]
        rows = [r for r in self.rows[place + 1 :] if r and len(r) == len(header)]
        return {r[0]: r[header.index("deployed")] for r in rows if r[0] in ("a", "b")}


@pytest.fixture
def walked(tmp_path: Path) -> tuple[Path, Artifacts]:
    """A pool file of two, and a root where their holdouts were walked to 3 and to 2."""
    tasks = [{"task": "task", "metric": "acc", "budget": 0.02}]
    pool = {"name": "pool", "models": [{"name": m, "path": f"./{m}", "tasks": tasks} for m in "ab"]}
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    artifacts = Artifacts(tmp_path / "root")
    for model, held in {"a": [1, 3], "b": [2]}.items():
        artifacts.save(("holdout", f"pool.{model}"), "", None, holdout(model, held))
    return file, artifacts


@pytest.mark.parametrize(
    "cutoffs, deployed",
    [
        (None, {"a": "3", "b": "2"}),
        ({"a": 1, "b": 2}, {"a": "1", "b": "2"}),
        ({"a": 2, "b": 0}, {"a": "3", "b": "0"}),  # a was walked again since
        ({"b": 0}, {"a": "3", "b": "0"}),  # a is new
    ],
)
def test_a_report_shows_the_deployed_cutoffs_as_far_as_they_are_known(
    walked: tuple[Path, Artifacts], cutoffs: dict[str, int] | None, deployed: dict[str, str]
) -> None:
    file, artifacts = walked
    if cutoffs is not None:
        artifacts.save(("operating_points", "pool"), "", None, points_at(cutoffs))
    assert Walks(report_pool(file, artifacts.root).read_text()).deployed == deployed


def test_of_a_folder_what_was_built_is_reported_and_what_was_not_is_named(walked: tuple[Path, Artifacts]) -> None:
    file, artifacts = walked
    other = yaml.safe_load(file.read_text()) | {"name": "other"}
    file.with_name("other.yaml").write_text(yaml.safe_dump(other))
    pages, problems = report(file.parent, artifacts.root)
    assert [page.parent.name for page in pages] == ["pool"]
    assert len(problems) == 1 and "pool other" in problems[0].message


def test_of_a_folder_one_bad_file_is_named_and_the_others_are_reported(walked: tuple[Path, Artifacts]) -> None:
    file, artifacts = walked
    bad = file.with_name("bad.yaml")
    bad.write_text("name: bad\nnonsense: 1\nmodels: []\n")
    pages, problems = report(file.parent, artifacts.root)
    assert [page.parent.name for page in pages] == ["pool"]
    assert {problem.file for problem in problems} == {f"{bad}:2", f"{bad}:3"}
    with pytest.raises(PoolError, match="nonsense"):
        report(bad, artifacts.root)


def test_a_folder_without_a_pool_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no pool file"):
        report(tmp_path, tmp_path / "root")


def test_a_report_says_where_the_pool_file_was_changed_since_or_never_built(
    tiny_pool: PoolWriter, tmp_path: Path
) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    built(pool, root)
    status, out, err = sandhi("report", pool, "--root", root)
    assert status == 0 and "outdated" not in Path(out.strip()).read_text().partition("<main>")[2], err
    tiny_pool(["a", "b", "c"], budget=0.8)
    status, out, err = sandhi("report", pool, "--root", root)
    page = Path(out.strip()).read_text()
    assert status == 0, err
    assert "<li>Models of the pool file that are not in the export: c.</li>" in page
    assert "<li>Never ran: checkpoint of c; profile of c;" in page and "may change with it: groups of tiny." in page
    other = pool.with_name("other.yaml")
    other.write_text(yaml.safe_dump(yaml.safe_load(pool.read_text()) | {"name": "other"}))
    status, out, err = sandhi("report", other, "--root", root)
    assert status == 0 and "operating_points; merged_weights; sharing_proof; deployment.</li>" in (
        Path(out.strip()).read_text()
    ), err
