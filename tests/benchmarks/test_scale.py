"""Checks and plans of models whose weights lie nowhere: their size is that of names and shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hollow import hollow_pool
from benchmarks.scale import plan_all

MOST = 2 << 30  # bytes of memory that a process may have touched


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow_pool(tmp_path_factory.mktemp("hollow"), "8B", 12)


def test_hollow_models_have_the_sizes_of_real_ones_and_take_no_room(pool: Path) -> None:
    files = list((pool.parent / "models" / "m000").glob("*.safetensors"))
    assert sum(f.stat().st_size for f in files) > 16 * 10**9
    assert sum(512 * f.stat().st_blocks for f in files) < 1 << 20


@pytest.mark.slow
def test_a_check_and_a_dry_run_of_twelve_large_models_stay_small(pool: Path, tmp_path: Path) -> None:
    for command in (["check"], ["build", "--dry-run"]):
        words = [*command, str(pool), "--root", str(tmp_path / "root"), "--headers-only", "--json"]
        with subprocess.Popen([sys.executable, "-m", "sandhi_core", *words], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            document = json.loads(process.stdout.read())
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = 0
        assert {p["code"] for p in document["problems"]} <= {"weights-unread", "disk-space"}
        (group,) = document["plan"]["groups"]
        assert (len(group["models"]), group["sets"]) == (12, 32 * 7)
        assert 1024 * used.ru_maxrss < MOST


def test_twelve_large_models_are_grouped_and_planned(pool: Path, tmp_path: Path) -> None:
    assert plan_all(pool, tmp_path / "root").keys() >= {"kinship", "grouping", "planning"}
    assert len(list((tmp_path / "root" / "records" / "plan").iterdir())) == 12
