"""Which runs are alive: while a step works, a file of its run is locked; the kernel unlocks it when the process ends.

Dagster learns of a run whose process was killed from the code server that started it, unless that was killed too.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandhi_core.files import locked


@contextmanager
def running(folder: Path, run: str) -> Iterator[None]:
    """Mark the run as alive until the end; the file says by which process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_running(folder: Path, run: str) -> bool:
    """Whether a step of the run is at work, on any process of this machine."""
    return locked(folder / f"{run}.lock")
