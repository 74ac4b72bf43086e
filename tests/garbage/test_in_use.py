"""What real processes map and are called with."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandhi_core.errors import StoreError
from sandhi_core.garbage.in_use import look
from sandhi_core.garbage.using import alone, used
from tests.conftest import CHECKOUT
from tests.garbage.roots import Root

MAPS = "import mmap, os, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()"
WAITS = "print('ready', flush=True); sys.stdin.read()"


@contextmanager
def running(*command: str, told: bool = True) -> Iterator[int]:
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=CHECKOUT) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def test_a_server_that_maps_the_file_by_another_name_is_found(root: Root, tmp_path: Path) -> None:
    """The file is open by a link elsewhere, closed again after it was mapped, and the link is gone."""
    export = root.exports[0]
    shared = max(export.rglob("shared-*"), key=lambda p: p.stat().st_size)
    (tmp_path / "x").hardlink_to(shared)
    code = f"{MAPS}; os.unlink(sys.argv[1]); {WAITS}"
    with running(sys.executable, "-c", code, str(tmp_path / "x")) as pid:
        found = look()
        assert found.of(export, {f.stat().st_ino for f in export.rglob("*")}) == f"mapped by process {pid}"
    assert look().of(export, {f.stat().st_ino for f in export.rglob("*")}) is None


def test_a_command_that_names_the_export_is_found(root: Root) -> None:
    with running(sys.executable, "-c", f"import sys; {WAITS}", f"--model={root.exports[0]}/single") as pid:
        assert look().of(root.exports[0], set()) == f"named in the command of process {pid}"


def test_this_process_does_not_count(root: Root) -> None:
    assert os.getpid() not in look().commands


def test_processes_that_cannot_be_looked_at_are_counted(tmp_path: Path) -> None:
    """Made by hand: which processes a test may look at depends on who runs it."""
    for pid, command in {"71": b"python\0x\0", "72": b"", "73": b"gone"}.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(command)
    (tmp_path / "71" / "cwd").symlink_to(tmp_path / "71" / "maps")  # where nothing can be named
    (tmp_path / "71" / "maps").write_text(
        "7f00-7f10 r--s 00000000 fe:00 4711                   /a file (deleted)\n7f20-7f30 rw-p 00000000 00:00 0\n"
    )
    found = look(tmp_path.iterdir())
    assert (found.mapped, found.commands[71], found.unseen) == ({4711: {(71, "/a file (deleted)")}}, "python x", 0)
    assert 72 not in found.commands


@pytest.mark.skipif(os.getuid() != 0, reason="needs a process of another user: runs as root")
def test_what_others_map_is_not_known() -> None:
    code = "import os, sys; sys.path.insert(0, sys.argv[1]); from sandhi_core.garbage.in_use import look\n"
    code += "os.setgroups([]); os.setgid(65534); os.setuid(65534); print(look().unseen)"
    done = subprocess.run([sys.executable, "-c", code, str(CHECKOUT)], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0


def test_a_command_names_an_export_by_any_path_that_leads_there(tmp_path: Path) -> None:
    export = tmp_path / "root" / "exports" / "p" / ("0" * 16)
    export.mkdir(parents=True)
    (tmp_path / "link").symlink_to("root")
    for at, (folder, word) in enumerate(
        [
            (export, "."),
            (export.parent, "0" * 16),
            (tmp_path, f"--model=link/exports/p/{'0' * 16}"),
            (tmp_path, "x" * 9999),
        ]
    ):
        process = tmp_path / "proc" / str(at)
        process.mkdir(parents=True)
        (process / "cmdline").write_bytes(f"serve\0{word}\0".encode())
        (process / "cwd").symlink_to(folder)
        (process / "maps").write_text("")
        told = look([process]).of(export, ())
        assert told == (None if len(word) > 999 else f"named in the command of process {at}")
    assert look([process]).commands[at].startswith("serve xxx")


def test_removal_and_stages_keep_out_of_each_others_way(root: Root) -> None:
    code = (
        "import pathlib, sys; from sandhi_core.artifacts import Artifacts; from sandhi_core.garbage.using import used\n"
        f"with used(Artifacts(pathlib.Path(sys.argv[1]))): {WAITS}"
    )
    beside = running(sys.executable, "-c", code, str(root.case.root))  # stages run side by side
    with used(root.artifacts), beside, pytest.raises(StoreError, match="a stage is running"), alone(root.artifacts):
        pass
    with alone(root.artifacts), pytest.raises(StoreError, match="another build"), root.artifacts.lock():
        pass
    with root.artifacts.lock(), pytest.raises(StoreError, match="another build"), alone(root.artifacts):
        pass
    with alone(root.artifacts):
        pass
