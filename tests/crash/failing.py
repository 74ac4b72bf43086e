"""A real disk with a part that cannot be read: an image whose end is cut off, under a file system that knows nothing of
it. What lies there is EIO to who reads it, SIGBUS to who touches it in a mapping."""

import fcntl
import os
import struct
import subprocess
from pathlib import Path

_BLOCK = 4096
_FIBMAP = 1  # linux/fs.h: which block of the disk has one of a file


class Disk:
    """Mounted at `at`, with `image` behind it. Raises OSError where nothing can be mounted."""

    def __init__(self, image: Path, at: Path) -> None:
        self.image, self.at = image, at
        self._binds: list[tuple[Path, Path]] = []
        self._whole = b""
        with image.open("wb") as f:
            f.truncate(64 << 20)
        at.mkdir()
        if not _ran("mkfs.ext4", "-q", "-F", "-b", str(_BLOCK), "-O", "^has_journal", str(image)) or not self._mount():
            raise OSError("no file system can be mounted here")

    def takes(self, file: Path) -> None:
        """Move a file here; its place goes on having it."""
        moved = self.at / f"{len(self._binds)}-{file.name}"
        moved.write_bytes(file.read_bytes())
        self._binds.append((moved, file))
        assert _ran("mount", "--bind", str(moved), str(file))

    def fail(self, file: Path, start: int) -> int:
        """From the block of a file's byte `start` on, or the next one, the disk cannot be read. Returns the first byte
        of the file that is lost."""
        block = -(-start // _BLOCK)
        with file.open("rb") as f:
            found = fcntl.ioctl(f.fileno(), _FIBMAP, struct.pack("i", block))
        self.close()  # whatever was kept in memory goes
        self._whole = self.image.read_bytes()
        assert self._mount()  # of a short image it would be refused
        os.truncate(self.image, struct.unpack("i", found)[0] * _BLOCK)
        return block * _BLOCK

    def heal(self) -> None:
        if self._whole:
            self.close()
            self.image.write_bytes(self._whole)
            self._whole = b""
            assert self._mount()

    def close(self) -> None:
        for _, file in self._binds:
            _ran("umount", "-l", str(file))
        _ran("umount", "-l", str(self.at))  # even where a test that failed still has a file mapped

    def _mount(self) -> bool:
        mounted = _ran("mount", "-o", "loop", str(self.image), str(self.at))
        return mounted and all(_ran("mount", "--bind", str(moved), str(file)) for moved, file in self._binds)


def _ran(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
