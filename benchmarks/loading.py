"""What it takes to start the next model of a pool, against loading its whole checkpoint.

    python -m benchmarks.loading POOL.yaml [--export EXPORT] [--rounds 5] [--out benchmarks/loading-POOL]

The claim is MFS's (SANDHI, SOSP 2026): what serving processes have mapped already is not read again. Every load is one
of a fresh process that has imported everything; others hold the models before it, of the same kind. Counted are the
bytes that the kernel read from the disk for that process (read_bytes of /proc/self/io, proc(5)) and seconds: until the
model is made, and until every byte of its parameters has been read as well, which is what the first answer takes.

Cold: all weight files are dropped from the page cache first (posix_fadvise) as far as no process has them mapped, and
mincore(2) says whether they were. Warm: all of them are in it. Without --export the pool's models are exported to a
temporary folder with the mean of all that have one shape in place of every MLP matrix: nobody scored that, it only
loads as an export of a search that shared so much does.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.rows import seconds, table
from benchmarks.scoring import CACHE
from benchmarks.ways import say
from sandhi_core.assignment import Assignment
from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.export import export_pool
from sandhi_core.layout import read_manifest
from sandhi_core.memory import weight_files
from sandhi_core.pools.pool import Pool, load_pool
from sandhi_core.records import Manifest
from sandhi_core.serving.load import load
from sandhi_core.store import Store

_MIB = 1 << 20


@dataclass(frozen=True)
class Loaded:
    """One load: bytes read from the disk, seconds until the model is made and until all of it was read."""

    read: int
    made: float
    ready: float


@dataclass(frozen=True)
class Line:
    """A model of the pool, medians over the rounds. `saved`: bytes of its tensors that a model before it holds too.
    `evicted`: whether in every cold round what is not mapped was out of the page cache before."""

    model: str
    cache: str
    checkpoint: int
    saved: int
    ours: Loaded
    theirs: Loaded
    evicted: bool

    @property
    def not_read(self) -> int:
        return self.theirs.read - self.ours.read

    @property
    def holds(self) -> bool:
        """Whether at least the bytes saved are bytes not read; of a warm cache nothing is."""
        return self.not_read >= self.saved if self.cache == "cold" else True


# --- a process that loads -----------------------------------------------------------------------------------


def worker(warm_up: Path, directory: Path) -> None:
    """Gets ready on another model, then at a line of standard input loads this one and says what that took; stays
    until standard input ends."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    _touch(load(warm_up))
    print("waiting", flush=True)
    sys.stdin.readline()
    before, begun = _read_bytes(), time.perf_counter()
    model = load(directory)
    made = time.perf_counter() - begun
    _touch(model)
    print(json.dumps(asdict(Loaded(_read_bytes() - before, made, time.perf_counter() - begun))), flush=True)
    sys.stdin.read()


def _touch(model: torch.nn.Module) -> None:
    """Read a byte of every page."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().reshape(-1).view(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE") // 2].sum()


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


@contextmanager
def _process(warm_up: Path, directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """One that waits for its line; ended when the block is."""
    command = [sys.executable, "-m", "benchmarks.loading", "--worker", str(warm_up), str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "waiting\n":
                raise RuntimeError(f"the process that loads {directory} ended early")
            yield process
        finally:
            process.kill()


def _go(process: "subprocess.Popen[str]") -> Loaded:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return Loaded(**json.loads(process.stdout.readline()))


# --- the page cache -----------------------------------------------------------------------------------------


def _resident(path: Path) -> int:
    """Bytes of a file that are in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    page, size = os.sysconf("SC_PAGE_SIZE"), path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // page))()
    with path.open("rb") as f:
        address = libc.mmap(None, size, 1, 1, f.fileno(), 0)  # PROT_READ, MAP_SHARED
    try:
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return page * sum(value & 1 for value in found)


def _evict(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fill(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as f:
            while f.read(16 * _MIB):
                pass


def _files(directory: Path) -> list[Path]:
    """The weight files of a model, and of an export all models'."""
    return sorted(Path(path) for path in weight_files(directory).paths)


# --- measurements -------------------------------------------------------------------------------------------


def measured(warm_up: Path, directory: Path, held: frozenset[Path], cold: bool) -> tuple[Loaded, bool]:
    """One load, and whether the page cache was as it should be. `held`: files of this model that others have mapped."""
    files = _files(directory)
    with _process(warm_up, directory) as process:
        if cold:
            _evict(files)
            sound = not any(_resident(path) for path in files if path.parent == directory and path not in held)
        else:
            _fill(files)
            sound = all(_resident(path) >= path.stat().st_size for path in files)
        return _go(process), sound


@contextmanager
def _held(warm_up: Path, directories: Sequence[Path]) -> Iterator[None]:
    if not directories:
        yield
        return
    with _process(warm_up, directories[0]) as process, _held(warm_up, directories[1:]):
        _go(process)
        yield


def lines(warm_up: Path, export: Path, originals: Mapping[str, Path], rounds: int) -> list[Line]:
    """The second and later models by name, while processes hold those before, of the export and of the originals."""
    manifest, names, found = read_manifest(export), sorted(originals), []
    for number, model in enumerate(names[1:], 1):
        before = names[:number]
        saved, held = _saved(manifest, before, model), _mapped(manifest, export, before, model)
        checkpoint = sum(path.stat().st_size for path in _files(originals[model]))
        with _held(warm_up, [directory for n in before for directory in (export / n, originals[n])]):
            for cache in ("cold", "warm"):
                ours, theirs, sound = [], [], True
                for at in range(rounds):  # the two ways in turn
                    one, well = measured(warm_up, export / model, held, cache == "cold")
                    other, too = measured(warm_up, originals[model], frozenset(), cache == "cold")
                    ours.append(one)
                    theirs.append(other)
                    sound &= well and too
                    say(
                        f"{model}, {cache}: round {at + 1} of {rounds}: {one.read / _MIB:.1f} and "
                        f"{other.read / _MIB:.1f} MiB in {one.ready:.2f} and {other.ready:.2f} s"
                    )
                found.append(Line(model, cache, checkpoint, saved, _median(ours), _median(theirs), sound))
    return found


def _median(loads: Sequence[Loaded]) -> Loaded:
    middle = {field: statistics.median(getattr(load, field) for load in loads) for field in ("read", "made", "ready")}
    return Loaded(round(middle["read"]), middle["made"], middle["ready"])


def _shared(manifest: Manifest, before: Sequence[str], model: str) -> list[str]:
    """The tensors of a model that one before it holds in the same file."""
    theirs = {(n, t.digest) for b in before for n, t in manifest.models[b].tensors.items() if t.sharing != "private"}
    return [n for n, t in manifest.models[model].tensors.items() if (n, t.digest) in theirs and t.sharing != "private"]


def _saved(manifest: Manifest, before: Sequence[str], model: str) -> int:
    return sum(manifest.models[model].tensors[name].nbytes for name in _shared(manifest, before, model))


def _mapped(manifest: Manifest, export: Path, before: Sequence[str], model: str) -> frozenset[Path]:
    tensors = manifest.models[model].tensors
    return frozenset(export / model / tensors[name].file for name in _shared(manifest, before, model))


# --- what is measured ---------------------------------------------------------------------------------------


def synthetic(pool: Pool, folder: Path) -> Path:
    """An export of the pool's models that holds the mean of all in place of every matrix of an MLP."""
    checkpoints = {entry.name: Checkpoint.open(resolve(entry), entry.name) for entry in pool.models}
    prints = {name: fingerprint(checkpoint, folder / "scans") for name, checkpoint in checkpoints.items()}
    store = Store(folder / "store")
    first = next(iter(checkpoints.values()))
    shared = {}
    for name in first.names:
        if ".mlp." in name and len({(c.header(name).dtype, c.header(name).shape) for c in checkpoints.values()}) == 1:
            tensors = [checkpoint.tensor(name) for checkpoint in checkpoints.values()]
            mean = torch.stack([tensor.float() for tensor in tensors]).mean(0).to(tensors[0].dtype)
            shared[name] = store.put(name, mean)
    merged = export_pool(
        pool,
        "synthetic",
        checkpoints,
        prints,
        dict.fromkeys(checkpoints, Assignment(shared)),
        dict.fromkeys(checkpoints, "never scored"),
        store,
        folder / "exports",
    )
    return folder / merged.export


def printed(name: str, found: Sequence[Line], made: str, rounds: int) -> str:
    head = (
        "model, cache",
        "MiB",
        "saved",
        "read",
        "whole",
        "not read",
        "holds",
        "made, s",
        "whole",
        "ready, s",
        "whole",
        "ratio",
    )
    rows = [
        (
            f"{line.model}, {line.cache}",
            *(
                f"{n / _MIB:.1f}"
                for n in (line.checkpoint, line.saved, line.ours.read, line.theirs.read, line.not_read)
            ),
            "-" if line.cache == "warm" else "yes" if line.holds else "NO",
            *(seconds(s) for s in (line.ours.made, line.theirs.made, line.ours.ready, line.theirs.ready)),
            f"{line.theirs.ready / line.ours.ready:.2f}x",
        )
        for line in found
    ]
    sound = all(line.evicted for line in found)
    holds = all(line.holds for line in found)
    return "\n".join(
        [
            f"Pool {name}: its second and later models while those before are held; medians of {rounds} rounds",
            f"of {made}",
            "",
            table(head, rows),
            "",
            "read, made, ready: from the export; whole: from the model's own checkpoint. Bytes in MiB: of the",
            "checkpoint; saved: of its tensors that a process has mapped already; read and not read: from the disk.",
            f"At least the bytes saved are bytes not read: {'yes' if holds else 'NO'}.",
            f"The page cache was as it should be before every load (mincore): {'yes' if sound else 'NO'}.",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--worker"]:
        worker(Path(arguments[1]), Path(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("pool", type=Path, help="a pool file: its checkpoints are what is compared with")
    parser.add_argument("--export", type=Path, help="an export of that pool; else one is made and removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="without suffix; by default benchmarks/loading-POOL")
    given = parser.parse_args(arguments)
    pool = load_pool(given.pool)
    originals = {entry.name: resolve(entry) for entry in pool.models}
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:  # on a disk, which a temporary folder need not be
        folder = Path(name)
        export = given.export.resolve() if given.export else synthetic(pool, folder)
        made = "an export of a build" if given.export else "a synthetic export, the mean of all in every MLP"
        size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
        LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **size)).save_pretrained(folder / "warm")
        found = lines(folder / "warm", export, originals, given.rounds)
    text = printed(pool.name, found, made, given.rounds)
    out = given.out or Path(__file__).parent / f"loading-{pool.name}"
    out.with_suffix(".txt").write_text(text + "\n")
    plain = {"pool": pool.name, "export": made, "rounds": given.rounds, "lines": [asdict(line) for line in found]}
    out.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n")
    print(text)
    return 0 if all(line.holds and line.evicted for line in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
