"""How things go: in an order that a stop anywhere leaves sound, and with the bytes that come free told truly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandhi_core.disk import verify_disk
from sandhi_core.errors import StoreError
from sandhi_core.garbage import removal
from sandhi_core.garbage.removal import Removal, freed, remove
from sandhi_core.layout import DEPLOYMENT, MANIFEST, read_manifest, sizes_match
from tests.conftest import CHECKOUT
from tests.garbage.roots import Root


def occupied(root: Path) -> int:
    """Bytes that the files below take on the disk, each file once, counted by du(1)."""
    done = subprocess.run(["du", "-s", "--block-size=1", root], capture_output=True, text=True, check=True)
    folders = sum(512 * p.lstat().st_blocks for p in (root, *root.rglob("*")) if p.is_dir())
    return int(done.stdout.split()[0]) - folders


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_bytes_told_are_those_that_come_free(root: Root, keep: int) -> None:
    found = root.garbage(keep=keep)
    told, before = sum(freed(found.removals)), occupied(root.case.root)
    remove(root.case.root, found.removals)
    assert before - occupied(root.case.root) == told > 0


def test_a_file_with_another_name_elsewhere_frees_nothing(root: Root, tmp_path: Path) -> None:
    (orphan,) = root.orphans
    (entry,) = (root.case.root / "store" / orphan).iterdir()
    one = Removal("tensor", entry.parent, (entry,))
    assert freed([one]) == [512 * entry.stat().st_blocks]
    (tmp_path / "name").hardlink_to(entry)
    assert freed([one]) == [0]
    assert freed([one, Removal("tensor", tmp_path, (tmp_path / "name",))]) == [0, 512 * entry.stat().st_blocks]


class StoppedError(Exception):
    """In place of a kill."""


def test_a_stop_at_any_moment_leaves_a_sound_root(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after every three changes of the file system; each next removal goes on from there."""
    left = 0

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise StoppedError
            return real(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    for name in ("unlink", "rmdir", "rename"):
        counted(name)
    stops = 0
    while True:
        left = 3
        try:
            remove(root.case.root, root.garbage(keep=0).removals)
        except StoppedError:
            stops += 1
        else:
            break
        for export in root.exports:
            if (export / DEPLOYMENT).exists():  # what looks deployed is whole
                assert sizes_match(export, read_manifest(export))
        for path in root.exports[0].parent.iterdir():
            assert path.name.startswith(".gone-") or (path / MANIFEST).exists()
    assert stops > 20
    left = 10**9
    assert [p.name for p in root.exports[0].parent.iterdir()] == [root.exports[2].name]
    assert not verify_disk(root.exports[2], read_manifest(root.exports[2])).problems
    assert not root.garbage(keep=0).removals


def test_what_is_read_only_goes_too(root: Root) -> None:
    """By whoever it belongs to: as another user than root, to whom modes mean something."""
    for folder, _, names in os.walk(root.exports[0]):
        for name in names:
            Path(folder, name).chmod(0o444)
        Path(folder).chmod(0o555)
    found = root.garbage(keep=0)
    assert found.removals[0].path == root.exports[0]
    user = os.getuid() or 65534
    for path in (root.case.root, *root.case.root.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from sandhi_core.garbage.removal import Removal, remove\n"
        "os.chdir(sys.argv[3])\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
        "remove(Path(), [Removal('export', Path(sys.argv[4]), ())])\n"
    )
    export = root.exports[0].relative_to(root.case.root)
    run = [sys.executable, "-c", code, str(CHECKOUT), str(user), str(root.case.root), str(export)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not root.exports[0].exists() and root.exports[1].exists()


def test_what_cannot_be_removed_is_named(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(removal.shutil, "rmtree", refused)
    with pytest.raises(StoreError, match=r"\.gone-.*cannot be removed: Operation not permitted"):
        remove(root.case.root, root.garbage(keep=0).removals)
    monkeypatch.undo()
    remove(root.case.root, root.garbage(keep=0).removals)  # what was hidden is found again
    assert len(list(root.exports[0].parent.iterdir())) == 1
