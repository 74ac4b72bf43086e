"""Which files and directories running processes use, as far as /proc tells. Linux only."""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath


@dataclass(frozen=True)
class InUse:
    """`mapped`: inode to the processes that map a file with it, each with the path that it was opened by; on which
    device does not count, because some file systems tell another one of a mapping than of the file. `commands`:
    process to its command line and the real paths of the files in it. `unseen`: how many processes belong to others,
    so that what they map is not known."""

    mapped: Mapping[int, Collection[tuple[int, str]]]
    commands: Mapping[int, str]
    unseen: int

    def of(self, directory: Path, inodes: Collection[int]) -> str | None:
        """How a directory with files of these inodes is in use, in words; None where it is not."""
        for inode in inodes:
            for pid, path in self.mapped.get(inode, ()):
                if not _of_another(PurePath(path), directory):
                    return f"mapped by process {pid}"
        names = {str(directory), str(directory.resolve())}
        for pid, command in self.commands.items():
            if any(name in command for name in names):
                return f"named in the command of process {pid}"
        return None


def _of_another(path: PurePath, directory: Path) -> bool:
    """Whether a file was opened in a directory beside this one: exports have files in common. A container may see
    both elsewhere, under the same last names."""
    if path.is_relative_to(directory):
        return False
    named = re.compile(rf"[0-9a-f]{{{len(directory.name)}}}")
    beside = [name for home, name in pairwise(path.parts) if home == directory.parent.name and named.fullmatch(name)]
    return bool(beside) and beside[-1] != directory.name


def look(processes: Iterable[Path] | None = None) -> InUse:
    """Look at all other processes (by default those below /proc)."""
    mapped: dict[int, set[tuple[int, str]]] = defaultdict(set)
    commands: dict[int, str] = {}
    unseen = 0
    for process in processes if processes is not None else Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        if pid == os.getpid():
            continue
        try:
            words = list(filter(None, (process / "cmdline").read_bytes().decode(errors="replace").split("\0")))
            if not words:  # threads of the kernel have none, and map nothing
                continue
            commands[pid] = " ".join([*words, *_named(words, (process / "cwd").readlink())])
            for inode, path in _files(process / "maps"):
                mapped[inode].add((pid, path))
        except PermissionError:
            unseen += 1
        except OSError:  # ended meanwhile
            continue
    return InUse(mapped, commands, unseen)


def _named(words: Iterable[str], directory: Path) -> Iterator[str]:
    """Real paths of the files that a command names, also from where it was called and as `--option=FILE`."""
    for word in words:
        with suppress(OSError, ValueError):  # what no file can be named
            yield str((directory / word.rpartition("=")[2]).resolve(strict=True))


def _files(maps: Path) -> Iterator[tuple[int, str]]:
    """Inode and path, the fifth and sixth column of proc_pid_maps(5); memory without a file has inode 0."""
    for line in maps.read_text(errors="replace").splitlines():
        inode, *path = line.split(maxsplit=5)[4:]
        if inode != "0":
            yield int(inode), path[0] if path else ""
