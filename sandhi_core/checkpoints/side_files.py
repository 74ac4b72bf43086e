"""Tensors that are kept beside the records because making them again takes long; never the only copy of anything.

A file holds the digest of its tensors and of its own name too: whatever has happened to it, what is read is what was
kept there, or nothing.
"""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import (
    Entry,
    FormatError,
    dtype_name,
    map_file,
    raw_bytes,
    tensor_over,
    write_safetensors,
)
from sandhi_core.checkpoints.survey_files import FileIdentity
from sandhi_core.files import writing
from sandhi_core.records import canonical_json

SEAL = "sealed"
"""What the digest is called among the tensors of a file."""


def keep(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors as one file, whole or not at all. Raises StoreError where the root cannot be written."""
    entries = {n: Entry(n, dtype_name(t.dtype), tuple(t.shape), raw_bytes(t)) for n, t in tensors.items()}
    seal = _seal(path, entries)
    with writing(path, sum(entry.raw.nbytes for entry in entries.values())):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, [*entries.values(), Entry(SEAL, "U8", (len(seal),), memoryview(seal))])


def kept(path: Path) -> dict[str, Tensor] | None:
    """What was kept, as read-only views of the file; None where it is not there, damaged, or another's."""
    try:
        if not _intact(path, FileIdentity.of(path.stat())):
            return None
        entries = map_file(path)
    except (OSError, FormatError):
        return None
    return {n: tensor_over(entry.dtype, entry.shape, entry.raw) for n, entry in entries.items() if n != SEAL}


@lru_cache(maxsize=2**16)
def _intact(path: Path, identity: FileIdentity) -> bool:
    """Whether a file holds what was kept; read once a process (unless it changes). Raises as map_file does."""
    entries = map_file(path)
    seal = entries.pop(SEAL, None)
    return seal is not None and bytes(seal.raw) == _seal(path, entries)


def _seal(path: Path, entries: Mapping[str, Entry]) -> bytes:
    """Of a root that was moved it is the same."""
    digests = {name: tensor_digest(entry.dtype, entry.shape, entry.raw) for name, entry in entries.items()}
    return hashlib.sha256(canonical_json([path.parent.name, path.name, digests])).digest()
