"""`sandhi gc` on roots that were really built: what goes, what stays, and that a build afterwards has nothing to do."""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sandhi_core.artifacts import Artifacts
from tests.conftest import CHECKOUT
from tests.pipelines.conftest import Line, PoolWriter, built, sandhi

pytestmark = pytest.mark.slow


def gc(pool: Path, root: Path, *options: str) -> dict[str, Any]:
    status, out, err = sandhi("gc", pool, "--root", root, "--json", *options)
    assert status == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


def paths(document: dict[str, Any], *kinds: str) -> set[Path]:
    return {Path(r["path"]) for r in document["removals"] if r["kind"] in kinds}


def export(document: dict[str, Any]) -> Path:
    (pool,) = document["pools"].values()
    return Path(pool["export"])


def tree(root: Path) -> dict[str, bytes]:
    """Every file of the root but Dagster's own and locks."""
    files = (p for p in root.rglob("*") if p.is_file() and p.relative_to(root).parts[0] not in ("dagster", "lock", "use"))
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def occupied(root: Path) -> int:
    """Bytes that its files take on the disk, each once."""
    found = {(s.st_dev, s.st_ino): 512 * s.st_blocks for p in root.rglob("*") if p.is_file() for s in [p.lstat()]}
    return sum(found.values())


@pytest.fixture
def edited(tiny_pool: PoolWriter, tmp_path: Path) -> tuple[Path, Path, list[Path]]:
    """A pool that was built three times with other models: three exports, the last deployed."""
    root, exports = tmp_path / "root", []
    for models in (["a", "b", "c"], ["a", "b", "d"], ["a", "b"]):
        pool = tiny_pool(models)
        exports.append(export(built(pool, root)))
    assert len(set(exports)) == 3
    return pool, root, exports


def test_a_dry_run_changes_nothing_and_tells_what_would_go(edited: tuple[Path, Path, list[Path]]) -> None:
    pool, root, (first, second, third) = edited
    before = tree(root)
    told = gc(pool, root)
    assert tree(root) == before and not told["applied"]
    assert paths(told, "export") == {first}
    assert {Path(k["path"]): k["why"] for k in told["kept"]} == {third: "the pool's newest", second: "to go back to"}
    status, out, _ = sandhi("gc", pool, "--root", root)
    assert status == 0 and "What `--apply` would remove" in out and "Would free" in out and str(first) in out
