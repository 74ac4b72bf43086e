"""One streaming pass over a checkpoint: digest, statistics and finiteness of every tensor.

Tensors are read in blocks of rows, each hashed and summed up while it is in the processor's cache, one tensor a
thread: memory does not grow with the checkpoint, and nothing depends on how many threads there are. What a weight file
gave is kept in the scans directory, under the file's path, size, time and inode:

    scans/files/KEY.json           digests and statistics of one weight file's tensors; a second line seals them
    scans/rows/SHA256.safetensors  `TENSOR.mean` and `TENSOR.std`, float32, one value a row, of 2-D tensors
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from sandhi_core.checkpoints.architecture import layer_count, slots
from sandhi_core.checkpoints.checkpoint import Checkpoint, digest_prefix, refuse
from sandhi_core.checkpoints.safetensors_file import (
    DTYPES,
    Entry,
    FormatError,
    fill,
    map_file,
    raw_bytes,
    tensor_over,
)
from sandhi_core.checkpoints.survey_files import FileIdentity, HeaderEntry
from sandhi_core.errors import Problem, StoreError
from sandhi_core.files import aside, fsync_directory, write_atomic, writing
from sandhi_core.moments import RowStatistics, rounded, row_moments, row_statistics_of, rows_at_once
from sandhi_core.records import Fingerprint, Record, TensorInfo, digest_of
from sandhi_core.threads import each_on_a_thread

__all__ = ["RowStatistics", "examine", "fingerprint", "row_statistics", "row_statistics_of"]

VERSION = 1  # of what is kept; with another number every file is read again


class FileScan(Record):
    """What a pass over one weight file gave. `rows` is the sha256 of the file with its row statistics."""

    tensors: tuple[TensorInfo, ...]
    rows: str


class _Scanned(NamedTuple):
    info: TensorInfo
    rows: RowStatistics | None  # of 2-D tensors
    bad_row: int | None  # the first that is not finite


def fingerprint(checkpoint: Checkpoint, scans: Path) -> Fingerprint:
    """Read every byte of a checkpoint once, unless `scans` has it from an earlier pass.

    Raises CheckpointError for the first tensor that is not finite, for tensors that do not make up the
    architecture, and where a file changes meanwhile; StoreError where `scans` cannot be written.
    """
    record, problems = examine(checkpoint, scans)
    if record is None:
        raise refuse(problems[0])
    return record


def examine(
    checkpoint: Checkpoint, scans: Path, told: Callable[[int], None] | None = None
) -> tuple[Fingerprint | None, list[Problem]]:
    """`fingerprint`, but with a problem for every tensor that is not finite. `told`: called after every tensor that is
    read, with its bytes."""
    found: list[FileScan] = []
    problems: list[Problem] = []
    for file in checkpoint.weights:
        scan = _file(checkpoint, file, scans, told)
        if isinstance(scan, FileScan):
            found.append(scan)
        else:
            problems += scan
    if problems:
        return None, problems
    tensors = sorted((t for scan in found for t in scan.tensors), key=lambda t: t.name)
    return described(checkpoint, tensors, found[0].rows if len(found) == 1 else _together(scans, found)), []


def described(checkpoint: Checkpoint, tensors: Sequence[TensorInfo], rows: str) -> Fingerprint:
    """The fingerprint of a checkpoint that holds `tensors` (by name), whose row statistics lie in `rows`.

    Raises CheckpointError for tensors that do not make up the architecture, and where a file cannot be read any more.
    """
    digests = {t.name: t.digest for t in tensors}
    shareable, private = slots(checkpoint.model, checkpoint.config, checkpoint.headers, digests)
    nbytes: Counter[str] = Counter()
    for tensor in tensors:
        nbytes[tensor.dtype] += tensor.nbytes
    return Fingerprint(
        model=checkpoint.model,
        model_type=checkpoint.config["model_type"],
        layers=layer_count(checkpoint.model, checkpoint.config),
        dtype=max(sorted(nbytes), key=nbytes.__getitem__),
        files={file: _beside(checkpoint, file) for file in checkpoint.beside()},
        tensors=tuple(tensors),
        slots=shareable,
        private=private,
        rows=rows,
    )


def row_statistics(scans: Path, record: Fingerprint, tensor: str) -> RowStatistics:
    """Row statistics of a 2-D tensor of a fingerprint, as its pass found them.

    Raises StoreError where `scans` no longer holds them.
    """
    path = _rows_path(scans, record.rows)
    try:
        kept = _read_rows(path, FileIdentity.of(path.stat()))
    except (OSError, FormatError) as error:
        raise StoreError(
            f"the row statistics cannot be read: {error}",
            model=record.model,
            file=str(path),
            remedy="remove this model's record below records/checkpoint, so that its weights are read again",
        ) from None
    parts = (kept[f"{tensor}.{part}"] for part in ("mean", "std"))
    return RowStatistics(*(tensor_over(p.dtype, p.shape, p.raw) for p in parts))


# --- one file -----------------------------------------------------------------------------------------------


def _file(
    checkpoint: Checkpoint, file: str, scans: Path, told: Callable[[int], None] | None
) -> FileScan | list[Problem]:
    path = (checkpoint.directory / file).resolve()
    key = digest_of([VERSION, file, str(path), *checkpoint.weights[file]])
    kept = scans / "files" / f"{key}.json"
    if (earlier := _kept(kept, scans)) is not None:
        return earlier
    entries = [entry for entry in checkpoint.headers.values() if entry.file == file]
    scanned = []
    for done in each_on_a_thread(partial(_read, checkpoint), entries):
        scanned.append(done)
        if told is not None:
            told(done.info.nbytes)
    checkpoint.require_unchanged(file)
    if problems := [_not_finite(checkpoint.model, s) for s in scanned if s.bad_row is not None]:
        return problems
    rows = _keep_rows(scans, [e for s in scanned if s.rows for e in _entries(s.info.name, s.rows)])
    scan = FileScan(tensors=tuple(s.info for s in scanned), rows=rows)
    with _writing(kept.parent):
        write_atomic(kept, scan.canonical() + b"\n" + _seal(kept, scan))
    return scan


def _read(checkpoint: Checkpoint, entry: HeaderEntry) -> _Scanned:
    width = entry.shape[-1] if entry.shape else 1
    return _scan(entry, checkpoint.blocks(entry.name, rows_at_once(width) * width * DTYPES[entry.dtype].itemsize))


def _scan(entry: HeaderEntry, blocks: Iterable[memoryview]) -> _Scanned:
    """`blocks` of whole rows, one after another."""
    *outer, width = entry.shape or (1,)
    height, stride = prod(outer), width * DTYPES[entry.dtype].itemsize
    digest = hashlib.sha256(digest_prefix(entry.dtype, entry.shape))
    mean, squares = np.zeros(height), np.zeros(height)
    start = 0
    for block in blocks:
        digest.update(block)
        stop = start + block.nbytes // stride
        mean[start:stop], squares[start:stop] = row_moments(tensor_over(entry.dtype, (stop - start, width), block))
        start = stop
    bad = np.flatnonzero(~np.isfinite(mean))
    if bad.size:
        mean, squares = np.zeros(height), np.zeros(height)  # reported, not recorded
    overall = float(mean.mean()) if entry.nbytes else 0.0
    between = width * np.square(mean - overall).sum()
    is_matrix = len(entry.shape) == 2
    info = TensorInfo(
        name=entry.name,
        file=entry.file,
        dtype=entry.dtype,
        shape=entry.shape,
        nbytes=entry.nbytes,
        digest=digest.hexdigest(),
        mean=overall,
        std=float(np.sqrt((squares.sum() + between) / max(1, height * width))),
        constant_rows=int(np.count_nonzero(squares == 0)) if is_matrix else 0,
    )
    rows = rounded(mean, squares, width) if is_matrix else None
    return _Scanned(info, rows, int(bad[0]) if bad.size else None)


def _beside(checkpoint: Checkpoint, file: str) -> str:
    with checkpoint.reading(file):
        return _sha256(checkpoint.directory / file)


def _not_finite(model: str, scanned: _Scanned) -> Problem:
    return Problem(
        code="not-finite",
        severity="error",
        model=model,
        file=scanned.info.file,
        tensor=scanned.info.name,
        message=f"holds NaN or infinity, first in row {scanned.bad_row}",
        remedy="take the model from before this happened; training or converting it went wrong",
    )


# --- what is kept -------------------------------------------------------------------------------------------


def _kept(path: Path, scans: Path) -> FileScan | None:
    """An earlier pass over the same file; None where it, or the row statistics it names, is damaged or gone."""
    try:
        text, _, seal = path.read_bytes().partition(b"\n")
        scan = FileScan.parse(text)
        if seal != _seal(path, scan):
            return None
        rows = _rows_path(scans, scan.rows)
        _read_rows(rows, FileIdentity.of(rows.stat()))
    except (OSError, FormatError, ValidationError):
        return None
    return scan


def _seal(path: Path, scan: FileScan) -> bytes:
    """What is kept with a scan: of a damaged or another file's it is another."""
    return digest_of([path.stem, scan.digest]).encode()


def _rows_path(scans: Path, sha256: str) -> Path:
    return scans / "rows" / f"{sha256}.safetensors"


# Kinship goes through all models of a pool once for every layer: fewer than there are would be checked again each time.
@lru_cache(maxsize=1024)
def _read_rows(path: Path, identity: FileIdentity) -> dict[str, Entry]:
    """A file of row statistics, checked against its name once a process (unless it changes)."""
    if _sha256(path) != path.stem:
        raise FormatError("its contents are not those it was named after")
    return map_file(path)


def _keep_rows(scans: Path, entries: Iterable[Entry]) -> str:
    """Write a file of row statistics under the sha256 of its bytes, which is returned."""
    folder = _rows_path(scans, "").parent
    with _writing(folder):
        with aside(folder) as (written, f):
            fill(f, entries)
            sha256 = _sha256(written)
            written.chmod(0o444)
            written.replace(_rows_path(scans, sha256))
        fsync_directory(folder)
    return sha256


def _together(scans: Path, found: list[FileScan]) -> str:
    """The row statistics of several weight files as one file."""
    paths = (_rows_path(scans, scan.rows) for scan in found)
    return _keep_rows(scans, [entry for path in paths for entry in map_file(path).values()])


def _entries(name: str, rows: RowStatistics) -> Iterator[Entry]:
    for part, values in rows._asdict().items():
        yield Entry(f"{name}.{part}", "F32", tuple(values.shape), raw_bytes(values))


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield
