"""The scoring benchmark on a tiny random model: every row, and that the ways it compares decide alike."""

import json
from pathlib import Path

import pytest

from benchmarks import scoring
from benchmarks.growth import Curve
from benchmarks.rows import table
from benchmarks.sweep import spread
from tests.models import tiny


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[str, dict[str, object]]:
    model = tiny("llama", tmp_path / "tiny", num_hidden_layers=2)
    out = tmp_path / "kept-0.1b"
    common = ("--model", str(model), "--pair", str(model), "--questions", "5", "--threads", "1", "--out", str(out))
    assert scoring.main([*common, *options]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert json.loads((tmp_path / "kept-0.1b.json").read_text()) == figures
    assert (tmp_path / "kept-0.1b.txt").read_text().splitlines() == printed
    return "\n".join(printed), figures


@pytest.mark.slow
def test_every_row_is_measured_and_all_ways_decide_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, figures = run(tmp_path, capsys, "--processes", "1", "--components", "9", "--tolerance", "0.2")
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == ["sweep", "reference", "trajectory", "generation"]
    assert [row["decisions"].split()[0] for row in rows.values()] == ["all"] * 4
    assert rows["sweep"]["figures"]["components"] == 4
    assert "none extrapolated" in rows["sweep"]["notes"][0]
    assert "extrapolated" in rows["reference"]["notes"][0]
    walks = rows["trajectory"]["figures"]["walks"]
    assert all(walk["within_tolerance"] and walk["steps"] == 4 for walk in walks.values())
    assert walks["stride 1"]["evaluations"] == 4
    assert [len(curve["points"]) for curve in figures["growth"].values()] == [2, 4, 4]
    assert (tmp_path / "kept-0.1b-growth.png").stat().st_size > 0
    assert "ratio" in text and "to linear" in text
    assert figures["peak_mib"] > 0


def test_a_walk_that_was_cut_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, figures = run(tmp_path, capsys, "--rows", "trajectory", "--steps", "1", "--tolerance", "1")
    (row,) = figures["rows"]
    assert row["theirs"] == pytest.approx(4 * row["figures"]["seconds_walked"])
    assert row["notes"][-1].startswith("stride 1 walked 1 of 4 steps")


def test_growth_is_held_against_proportion() -> None:
    curve = Curve("layers", ((2, 1.0), (4, 2.0), (8, 3.0)))
    assert curve.ratios() == [1.0, 1.0, 0.75]
    assert "0.75" in str(curve)


def test_timed_components_are_spread_over_all() -> None:
    places = [("mlp", layer) for layer in range(7)]
    assert [layer for _, layer in spread(places, 3)] == [0, 3, 6]
    assert spread(places, 9) == places and spread(places, 1) == places[:1] and spread(places, 0) == []


def test_a_table_lines_up() -> None:
    assert table(("a", "bb"), [("long", "1")]) == "a     bb\n----  --\nlong   1"


def test_a_pair_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scoring.main(["--pair", str(tmp_path / "gone")])
    assert "make_pool" in capsys.readouterr().err
