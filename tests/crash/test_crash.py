"""Stopped anywhere: whatever has a final name is whole, nothing is left, and a rerun ends with the same bytes.

A larger sweep than CI's: SANDHI_CRASH_EVERY=1, or `python -m tests.crash.sweep FOLDER --every`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHECKOUT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EVERY = bool(os.environ.get("SANDHI_CRASH_EVERY"))


def ran(module: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *options],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=36_000 if EVERY else 1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_place_that_writes(tmp_path: Path) -> None:
    results = ran("tests.crash.sweep", tmp_path, *["--every"] * EVERY)
    assert [result for result in results if result["wrong"]] == []
    assert {r["fault"] for r in results} == {"before", "torn", "after", "full", "denied", "broken"}
    assert {r["operation"] for r in results} >= {
        "open",
        "write",
        "fsync",
        "replace",
        "rename",
        "link",
        "mkdir",
        "unlink",
    }
    assert {r["node"][0] for r in results} >= {"checkpoint", "profile", "groups", "merged_weights"}
    places = {site.partition(":")[0] for r in results for site in r["site"][:1]}
    modules = (
        "files",
        "checkpoints/safetensors_file",
        "store",
        "export",
        "checkpoints/scan",
        "artifacts",
        "evaluation/scorelog",
    )
    assert places >= {f"sandhi_core/{module}.py" for module in modules}


def test_whole_builds_killed_again_and_again(tmp_path: Path) -> None:
    results = ran("tests.crash.builds", tmp_path)
    assert [result for result in results if result["wrong"]] == []
    assert len(results) > 5 and results[-1]["place"] is None


def test_real_disks_and_folders(tmp_path: Path) -> None:
    results = ran("tests.crash.disks", tmp_path)
    skipped = [r["wrong"] for r in results if r["case"] == "skipped"]
    assert [r for r in results if r["wrong"] and r["case"] != "skipped"] == []
    assert sum(r["kind"] == "closed" for r in results) == 4
    if skipped:
        pytest.skip(f"no file system can be mounted here: {skipped[0]}; full disks by injection only")
    assert [r["case"] for r in results if r["kind"] == "filled"][-1] == "room again"
