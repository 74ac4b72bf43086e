"""Who uses an artifact root: stages share a lock on its file `use`, whoever started them, and what removes holds it
alone. The kernel releases it when the process ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sandhi_core.artifacts import Artifacts
from sandhi_core.errors import StoreError


@contextmanager
def used(artifacts: Artifacts) -> Iterator[None]:
    """While a stage runs. Any number may; waits while things are removed."""
    handle = _opened(artifacts)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


@contextmanager
def alone(artifacts: Artifacts) -> Iterator[None]:
    """While things are removed: no build, and no stage that a daemon or the UI started.

    Raises StoreError where one is under way.
    """
    with artifacts.lock():
        handle = _opened(artifacts)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            remedy = "wait for it to end, or give another --root"
            raise StoreError(
                "a stage is running in this artifact root", file=str(artifacts.root), remedy=remedy
            ) from None
        finally:
            os.close(handle)


def _opened(artifacts: Artifacts) -> int:
    return os.open(artifacts.directory() / "use", os.O_RDWR | os.O_CREAT, 0o644)
