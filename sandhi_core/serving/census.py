"""What a process holds of a model beside the mappings of its weight files, asked from within it."""

import os
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from sandhi_core.memory import mappings, weight_files
from sandhi_core.rungs.residual import factors

FOLDER = "SANDHI_CENSUS"
"""The environment variable that names the folder in which a server's workers tell what they hold."""


def unmapped_bytes(network: Module, directory: Path) -> int:
    """Read every parameter and every factor of a residual once; bytes of those that do not lie in a mapping of the
    model's weight files. One that is held under two names counts once."""
    held = {
        tensor.data_ptr(): tensor.detach() for tensor in (*network.parameters(), *factors(network)) if tensor.numel()
    }
    for tensor in held.values():
        tensor.sum()
    files = weight_files(directory)
    spans = [(m.start, m.end) for m in mappings(os.getpid()) if files.get(m) is not None]
    return sum(
        tensor.nbytes
        for address, tensor in held.items()
        if not any(start <= address and address + _extent(tensor) <= end for start, end in spans)
    )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last; a slice of columns reaches over what lies between."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def tell(folder: Path, unmapped: int) -> None:
    """Leave a file that only this user can read: what this process holds beside the model's files. Raises OSError."""
    target = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(target, "w") as file:
        file.write(str(unmapped))


def told(folder: Path) -> dict[int, int]:
    """By process, what all that are ready have told."""
    return {int(path.name): int(path.read_text()) for path in sorted(folder.iterdir())}
