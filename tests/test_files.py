"""What is written aside: whole under its name or not there, and swept where its writer is dead."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import StoreError
from sandhi_core.files import aside, is_aside, sweep, unwritable, write_atomic, writing
from tests.conftest import CHECKOUT

WRITER = """
import sys, time
from pathlib import Path
from sandhi_core.files import aside

with aside(Path(sys.argv[1])) as (path, f):
    f.write(b"half")
    f.flush()
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process in the middle of writing, and its file."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_what_a_live_writer_has_stays_and_what_a_dead_one_left_goes(
    tmp_path: Path, writer: tuple[subprocess.Popen[str], Path]
) -> None:
    process, file = writer
    assert sweep([tmp_path]) == []
    assert file.read_bytes() == b"half"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sweep([tmp_path]) == [file]
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_swept(tmp_path: Path) -> None:
    """Not other programs' temporary files, nor links by such a name, nor directories."""
    ours = ".sandhi-0123456789abcdef.tmp"
    (tmp_path / "kept").write_bytes(b"")
    (tmp_path / f"{ours}.bak").write_bytes(b"")
    (tmp_path / ".other.tmp").write_bytes(b"")
    (tmp_path / "deep" / ours).mkdir(parents=True)
    (tmp_path / ours).symlink_to(tmp_path / "kept")
    before = sorted(tmp_path.rglob("*"))
    assert sweep([tmp_path]) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_root_is_swept_at_any_depth_and_through_links_to_its_parts(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    left = [
        root / "records" / "plan" / ".sandhi-0123456789abcdef.tmp",
        elsewhere / "d" / ".sandhi-fedcba9876543210.tmp",
    ]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half")
    (root / "store").symlink_to(elsewhere)
    Artifacts(root).sweep()
    assert not any(path.exists() for path in left)


def test_sweeping_while_others_write_loses_nothing(tmp_path: Path) -> None:
    ended = threading.Event()

    def sweeping() -> None:
        while not ended.is_set():
            sweep([tmp_path])

    swept = threading.Thread(target=sweeping)
    swept.start()
    try:
        for number in range(300):
            write_atomic(tmp_path / str(number), b"%d" % number)
    finally:
        ended.set()
        swept.join()
    assert sorted(int(p.read_bytes()) for p in tmp_path.iterdir()) == list(range(300))


def test_what_is_not_renamed_is_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), aside(tmp_path) as (path, f):
        f.write(b"half")
        assert path.exists()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_what_it_takes_and_what_is_free(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "x"
    error = unwritable(path, OSError(28, os.strerror(28)), 4096)
    assert "No space left on device: it takes 4096 bytes, and " in error.problem.message
    assert error.problem.message.endswith(" bytes are free")
    assert error.problem.file == str(path) and "free space" in error.problem.remedy
    with pytest.raises(StoreError, match="write permission"), writing(path):
        raise PermissionError(13, "Permission denied")


def test_only_what_is_being_written_is_aside() -> None:
    assert is_aside(".sandhi-0123456789abcdef.tmp")
    assert not any(is_aside(n) for n in ("sandhi.json", ".sandhi.tmp", "x.sandhi-0123456789abcdef.tmp", ".0123.tmp"))
