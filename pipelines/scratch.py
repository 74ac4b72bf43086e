"""Libraries keep caches and scratch files of their own. Within a command they keep them in the artifact root, so that
nothing else is ever written: not a home, not a directory for temporary files."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCRATCH = "scratch"
_CACHES = {"MPLCONFIGDIR": "matplotlib", "TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}


@contextmanager
def scratch_within(root: Path) -> Iterator[None]:
    """To be entered before the libraries are imported: they look at the environment then. Whoever has set it keeps it.

    Processes that are started keep TMPDIR: engines put sockets there, whose paths must be short. The folder for
    temporary files is made by `Settings.artifacts`' users before anything needs one.
    """
    for name, cache in _CACHES.items():
        os.environ.setdefault(name, str(root / SCRATCH / cache))
    before, tempfile.tempdir = tempfile.tempdir, str(root / SCRATCH)
    try:
        yield
    finally:
        tempfile.tempdir = before
