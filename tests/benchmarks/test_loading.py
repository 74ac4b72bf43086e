"""The benchmark of loading: what it counts as saved, its hold on the page cache, one real load."""

import dataclasses
import os
from pathlib import Path

import pytest

from benchmarks.loading import (
    Line,
    Loaded,
    _evict,
    _files,
    _fill,
    _mapped,
    _resident,
    _saved,
    measured,
    printed,
    synthetic,
)
from sandhi_core.disk import verify_disk
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from tests.exported import EMBED, make_models


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = make_models(tmp_path_factory.mktemp("models"))
    tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
    entries = tuple(ModelEntry(name=name, path=str(path), tasks=tasks) for name, path in models.items())
    return synthetic(Pool(name="small", models=entries), tmp_path_factory.mktemp("folder"))


def test_the_synthetic_export_shares_every_matrix_of_an_mlp(export: Path) -> None:
    manifest = read_manifest(export)
    assert verify_disk(export, manifest).problems == ()
    for model in manifest.models.values():
        assert {n for n, t in model.tensors.items() if t.sharing == "merged"} == {
            n for n in model.tensors if ".mlp." in n
        }
    merged = sum(t.nbytes for t in manifest.models["tied"].tensors.values() if t.sharing == "merged")
    assert _saved(manifest, ["sharded", "single"], "tied") == merged
    duplicate = manifest.models["single"].tensors[EMBED].nbytes
    assert _saved(manifest, ["sharded"], "single") == merged + duplicate
    assert len(_mapped(manifest, export, ["sharded"], "single")) == 7


def test_files_leave_the_page_cache_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3 << 20))
    with path.open("rb") as f:
        os.fsync(f.fileno())
    _fill([path])
    assert _resident(path) == 3 << 20
    _evict([path])
    if _resident(path):
        pytest.skip("this file system keeps what it is told to drop")
    _fill([path])
    assert _resident(path) == 3 << 20


def test_a_warm_load_reads_nothing_from_the_disk(export: Path) -> None:
    load, sound = measured(export / "tied", export / "single", frozenset(), cold=False)
    assert sound and load.read == 0 and 0 < load.made <= load.ready
    assert {path.parent.name for path in _files(export / "single")} == {"sharded", "single", "tied"}


def test_the_table_says_whether_what_is_saved_is_not_read() -> None:
    line = Line("m", "cold", 300 << 20, 200 << 20, Loaded(100 << 20, 1.0, 2.0), Loaded(300 << 20, 2.0, 4.0), True)
    assert (
        line.holds
        and "not read: yes" in printed("p", [line], "an export of a build", 5)
        and "2.00x" in printed("p", [line], "", 5)
    )
    more = dataclasses.replace(line, ours=Loaded((100 << 20) + 1, 1.0, 2.0))
    assert not more.holds and "bytes not read: NO" in printed("p", [line, more], "", 5)
    assert dataclasses.replace(more, cache="warm").holds
    assert "(mincore): NO" in printed("p", [dataclasses.replace(line, evicted=False)], "", 5)
