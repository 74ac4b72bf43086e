from pathlib import Path

import polars as pl

from sandhi_core.report.data import ReportData
from sandhi_core.report.tables import (
    points_table,
    profiles_table,
    steps_table,
    sweeps_table,
    write_tables,
)


def test_profiles_have_a_row_a_component_and_task(data: ReportData) -> None:
    table = profiles_table(data.profiles)
    assert table.height == sum(len(p.sensitivities) for p in data.profiles.values())
    (row,) = table.filter(model="sorter", layer=0, component="attn").to_dicts()
    assert (row["baseline"], row["drop"]) == (0.963, 0.31)


def test_steps_keep_unscored_ones_as_null(data: ReportData) -> None:
    table = steps_table(data.trajectories)
    tasks = {m: len(t.baseline) for m, t in data.trajectories.items()}
    assert table.height == sum(tasks[m] * len(t.steps) for m, t in data.trajectories.items())
    unscored = sum(tasks[m] for m, t in data.trajectories.items() for s in t.steps if s.scores is None)
    assert table["score"].null_count() == unscored > 0


def test_steps_that_were_rejected_without_a_score_are_null_too(data: ReportData) -> None:
    walk = data.trajectories["chemist"]
    first = next(s.index for s in walk.steps if s.decision == "rejected")
    for scores in (None, {}):
        steps = [s if s.index != first else s.model_copy(update={"scores": scores}) for s in walk.steps]
        table = steps_table({"chemist": walk.model_copy(update={"steps": tuple(steps)})})
        assert table.filter(step=first)["score"].to_list() == [None] * len(walk.baseline)


def test_sweeps_have_a_row_a_cutoff_and_task(data: ReportData) -> None:
    table = sweeps_table(data.cutoffs)
    assert table.filter(model="inflector").height == 2 * len(data.cutoffs["inflector"].cutoffs)
    deepest = table.filter(model="chemist", steps=data.cutoffs["chemist"].deepest)
    assert deepest["within_budget"].to_list() == [True]
    assert deepest["drop"].to_list() == [data.cutoffs["chemist"].cutoffs[-1].drops["formula"]]


def test_points_end_with_the_deployed_one(data: ReportData) -> None:
    assert data.points is not None
    table = points_table(data.points)
    last = table.tail(len(data.pool.models))
    assert set(last["point"]) == {"deployed"}
    assert set(last["pool_saved"]) == {data.points.deployed.savings.net}


def test_a_table_without_rows_has_the_same_columns(data: ReportData) -> None:
    full = (profiles_table(data.profiles), steps_table(data.trajectories), sweeps_table(data.cutoffs))
    empty = (profiles_table({}), steps_table({}), sweeps_table({}))
    assert [t.schema for t in full] == [t.schema for t in empty]
    assert points_table(None).schema == points_table(data.points).schema
    assert all(t.is_empty() for t in (*empty, points_table(None)))


def test_parquet_reads_back_and_has_the_same_bytes_every_time(data: ReportData, tmp_path: Path) -> None:
    table = sweeps_table(data.cutoffs)
    write_tables(tmp_path, {"sweeps": table})
    before = (tmp_path / "sweeps.parquet").read_bytes()
    write_tables(tmp_path, {"sweeps": table})
    assert (tmp_path / "sweeps.parquet").read_bytes() == before
    assert pl.read_parquet(tmp_path / "sweeps.parquet").equals(table)
    assert [f.name for f in tmp_path.iterdir()] == ["sweeps.parquet"]
