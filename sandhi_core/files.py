"""Files that are whole or not there: written aside, flushed to the disk, renamed."""

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that a crash at any moment leaves the old file or the new one, never a part."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        aside.chmod(mode)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make renames and new names in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
