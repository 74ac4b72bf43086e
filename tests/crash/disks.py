"""Real disks that are full and real folders that cannot be written, under stages that run one after the other.

    python -m tests.crash.disks FOLDER

prints a line of JSON a case with what was wrong.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sandhi_core.errors import SandhiError
from tests.crash import line
from tests.crash.forked import Ended, forked

STAGES = ("profile", "groups", "trajectory", "merged_weights")
"""In the first node of each the disk is full once, if no earlier one takes more for a while."""

PAGE = 4  # KiB, of which files in memory are made
ROOM = 64 * 1024  # KiB

CLOSED = ("", "records/holdout", "store", "exports/tiny")
"""Folders of a root, each closed once."""

_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2  # capability(7): to pass over the modes of files
_VERSION = 0x20080522


def stages(folder: Path, root: Path) -> Ended:
    """Run all that are stale; ends with the first failure. Tells each stage and the KiB that are taken after it, and
    the stage that failed."""
    pool = folder / "tiny.yaml"

    def work(tell: Callable[[Any], None]) -> None:
        _as_others()
        for node in line.nodes(pool):
            try:
                line.run(pool, root, node, lambda model, seconds: None)
            except SandhiError:
                tell(node[0])
                raise
            tell([node[0], taken(root)])

    return forked(folder, work)


def taken(root: Path) -> int:
    """KiB of its files, each (inode) once."""
    files = {(s := path.stat()).st_ino: s.st_size for path in root.rglob("*") if path.is_file()}
    return sum(PAGE * -(-size // (1024 * PAGE)) for size in files.values())


def sizes(told: list[Any]) -> list[int]:
    """KiB of disks on which each of STAGES gets half of what its first node takes."""
    found, before = dict[str, int](), 0
    for stage, after in told:
        found.setdefault(stage, (before + after) // 2)
        before = after
    return sorted(found[stage] for stage in STAGES)


def _as_others() -> None:
    """Modes of files count for this process from here on, root's or not."""
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    held = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, held) == 0:
        held[0] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)  # effective, of the first 32
        libc.capset(header, held)


def filled(folder: Path, undisturbed: Ended) -> Iterator[tuple[str, list[str]]]:
    """One disk that is enlarged each time that it is full."""
    disk, stopped = folder / "disk", []
    disk.mkdir()
    options = ["-t", "tmpfs", "tmpfs"]
    mounted = subprocess.run(["mount", *options, str(disk)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        yield "skipped", [mounted.stderr.strip()]
        return
    try:
        for kib in sizes(undisturbed.told):
            _resized(disk, kib)
            before = line.tree(disk)
            ended = stages(folder, disk)
            stopped += ended.told[-1:]
            yield (
                f"{kib} KiB",
                [*_unclear(ended, disk, ("No space left on device", "bytes are free")), *_lost(before, disk)],
            )
        yield "stages", [] if len(set(stopped)) > 2 else [f"the disk was only full in {stopped}"]
        _resized(disk, ROOM)
        yield "room again", _whole(stages(folder, disk), folder, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _resized(disk: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)


def closed(folder: Path, undisturbed: Ended) -> Iterator[tuple[str, list[str]]]:
    for kept in CLOSED:
        root = folder / "root"
        line.copied(folder / "wanted", root)
        for stage in ("trajectory", "holdout", "operating_points", "merged_weights"):
            shutil.rmtree(root / "records" / stage)
            (root / "records" / stage).mkdir()
        for gone in [*root.glob("scores/*"), *root.glob("exports/tiny/*/sandhi.json")]:
            gone.unlink()
        if kept == "":
            (root / "scores").rmdir()
        elif kept == "store":
            shutil.rmtree(root / "store")
            (root / "store").mkdir()
        before = line.tree(root)
        (root / kept).chmod(0o555)
        ended = stages(folder, root)
        wrong = [*_unclear(ended, root / kept, ("Permission denied",)), *_lost(before, root)]
        (root / kept).chmod(0o755)
        # What was taken away is only made again as far as it is asked for.
        yield kept or "the root", wrong + _whole(stages(folder, root), folder, root, ("records/", "exports/"))


def _unclear(ended: Ended, place: Path, says: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with how stages ended that could not write below `place`."""
    error = ended.error
    if ended.crash or ended.killed or error is None:
        yield f"ended otherwise than by a clear error: {ended}"
    elif not (
        str(error["file"]).startswith(str(place)) and all(s in error["message"] for s in says) and error["remedy"]
    ):
        yield f"is no clear error: {error}"
    if ended.left:
        yield f"left running: {ended.left}"


def _lost(before: line.Tree, root: Path) -> Iterator[str]:
    """What was there must be there, and nothing half-made."""
    now = line.tree(root)
    for path, kept in before.items():
        if now.get(path) != kept and not path.startswith(("scores/", "spectra/", "exports/tiny/")):
            yield f"{path} is lost"
    yield from (f"{path} is left" for path in now if "/.sandhi-" in path)
    if not any(root.glob("exports/tiny/*/sandhi.json")):
        return
    yield from line.exports_problems(root)


def _whole(ended: Ended, folder: Path, root: Path, parts: tuple[str, ...] = ("",)) -> list[str]:
    """What parts of a root differ from those of the undisturbed one."""
    if not ended.sound:
        return [f"the rerun failed: {ended}"]
    wanted, found = (
        {path: kept for path, kept in line.tree(tree).items() if path.startswith(parts)}
        for tree in (folder / "wanted", root)
    )
    return line.differences(wanted, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    line.make_pool(folder)
    undisturbed = stages(folder, folder / "wanted")
    assert undisturbed.sound, undisturbed
    for cases in (filled, closed):
        for case, wrong in cases(folder, undisturbed):
            print(json.dumps({"kind": cases.__name__, "case": case, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
