"""Tensors that are kept beside the records because making them again takes long; never the only copy of anything."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sandhi_core.safetensors_file import (
    Entry,
    FormatError,
    dtype_name,
    map_file,
    raw_bytes,
    tensor_over,
    write_safetensors,
)
from sandhi_core.store import writing


def keep(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors as one file, whole or not at all. Raises StoreError where the root cannot be written."""
    entries = [Entry(name, dtype_name(t.dtype), tuple(t.shape), raw_bytes(t)) for name, t in tensors.items()]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(path, entries)


def kept(path: Path) -> dict[str, Tensor] | None:
    """What was kept, as read-only views of the file; None where it is not there or damaged."""
    try:
        entries = map_file(path)
    except (OSError, FormatError):
        return None
    return {name: tensor_over(entry.dtype, entry.shape, entry.raw) for name, entry in entries.items()}
