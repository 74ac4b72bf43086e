"""What is tried again: what can pass by itself, however deep it lies, and nothing else."""

import errno

import pytest
import torch

from resources.passing import can_pass
from sandhi_core.errors import EvaluationError, PoolError, StoreError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        ConnectionResetError("reset"),
        TimeoutError("no answer"),
    ],
)
def test_what_can_pass(error: Exception) -> None:
    assert can_pass(error)
    assert can_pass(wrapped(error))
    assert can_pass(replaced(error))


@pytest.mark.parametrize(
    "error",
    [
        PoolError("no such model", remedy="name one"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("out of memory"),
        ZeroDivisionError(),
    ],
)
def test_what_would_fail_again(error: Exception) -> None:
    assert not can_pass(error)
    assert not can_pass(wrapped(error))


def wrapped(error: Exception) -> Exception:
    try:
        raise StoreError("cannot be written", remedy="look") from error
    except StoreError as found:
        return found


def replaced(error: Exception) -> Exception:
    """As where a message stands for the error it came from."""
    try:
        try:
            raise error
        except Exception:
            raise EvaluationError("the device has no memory left", remedy="lower") from None
    except EvaluationError as found:
        return found
