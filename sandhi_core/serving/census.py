"""What a process holds of a model beside the mappings of its weight files, asked from within it."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Module

from sandhi_core.memory import mappings, weight_files
from sandhi_core.rungs.residual import factors

WORKER = f"{__name__}.Worker"
"""What vLLM takes for --worker-extension-cls."""


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


class Worker:
    """A question to vLLM's workers, as their extension (vLLM 0.32, vllm/v1/worker/worker_base.py)."""

    model_runner: Any

    def sandhi_census(self, directory: str) -> dict[str, int]:
        """This worker's process, and the bytes of parameters that it holds beside the model's files."""
        return {"pid": os.getpid(), "unmapped": unmapped_bytes(self.model_runner.model, Path(directory))}
