"""Files that are whole or not there: written aside, flushed to the disk, renamed; read only where they are files."""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """A file to be read. Raises OSError where it cannot be opened or is no regular file: at once, where opening a named
    pipe would wait for somebody to write into it."""
    file: BinaryIO = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


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
