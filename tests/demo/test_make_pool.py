"""Making a pool: the same bytes every time, whole after a kill, and nothing to do the second time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT

pytestmark = pytest.mark.slow


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "demo.make_pool", str(out), "--size", "fixture", *options]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_killed_run_leaves_nothing_and_the_next_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    """`trained` was made by two processes, this one by one; a kill in the middle changes nothing either."""
    out = tmp_path / "pool"
    killed = subprocess.Popen(command(out), cwd=CHECKOUT, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list(tmp_path.glob("pool.partial-*/models/*")) and killed.poll() is None:
        time.sleep(0.1)
    assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not out.exists()
    subprocess.run(command(out, "--jobs", "1"), cwd=CHECKOUT, check=True, capture_output=True)
    assert content(out) == content(trained)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".pool.lock", "pool"]
    again = subprocess.run(command(out), cwd=CHECKOUT, check=True, capture_output=True, text=True)
    assert "already complete" in again.stderr


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    done = subprocess.run(command(tmp_path / "mine"), cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "not a demo pool" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
