"""Things that go, in an order in which a stop at any moment leaves nothing that is half there and looks whole."""

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandhi_core.errors import StoreError
from sandhi_core.files import fsync_directory
from sandhi_core.layout import DEPLOYMENT

Kind = Literal["export", "record", "report", "spectrum", "inputs", "recipe", "tensor"]
GONE = ".gone-"
"""Before the name of an export that is being removed: a name that nobody looks for."""


@dataclass(frozen=True)
class Removal:
    """One thing that goes. `path` is its file or directory, `files` are all files that go with it."""

    kind: Kind
    path: Path
    files: tuple[Path, ...]


def freed(removals: Iterable[Removal]) -> list[int]:
    """By removal, the bytes on the disk that come free when all go in this order: a file is counted with the last of
    its names, and not at all where a name is left."""
    gone: Counter[tuple[int, int]] = Counter()
    sizes = []
    for removal in removals:
        size = 0
        for file in removal.files:
            status = file.lstat()
            gone[status.st_dev, status.st_ino] += 1
            if gone[status.st_dev, status.st_ino] == status.st_nlink:
                size += 512 * status.st_blocks
        sizes.append(size)
    return sizes


def remove(root: Path, removals: Sequence[Removal]) -> None:
    """Remove them, in this order, below the artifact root `root`. What is gone already is passed over.

    Raises StoreError for the first that cannot be removed; what came before it is gone.
    """
    for removal in removals:
        try:
            (_export if removal.kind == "export" else _files)(root, removal)
        except OSError as error:
            raise StoreError(
                f"cannot be removed: {error.strerror or error}",
                file=str(error.filename or removal.path),
                remedy="run as the user that the artifact root belongs to, then again: it goes on where it stopped",
            ) from error


def _export(root: Path, removal: Removal) -> None:
    """Undeployed, then hidden, then removed: nobody finds a part of it under its name."""
    path = removal.path
    if not path.name.startswith(GONE):
        _open(path)
        (path / DEPLOYMENT).unlink(missing_ok=True)
        fsync_directory(path)
        aside = path.with_name(GONE + path.name)
        if aside.exists():
            _tree(aside)
        path = path.rename(aside)
        fsync_directory(path.parent)
    _tree(path)
    _prune(path.parent, root)


def _tree(path: Path) -> None:
    for directory, _, _ in os.walk(path):
        _open(Path(directory))
    shutil.rmtree(path)


def _files(root: Path, removal: Removal) -> None:
    folders = {file.parent: None for file in removal.files}
    for file in removal.files:
        _open(file.parent)
        file.unlink(missing_ok=True)
    for folder in sorted(folders or {removal.path: None}, reverse=True):
        _prune(folder, root)


def _open(directory: Path) -> None:
    """Names can only leave a directory that its owner may write."""
    mode = directory.stat().st_mode
    if mode & 0o300 != 0o300:
        directory.chmod(mode & 0o7777 | 0o700)


def _prune(folder: Path, root: Path) -> None:
    """Remove folders that are empty now; the top ones stay."""
    for empty in _below(folder, root):
        with suppress(OSError):  # not empty
            empty.rmdir()


def _below(folder: Path, root: Path) -> Iterator[Path]:
    while folder.parent not in (root, folder):
        yield folder
        folder = folder.parent
