"""What models really take in memory: the kernel says what their weight files cost the processes that serve them.

Proportional set size (proc(5), /proc/PID/smaps) splits a page evenly among the processes that map it, so its
sum over processes counts a shared page once. Only mappings of the models' weight files are read: the rest of
a process (its libraries) is the same whatever the weights are. Linux only.
"""

import errno
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sandhi_core.checkpoints.safetensors_file import PAGE, read_header
from sandhi_core.checkpoints.survey_files import SUFFIXES
from sandhi_core.layout import MANIFEST
from sandhi_core.records import Manifest, ProcessMemory

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s*(.*)")
_FIELDS = ("Rss", "Pss", "Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty")
Identity = tuple[str, int]
"""A file: device as in /proc/PID/maps, and inode."""


class Span(NamedTuple):
    """One mapping of a process; sizes in bytes. `rss` is `shared`, pages that some other mapping has too, and
    `private`, of which `private_dirty` were written to and are copies."""

    start: int
    end: int
    device: str
    inode: int
    path: str
    rss: int
    pss: int
    shared: int
    private: int
    private_dirty: int


@dataclass(frozen=True)
class WeightFiles:
    """A model's safetensors files and their sizes in bytes. They are recognised in a process by device
    and inode, or else by path: some file systems show stat another device than they show in /proc."""

    identities: frozenset[Identity]
    paths: Mapping[str, Identity]
    sizes: Mapping[Identity, int]

    def get(self, span: Span) -> Identity | None:
        """The identity of the file that a mapping is of, None where it is of none of these."""
        identity = (span.device, span.inode)
        return identity if identity in self.identities else self.paths.get(span.path)


def weight_files(*directories: Path) -> WeightFiles:
    """Those in directories; where one lies in an export also those beside it, in which the same tensors by other names
    are read. An export is read once, however many of its directories are given."""
    paths, sizes = {}, {}
    places = dict.fromkeys(
        (directory.parent, "*/") if (directory.parent / MANIFEST).is_file() else (directory, "")
        for directory in directories
    )
    for path in (p for root, below in places for suffix in SUFFIXES.values() for p in root.glob(f"{below}*{suffix}")):
        status = path.stat()
        identity = _identity(status)
        paths[str(path.resolve())] = identity
        sizes[identity] = status.st_size
    return WeightFiles(frozenset(sizes), paths, sizes)


def _identity(status: os.stat_result) -> Identity:
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino


def shared_files(export_root: Path, manifest: Manifest) -> dict[Identity, int]:
    """The files of an export that hold a shared tensor, and its size in bytes."""
    found: dict[Identity, int] = {}
    for model in manifest.models.values():
        for tensor in model.tensors.values():
            if tensor.sharing != "private":
                found[_identity((export_root / model.directory / tensor.file).stat())] = tensor.nbytes
    return found


def weights_in(directory: Path) -> Counter[str]:
    """Bytes of the tensors in a directory's own weight files, by dtype in safetensors' spelling."""
    files = {file.resolve() for suffix in SUFFIXES.values() for file in directory.glob(f"*{suffix}")}
    found: Counter[str] = Counter()
    for place in (place for file in files for place in read_header(file).values()):
        found[place.dtype] += place.end - place.start
    return found


def mappings(pid: int) -> Iterator[Span]:
    """Every mapping of a process. Raises OSError where it is gone or not ours to look at."""
    sizes: dict[str, int] = {}
    head: tuple[int, int, str, int, str] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _HEAD.fullmatch(line):
            if head:
                yield _span(head, sizes)
            start, end, device, inode, path = match.groups()
            head = (int(start, 16), int(end, 16), device, int(inode), path)
        elif (field := line.partition(":")[0]) in _FIELDS:
            sizes[field] = int(line.split()[1]) * 1024
    if head:
        yield _span(head, sizes)


def _span(head: tuple[int, int, str, int, str], sizes: Mapping[str, int]) -> Span:
    rss, pss, *shared, clean, dirty = (sizes[field] for field in _FIELDS)
    return Span(*head, rss, pss, sum(shared), clean + dirty, dirty)


@dataclass(frozen=True)
class Holder:
    """A process's mappings by weight file, and the sizes of those files. `unmapped`: bytes of its parameters that lie
    elsewhere; `whole`: its proportional set size with everything else that it has."""

    model: str
    unmapped: int
    spans: tuple[tuple[Identity, Span], ...]
    sizes: Mapping[Identity, int]
    pid: int = 0
    whole: int = 0

    @property
    def rss(self) -> int:
        return sum(span.rss for _, span in self.spans)


def holder(model: str, files: WeightFiles, pid: int, unmapped: int) -> Holder:
    """What a process maps of weight files now. Raises OSError where it is gone: one that has ended and was
    not waited for still has its file in /proc, an empty one, and would look as if it held nothing."""
    found = list(mappings(pid))
    if not found:
        raise ProcessLookupError(errno.ESRCH, "has ended", f"/proc/{pid}/smaps")
    spans = ((files.get(span), span) for span in found)
    named = tuple((i, s) for i, s in spans if i is not None)
    return Holder(model, unmapped, named, files.sizes, pid, sum(span.pss for span in found))


def accounts(holders: Sequence[Holder]) -> tuple[ProcessMemory, ...]:
    """What each process takes, `pss` being relative to these processes alone."""
    scale = _scale(holders)
    return tuple(
        ProcessMemory(
            model=holder.model,
            rss=holder.rss,
            pss=round(sum(span.pss * scale.get(identity, 1.0) for identity, span in holder.spans)),
            shared=sum(span.shared for _, span in holder.spans),
            private=sum(span.private for _, span in holder.spans),
            private_dirty=sum(span.private_dirty for _, span in holder.spans),
            unmapped=holder.unmapped,
            whole=holder.whole,
        )
        for holder in holders
    )


def shared_bytes(holders: Sequence[Holder], tensors: Mapping[Identity, int]) -> int:
    """Bytes that these processes spare by mapping the same files: the pages of shared tensors that each has
    resident, less what their files take in all processes together (proportional set size).

    `tensors`: the files that hold one shared tensor each, with its size in bytes. Only its whole pages count as
    held by a process while header and padding count as taken, as in the comparison with checkpoints of their own.
    So this is never more than the sum over tensors of size * (processes - 1), which is what an export claims.
    """
    scale = _scale(holders)
    resident: Counter[tuple[Identity, str]] = Counter()
    taken = 0.0
    for holder in holders:
        for identity, span in holder.spans:
            if identity in tensors:
                resident[identity, holder.model] += span.rss
                taken += span.pss * scale.get(identity, 1.0)
    held = sum(min(rss, tensors[identity] // PAGE * PAGE) for (identity, _), rss in resident.items())
    return max(held - round(taken), 0)


def _scale(holders: Sequence[Holder]) -> dict[Identity, float]:
    """By what a file's proportional set sizes must be multiplied to be relative to these processes alone.

    The kernel divides by every process that maps a file, also by one that is not ours (the build itself keeps
    the originals mapped), and memory would look saved that is not. Such a file's shares are scaled up until
    they make up all of its resident pages once.
    """
    resident: Counter[tuple[Identity, str]] = Counter()
    shares: Counter[Identity] = Counter()
    most: dict[Identity, int] = {}
    for holder in holders:
        for identity, span in holder.spans:
            shares[identity] += span.pss
            resident[identity, holder.model] += span.rss
            pages = min(resident[identity, holder.model], -(-holder.sizes[identity] // PAGE) * PAGE)
            most[identity] = max(most.get(identity, 0), pages)
    return {identity: max(1.0, most[identity] / share) for identity, share in shares.items() if share}
