"""What models really take in memory: real processes hold them, the kernel says what their weight files cost.

Proportional set size (proc(5), /proc/PID/smaps) splits a page evenly among the processes that map it, so its
sum over processes counts a shared page once. Only mappings of the models' weight files are read: the rest of
a process (its libraries) is the same whatever the weights are. Linux only.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from sandhi_core.errors import ProofError
from sandhi_core.layout import MANIFEST
from sandhi_core.records import MemoryComparison, ProcessMemory
from sandhi_core.survey_files import SUFFIXES

ENGINE = "transformers (sandhi_core.serving.load), one process a model, CPU"
PAGE = os.sysconf("SC_PAGE_SIZE")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s*(.*)")
_FIELDS = ("Rss", "Pss", "Private_Dirty")
Identity = tuple[str, int]
"""A file: device as in /proc/PID/maps, and inode."""
_GRACE = 10.0  # seconds that processes get to end by themselves


class Span(NamedTuple):
    """One mapping of a process; sizes in bytes."""

    start: int
    end: int
    device: str
    inode: int
    path: str
    rss: int
    pss: int
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


def weight_files(directory: Path) -> WeightFiles:
    """Those in a directory; where it lies in an export also those beside it, in which the same tensors by other names
    are read."""
    paths, sizes = {}, {}
    root, below = (directory.parent, "*/") if (directory.parent / MANIFEST).is_file() else (directory, "")
    for path in (path for suffix in SUFFIXES.values() for path in root.glob(f"{below}*{suffix}")):
        status = path.stat()
        identity = (f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino)
        paths[str(path.resolve())] = identity
        sizes[identity] = status.st_size
    return WeightFiles(frozenset(sizes), paths, sizes)


def mappings(pid: int) -> Iterator[Span]:
    """Every mapping of a process. Raises OSError where it is gone or not ours to look at."""
    sizes: dict[str, int] = {}
    head: tuple[int, int, str, int, str] | None = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := _HEAD.fullmatch(line):
            if head:
                yield Span(*head, *(sizes[field] for field in _FIELDS))
            start, end, device, inode, path = match.groups()
            head = (int(start, 16), int(end, 16), device, int(inode), path)
        elif (field := line.partition(":")[0]) in _FIELDS:
            sizes[field] = int(line.split()[1]) * 1024
    if head:
        yield Span(*head, *(sizes[field] for field in _FIELDS))


@dataclass(frozen=True)
class Holder:
    """A process's mappings by weight file, and the sizes of those files."""

    model: str
    unmapped: int
    spans: tuple[tuple[Identity, Span], ...]
    sizes: Mapping[Identity, int]


def accounts(holders: Sequence[Holder]) -> tuple[ProcessMemory, ...]:
    """What each process takes, `pss` being relative to these processes alone."""
    scale = _scale(holders)
    return tuple(
        ProcessMemory(
            model=holder.model,
            rss=sum(span.rss for _, span in holder.spans),
            pss=round(sum(span.pss * scale.get(identity, 1.0) for identity, span in holder.spans)),
            private_dirty=sum(span.private_dirty for _, span in holder.spans),
            unmapped=holder.unmapped,
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


def hold(directories: Mapping[str, Path], timeout: float = 600.0) -> tuple[Holder, ...]:
    """Hold every model's directory in a process of its own, all at once, and read what they map.

    Raises ProofError where a directory cannot be loaded or not all are within `timeout` seconds.
    """
    with _held(directories, timeout) as ready:
        return tuple(
            _holder(model, directory, ready[model]["pid"], ready[model]["unmapped"])
            for model, directory in directories.items()
        )


def measure(directories: Mapping[str, Path], timeout: float = 600.0) -> tuple[ProcessMemory, ...]:
    """What the weights of models held at once take, by process. Raises as hold does."""
    return accounts(hold(directories, timeout))


def _holder(model: str, directory: Path, pid: int, unmapped: int) -> Holder:
    files = weight_files(directory)
    spans = ((files.get(span), span) for span in mappings(pid))
    return Holder(model, unmapped, tuple((i, s) for i, s in spans if i is not None), files.sizes)


def compare(originals: Mapping[str, Path], exports: Mapping[str, Path]) -> MemoryComparison:
    """The same models held from their original directories, then from the exports. Raises as measure does."""
    before, after = measure(originals), measure(exports)
    saved = sum(p.pss + p.unmapped for p in before) - sum(p.pss + p.unmapped for p in after)
    return MemoryComparison(engine=ENGINE, originals=before, exports=after, saved=saved)


@contextmanager
def _held(directories: Mapping[str, Path], timeout: float) -> Iterator[dict[str, dict[str, Any]]]:
    """Processes that hold the models, until the block ends, whichever way it ends."""
    package = Path(__file__).resolve().parent.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", "")))),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    pairs = [word for model, directory in directories.items() for word in (model, str(directory))]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-m", "sandhi_core.serving.hold", *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            start_new_session=True,  # so that all of them can be ended together, and Ctrl-C reaches only us
        )
        grace = 0.0
        try:
            yield _wait_ready(process, set(directories), complaints, timeout)
            grace = _GRACE
        finally:
            _end(process, grace)


def _wait_ready(
    process: "subprocess.Popen[bytes]", models: set[str], complaints: IO[bytes], timeout: float
) -> dict[str, dict[str, Any]]:
    assert process.stdout is not None
    output, text, ready = process.stdout.fileno(), b"", dict[str, dict[str, Any]]()
    deadline = time.monotonic() + timeout
    while ready.keys() != models:
        if not select.select([output], [], [], max(0.0, deadline - time.monotonic()))[0]:
            missing = ", ".join(sorted(models - ready.keys()))
            raise ProofError(
                f"not loaded within {timeout:.0f} seconds: {missing}",
                remedy="free memory or processors, then run the proof again",
            )
        part = os.read(output, 65536)
        if not part:
            complaints.seek(0)
            last = complaints.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ProofError(
                f"the processes that hold the models ended early: {''.join(last) or 'no message'}",
                remedy="free memory, then run the proof again",
            )
        *lines, text = (text + part).split(b"\n")
        for message in map(json.loads, lines):
            if "error" in message:
                raise ProofError(
                    message["error"],
                    model=message["model"],
                    remedy="check the directory with `sandhi check` or `sandhi verify`",
                )
            ready[message["model"]] = message
    return ready


def _end(process: "subprocess.Popen[bytes]", grace: float) -> None:
    """Ask by closing standard input; after `grace` seconds end the session that they are, by its id."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(grace)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        process.stdout.close()
