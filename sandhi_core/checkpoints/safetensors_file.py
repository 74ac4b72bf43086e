"""The safetensors format, read and written by streaming, for files that are mapped rather than loaded.

The layout is that of the safetensors README ("Format"): eight bytes little-endian length N, N bytes of JSON
header padded with spaces, then the tensors' bytes without holes. What is written is what
`safetensors.torch.save_file` writes, save for a wider alignment where one is asked for (docs/format.md).
"""

import ctypes
import errno
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sandhi_core.files import LIBC, aside, begin_flush, flush, fsync_directory, open_regular

# safetensors' own order, widest first: files written in it have every tensor aligned to its elements.
DTYPES: dict[str, torch.dtype] = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_ORDER = {dtype: i for i, dtype in enumerate(DTYPES)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_MOST_DIMENSIONS = 64  # numpy's limit; torch takes as many
_CHUNK = 1 << 20  # bytes handed to one write: still near the processor when they have just been hashed
PAGE = mmap.PAGESIZE
"""Bytes of which the kernel maps a file in wholes."""
_POPULATE_READ = 22  # MADV_POPULATE_READ, madvise(2)
_UNREADABLE = (errno.EFAULT, errno.EIO, 133)  # and EHWPOISON: what it answers of a page that a touch would die of
_AHEAD = 8 << 20  # bytes
ALIGNMENT = 8  # of the first tensor's byte in a file, as safetensors itself does


class FormatError(ValueError):
    """A file is not what safetensors' format allows. The message is a reason; callers add file and remedy."""


class UnreadError(FormatError):
    """Mapped bytes cannot be read: their file was cut short, or its disk fails. `tensor`: whose they are, if known."""

    def __init__(self, tensor: str = "") -> None:
        super().__init__(f"cannot be read: {os.strerror(errno.EIO)}")
        self.tensor = tensor


class Entry(NamedTuple):
    """One tensor of a file: `raw` is its bytes, a read-only view of the mapping."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: memoryview


class Place(NamedTuple):
    """Where a tensor lies in its file: bytes from `start` up to `end`, counted from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' spelling of a torch dtype."""
    return _NAMES[dtype]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order; no copy where it is contiguous already."""
    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data.toreadonly()


def tensor_digest(dtype: str, shape: Sequence[int], raw: bytes | bytearray | memoryview) -> str:
    """sha256, hex, over dtype (safetensors' spelling), shape and bytes: `BF16:128,64`, a newline, the data in
    row-major order (docs/format.md, "Digest"). Raises UnreadError where `raw` is mapped and cannot be read."""
    digest = hashlib.sha256(digest_prefix(dtype, shape))
    for chunk in _chunks(memoryview(raw)):
        present(chunk)
        digest.update(chunk)
    return digest.hexdigest()


def digest_prefix(dtype: str, shape: Sequence[int]) -> bytes:
    """What a tensor's digest covers before its bytes."""
    return f"{dtype}:{','.join(map(str, shape))}\n".encode()


def release(raw: memoryview) -> None:
    """Of a view of a mapping, give the pages back: this process no longer counts as holding them, and reads them again
    (from the page cache, as a rule) where they are touched once more. Whatever is no mapping stays as it is."""
    _advise(raw, mmap.MADV_DONTNEED)


def present(raw: memoryview) -> None:
    """Of a view of a mapping, bring all pages into memory. Raises UnreadError where one cannot be read, which would end
    the process (SIGBUS) at a touch, and MemoryError where there is no room. Whatever is no mapping stays as it is."""
    try:
        _advise(raw, _POPULATE_READ)
    except OSError as error:
        if error.errno in _UNREADABLE:
            raise UnreadError from None
        if error.errno == errno.ENOMEM:
            raise MemoryError from None
        if error.errno != errno.EINVAL:  # of a kernel before 5.14, where nothing can be told beforehand
            raise


def _advise(raw: memoryview, advice: int) -> None:
    """madvise(2), while other threads run, which they do not during that of Python's mmap: reading takes its time."""
    if not isinstance(raw.obj, mmap.mmap) or not raw.nbytes:
        return
    at = _address(raw)
    start = at - at % PAGE
    if LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(at + raw.nbytes - start), advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _address(raw: memoryview) -> int:
    return int(np.frombuffer(raw, np.uint8).ctypes.data)


def tensor_over(dtype: str, shape: Sequence[int], raw: memoryview) -> Tensor:
    """A tensor over read-only bytes, without a copy; a stray write into a mapping is a segmentation fault.
    The tensor keeps `raw`, and with it the mapping, alive.

    torch warns about every read-only buffer, whence the detour over the address.
    """
    if not raw.nbytes:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    buffer = (ctypes.c_ubyte * raw.nbytes).from_address(_address(raw))
    buffer.keeps = raw  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=DTYPES[dtype]).reshape(tuple(shape))


def read_header(path: Path) -> dict[str, Place]:
    """Every tensor of a file and where it lies, in file order; reads the header only.

    Raises FormatError unless the header is well formed and its tensors cover the rest of the file exactly;
    OSError where the file cannot be read.
    """
    with open_regular(path) as f:
        return header_of(f, os.fstat(f.fileno()).st_size)


def header_of(f: "BinaryIO | mmap.mmap", size: int) -> dict[str, Place]:
    """`read_header` of a file of so many bytes that is open, or mapped, at its beginning: of this file, whatever has
    its name by now."""
    length = int.from_bytes(f.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise FormatError(f"no header fits into its {size} bytes: truncated, or not safetensors")
    header = _parse(f.read(length))
    header.pop("__metadata__", None)
    places = sorted((_place(n, v) for n, v in header.items()), key=lambda item: item[1][2:])
    end = 0
    for name, place in places:
        if place.start != end:
            raise FormatError(f"tensor {name} begins at byte {place.start} of the data, not at {end}")
        end = place.end
    if 8 + length + end != size:
        raise FormatError(f"the header speaks of {8 + length + end} bytes, the file has {size}")
    base = 8 + length
    return {name: place._replace(start=place.start + base, end=place.end + base) for name, place in places}


def map_file(path: Path) -> dict[str, Entry]:
    """Every tensor of a file over one read-only mapping, in file order. Raises as read_header does."""
    with open_regular(path) as f:
        places = header_of(f, os.fstat(f.fileno()).st_size)
        view = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    return {n: Entry(n, p.dtype, p.shape, view[p.start : p.end]) for n, p in places.items()}


def write_safetensors(path: Path, entries: Iterable[Entry], *, alignment: int = ALIGNMENT) -> None:
    """Write tensors as one read-only file that appears whole or not at all; memory use does not grow with it.

    The bytes depend on names, dtypes, shapes and values, not on the order of `entries`: widest dtype first,
    then by name. `alignment` (bytes, a multiple of 8) is that of the first tensor in the file.

    Raises OSError, and UnreadError for a mapped tensor that cannot be read.
    """
    with aside(path.parent) as (written, f):
        fill(f, entries, alignment)
        written.chmod(0o444)
        written.replace(path)
    fsync_directory(path.parent)


def write_hashed(path: Path, entries: Iterable[Entry]) -> dict[str, str]:
    """As `write_safetensors`; returns the digest of every tensor. A second thread hashes ahead of what is written: it
    waits for the disk, and pages that are mapped by then are written in half the time."""
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(1) as hashing, aside(path.parent) as (written, f):

        def pour(f: BinaryIO, entry: Entry) -> None:
            digest = hashlib.sha256(digest_prefix(entry.dtype, entry.shape))

            def hashed(chunk: memoryview) -> None:
                present(chunk)
                digest.update(chunk)

            for chunk, _ in zip(_chunks(entry.raw), hashing.map(hashed, _chunks(entry.raw)), strict=True):
                f.write(chunk)
            digests[entry.name] = digest.hexdigest()

        fill(f, entries, pour=pour)
        written.chmod(0o444)
        written.replace(path)
    fsync_directory(path.parent)
    return digests


def _pour(f: BinaryIO, entry: Entry) -> None:
    for chunk in _chunks(entry.raw):
        present(chunk)
        f.write(chunk)


def _chunks(raw: memoryview) -> Iterator[memoryview]:
    return (raw[start : start + _CHUNK] for start in range(0, raw.nbytes, _CHUNK))


def fill(
    f: BinaryIO,
    entries: Iterable[Entry],
    alignment: int = ALIGNMENT,
    pour: Callable[[BinaryIO, Entry], None] = _pour,
) -> None:
    """Write into an open, empty file what `write_safetensors` would, each tensor by `pour`, and flush it to the disk.
    Raises OSError, and UnreadError for a mapped tensor."""
    ordered = sorted(entries, key=lambda e: (_ORDER[e.dtype], e.name))
    f.write(header_bytes(ordered, alignment))
    waiting = 0  # bytes
    for entry in ordered:
        try:
            pour(f, entry)
        except UnreadError:
            raise UnreadError(entry.name) from None
        release(entry.raw)
        waiting += entry.raw.nbytes
        if waiting >= _AHEAD:
            begin_flush(f)
            waiting = 0
    flush(f)


def header_bytes(ordered: Sequence[Entry], alignment: int = ALIGNMENT) -> bytes:
    """Length and header of a file that holds `ordered` one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, raw in ordered:
        end = offset + raw.nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return struct.pack("<Q", len(text)) + text


def _parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise FormatError("a name appears twice in its header")
        return members

    try:
        header = json.loads(text, object_pairs_hook=once)
    except FormatError:
        raise
    except (ValueError, RecursionError):  # no UTF-8, no JSON, a number of thousands of digits
        raise FormatError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise FormatError("its header is no JSON object")
    return header


def _place(name: str, value: Any) -> tuple[str, Place]:
    if not _encodable(name):
        raise FormatError(f"a tensor's name, {ascii(name)[:200]}, is no text")
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            known = dtype in DTYPES and start >= 0 and len(shape) <= _MOST_DIMENSIONS
            known = known and all(type(n) is int and n >= 0 for n in shape)
            if known and end - start == prod(shape) * DTYPES[dtype].itemsize:
                return name, Place(dtype, tuple(shape), start, end)
    raise FormatError(f"tensor {name} has a header entry that makes no sense: {_shown(value)}")


def _shown(value: Any) -> str:
    try:
        return ascii(value)[:200]
    except RecursionError:  # nested as deeply as could just be read
        return "lists in lists"


def _encodable(text: str) -> bool:
    """Whether it is Unicode: JSON can also spell halves of characters, which no file and no terminal takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
