"""What can pass by itself, and is worth another try: memory that was short, a device that was busy, storage that did
not answer. Everything else would fail again."""

import errno
from collections.abc import Iterator

_ERRNOS = {
    *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE),
    *(errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EREMOTEIO),
}
_WORDS = (
    "out of memory",
    "busy or unavailable",  # cudaErrorDevicesUnavailable
    "can't allocate memory",  # torch's allocator for the CPU
    "cublas_status_alloc_failed",
    "cublas_status_not_initialized",  # what cuBLAS says where there is no memory for its own
)


def can_pass(error: BaseException) -> bool:
    """Whether the error, or one that it came from, is of a kind that can pass by itself."""
    return any(_passing(one) for one in _chain(error))


def _passing(error: BaseException) -> bool:
    match error:
        case MemoryError() | ConnectionError() | TimeoutError():
            return True
        case OSError():
            return error.errno in _ERRNOS
        case RuntimeError():  # torch gives CUDA's errors few types of their own, and takes seconds to import
            return any(words in str(error).lower() for words in _WORDS)
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
