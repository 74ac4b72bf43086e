"""Files that are whole or not there: written aside, flushed to the disk, renamed; read only where they are files.

What is written aside has a hidden name, and its writer holds a lock on it (flock) as long as it lives: so that what
dead writers left can be told from what is being written, and swept.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sandhi_core.errors import StoreError

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a file system answers that has no room left."""

LIBC = ctypes.CDLL(None, use_errno=True)

_SYNC_FILE_RANGE_WRITE = 2  # sync_file_range(2)
_ASIDE = re.compile(r"\.sandhi-[0-9a-f]{16}\.tmp")


def open_regular(path: Path) -> BinaryIO:
    """A file to be read. Raises OSError where it cannot be opened or is no regular file: at once, where opening a named
    pipe would wait for somebody to write into it."""
    file: BinaryIO = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_at(handle: int, buffer: memoryview, start: int) -> bool:
    """Fill a buffer with a file's bytes from `start` on; False where the file ends before. Raises OSError."""
    filled = 0
    while filled < buffer.nbytes:
        read = os.preadv(handle, [buffer[filled:]], start + filled)
        if not read:
            return False
        filled += read
    return True


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace `path` by `data` so that a crash at any moment leaves the old file or the new one, never a part.

    Raises OSError.
    """
    with aside(path.parent) as (written, f):
        f.write(data)
        flush(f)
        written.chmod(mode)
        written.replace(path)
    fsync_directory(path.parent)


@contextmanager
def aside(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in `folder`, hidden and locked, to be filled, flushed and renamed; where it is not, it is removed.

    Raises OSError.
    """
    path, f = _claimed(folder)
    with f:
        try:
            yield path, f
        finally:
            path.unlink(missing_ok=True)


def is_aside(name: str) -> bool:
    """Whether a file of this name is being written, or was when its writer died; no reader looks for it."""
    return _ASIDE.fullmatch(name) is not None


def _claimed(folder: Path) -> tuple[Path, BinaryIO]:
    while True:
        path = folder / f".sandhi-{secrets.token_hex(8)}.tmp"
        f = path.open("xb")
        try:
            with suppress(OSError):  # where there are no locks nothing is swept either
                fcntl.flock(f, fcntl.LOCK_EX)
            if path.exists():  # not so where a sweep was quicker than the lock
                return path, f
        except BaseException:
            f.close()
            raise
        f.close()


def sweep(folders: Iterable[Path]) -> list[Path]:
    """Remove what dead writers left aside anywhere below some folders; returns what was removed. Live writers' files
    stay, and so does everything that was not made here."""
    swept = []
    for folder in folders:
        for within, _, names in os.walk(folder):
            left = (Path(within, name) for name in names if is_aside(name))
            swept += [path for path in left if _abandoned(path)]
    return swept


def _abandoned(path: Path) -> bool:
    """Whether a file's writer was dead; then it is gone."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # its writer lives, or has just renamed it; or it is another user's
        return False
    finally:
        os.close(handle)
    return True


def locked(path: Path) -> bool:
    """Whether anybody holds the lock (flock) on a file, which need not be there. Raises OSError."""
    try:
        with path.open("rb") as f:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def begin_flush(f: BinaryIO) -> None:
    """Have what was written so far brought to the disk meanwhile, so that `flush` waits for less; nothing is promised,
    and where the file system cannot (sync_file_range(2)), nothing is done."""
    f.flush()
    LIBC.sync_file_range(f.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def flush(f: BinaryIO) -> None:
    """Bring to the disk what was written into an open file."""
    f.flush()
    os.fsync(f.fileno())


def fsync_directory(directory: Path) -> None:
    """Make renames and new names in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Raises StoreError, as `unwritable` does, in place of what the file system raises."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, nbytes) from error


def unwritable(path: Path, error: OSError, nbytes: int = 0) -> StoreError:
    """The error to raise where `path`, a file of so many bytes if that is known, could not be written. Of a full disk
    it says how full."""
    message = f"cannot be written: {error.strerror or error}"
    remedy = "give the artifact root space and write permission, or choose another with --root"
    if error.errno in FULL:
        needed = f"it takes {nbytes} bytes, and " if nbytes else ""
        message = f"{message}: {needed}{_free(path)} bytes are free"
        remedy = "free space there, or choose an artifact root on another disk with --root; what is done is kept"
    elif error.errno == errno.EIO:
        remedy = "its disk fails: choose an artifact root on another with --root, to which a sound copy may be restored"
    return StoreError(message, file=str(path), remedy=remedy)


def _free(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
