"""Which exports of an artifact root go and which stay: the deployed, the one in the making, those to go back to."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandhi_core.artifacts import Artifacts
from sandhi_core.disk import names
from sandhi_core.errors import ProofError
from sandhi_core.garbage.in_use import InUse
from sandhi_core.garbage.removal import GONE
from sandhi_core.layout import DEPLOYMENT, read_manifest
from sandhi_core.records import Manifest

_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Export:
    """A directory below `exports/POOL`: the manifest that it was recognised by, and all its files. One that an earlier
    removal hid has no manifest that counts. `why`: why it stays; empty where it goes."""

    path: Path
    files: tuple[Path, ...]
    manifest: Manifest | None
    why: str


def exports_of(artifacts: Artifacts, pool: str, *, keep: int, gone: bool, in_use: InUse) -> list[Export]:
    """Everything below `exports/POOL`. `keep`: how many of those that were deployed before stay, the newest first;
    `gone`: the pool is no more, and only what is in use stays. Raises StoreError for a record that cannot be read."""
    home = artifacts.root / "exports" / pool
    found = list(_found(home, pool))
    wanted = {} if gone else _wanted(artifacts, pool, [e.path for e in found if not e.why], keep)
    return [_judged(export, wanted, in_use) for export in found]


def _judged(export: Export, wanted: dict[str, str], in_use: InUse) -> Export:
    why = export.why or wanted.get(export.path.name)
    why = why or in_use.of(export.path, {file.lstat().st_ino for file in export.files}) or ""
    return Export(export.path, export.files, export.manifest, why)


def _found(home: Path, pool: str) -> Iterator[Export]:
    if home.is_symlink() or not home.is_dir():
        return
    for path in sorted(home.iterdir()):
        if path.name.startswith(GONE) and path.is_dir() and not path.is_symlink():
            yield Export(path, _files_of(path), None, "")
        elif not path.name.startswith("."):  # else a leftover of an export that was killed: the next one's
            yield _recognised(path, pool)


def _recognised(path: Path, pool: str) -> Export:
    """Only what Sandhi wrote, to the last name in it, is ever removed."""
    if path.is_symlink() or not path.is_dir() or not _ID.fullmatch(path.name):
        return Export(path, (), None, "left alone: no export")
    files = _files_of(path)
    try:
        manifest = read_manifest(path)
    except ProofError as error:
        return Export(path, files, None, f"left alone: its manifest {error.problem.message}")
    if manifest.digest[:16] != path.name or manifest.pool != pool:
        return Export(path, files, manifest, "left alone: its manifest is another export's")
    known = names(manifest)
    for file in files:
        if (name := file.relative_to(path).as_posix()) not in known:
            return Export(path, files, manifest, f"left alone: {name} is no part of it")
    return Export(path, files, manifest, "")


def _files_of(path: Path) -> tuple[Path, ...]:
    """All files and links below a directory, sorted. Raises OSError where one below it cannot be listed."""
    found = []
    for directory, folders, files in os.walk(path, onerror=_raised):
        here = Path(directory)
        found += [here / name for name in files] + [here / name for name in folders if (here / name).is_symlink()]
    return tuple(sorted(found))


def _raised(error: OSError) -> None:
    raise error


def _wanted(artifacts: Artifacts, pool: str, paths: list[Path], keep: int) -> dict[str, str]:
    """By name of an export why the pool wants it. Where the newest has no proof yet, or failed it, the last good
    deployment is still the one that is served."""
    merged, deployed = (artifacts.known((stage, pool)) for stage in ("merged_weights", "deployment"))
    wanted = {}
    if merged is not None:
        wanted[Path(merged.record["export"]).name] = "the pool's newest"
    if deployed is not None:
        wanted[Path(deployed.record["export"]).name] = "deployed"
    times = {p.name: (p / DEPLOYMENT).stat().st_mtime_ns for p in paths if (p / DEPLOYMENT).is_file()}
    earlier = sorted(times.keys() - wanted.keys(), key=lambda name: (times[name], name), reverse=True)
    return wanted | dict.fromkeys(earlier[:keep], "to go back to")
