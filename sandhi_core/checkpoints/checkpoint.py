"""A Hugging Face checkpoint directory as lazy tensor views over memory-mapped safetensors files."""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import Tensor

from sandhi_core.checkpoints.safetensors_file import (
    UnreadError,
    digest_prefix,
    present,
    release,
    tensor_digest,
    tensor_over,
)
from sandhi_core.checkpoints.survey import survey
from sandhi_core.checkpoints.survey_files import INDEX, FileIdentity, HeaderEntry, Survey
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.files import open_regular, read_at
from sandhi_core.pools.pool import Base, ModelEntry

__all__ = ["Checkpoint", "HeaderEntry", "digest_prefix", "refuse", "resolve", "tensor_digest"]


def resolve(entry: ModelEntry | Base) -> Path:
    """The directory of a model or base: a local one, or a hub id's snapshot in the local cache (never the network).

    Raises CheckpointError where the cache has no such snapshot.
    """
    if Path(entry.path).is_absolute():
        return Path(entry.path)
    try:
        return Path(snapshot_download(entry.path, revision=entry.revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        at = f" at revision {entry.revision}" if entry.revision else ""
        download = f"hf download {entry.path}" + (f" --revision {entry.revision}" if entry.revision else "")
        raise CheckpointError(
            f"{entry.path}{at} is neither a directory nor in the local hub cache, and models are never fetched here",
            model=entry.name,
            remedy=f"run `{download}` first, or correct the path of the directory",
            code="hub-not-cached",
        ) from None


def refuse(problem: Problem) -> CheckpointError:
    """A problem as the exception to raise."""
    return CheckpointError(
        problem.message,
        remedy=problem.remedy,
        model=problem.model,
        file=problem.file,
        tensor=problem.tensor,
        code=problem.code,
    )


class Checkpoint:
    """An opened checkpoint. Tensors are views of read-only mappings, made when first asked for: a stray write
    into one is a segmentation fault, and a view keeps its mapping alive. `blocks` maps nothing."""

    def __init__(self, found: Survey) -> None:
        self.directory = found.directory
        self.model = found.model
        self.config: dict[str, Any] = found.config
        self.headers: dict[str, HeaderEntry] = found.headers
        self.weights: dict[str, FileIdentity] = found.weights
        self._beside = found.beside
        self._index = found.index
        self._views: dict[str, memoryview] = {}
        self._mapping = Lock()

    @classmethod
    def open(cls, directory: Path, model: str, index: str = INDEX) -> "Checkpoint":
        """Read configuration and headers, and hold them against each other (see survey).

        Raises CheckpointError for the first problem.
        """
        found = survey(directory, model, index)
        if found.problems:
            raise refuse(found.located(found.problems[0]))
        return cls(found)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(self.headers)

    def header(self, name: str) -> HeaderEntry:
        return self.headers[name]

    def raw(self, name: str) -> memoryview:
        """A tensor's bytes, row-major, read-only.

        Raises CheckpointError where its file changed since `open`: a mapping would show other bytes, and one of a
        file that was cut short, or that its disk cannot read, ends the process (SIGBUS) where it is read.
        """
        entry = self.headers[name]
        self.require_unchanged(entry.file, tensor=name)
        return self._view(entry.file)[entry.start : entry.start + entry.nbytes]

    def tensor(self, name: str) -> Tensor:
        """A tensor over the mapping, without a copy, and in memory by now. Raises as `raw` does, and CheckpointError
        where the disk cannot read it."""
        entry, raw = self.headers[name], self.raw(name)
        try:
            present(raw)
        except UnreadError:
            raise self.unread(name) from None
        return tensor_over(entry.dtype, entry.shape, raw)

    def blocks(self, name: str, nbytes: int) -> Iterator[memoryview]:
        """A tensor's bytes in blocks of so many (the last may be shorter), all in one buffer: read, not mapped, so that
        a file that is cut short meanwhile ends nobody.

        Raises CheckpointError where its file changed since `open`, or cannot be read.
        """
        entry = self.headers[name]
        buffer = memoryview(bytearray(min(nbytes, entry.nbytes)))
        with self.reading(entry.file, name), open_regular(self.directory / entry.file) as f:
            self.require_unchanged(entry.file, os.fstat(f.fileno()), name)
            for at in range(0, entry.nbytes, max(nbytes, 1)):
                block = buffer[: entry.nbytes - at]
                if not read_at(f.fileno(), block, entry.start + at):
                    raise self._changed(entry.file, name)
                yield block

    def release(self, name: str) -> None:
        """Give back the pages of a tensor's mapping."""
        entry = self.headers[name]
        if entry.file in self._views:
            release(self._views[entry.file][entry.start : entry.start + entry.nbytes])

    def require_readable(self) -> None:
        """Raise CheckpointError for the first tensor that cannot be read: for who hands the files to a library that
        maps them. They are in the page cache then, so that nothing is read twice."""
        for name in self.headers:
            self.tensor(name)
            self.release(name)

    def unread(self, name: str) -> CheckpointError:
        """What to raise for a mapped tensor that could not be read: its file was cut short, or the disk fails."""
        file = self.headers[name].file
        try:
            self.require_unchanged(file, tensor=name)
        except CheckpointError as changed:
            return changed
        return self._unreadable(file, OSError(errno.EIO, os.strerror(errno.EIO)), name)

    def beside(self) -> tuple[str, ...]:
        """Every file that holds no weights and does not index them, relative to the directory, sorted."""
        return self._beside

    def identity(self) -> list[list[Any]]:
        """[relative name, size, mtime_ns, inode] of every file of the model, sorted: cheap, and different whenever
        one was written or replaced."""
        identity = []
        for name in sorted([*self.weights, *self._beside, *([self._index] if self._index else [])]):
            with self.reading(name):
                status = (self.directory / name).stat()
            identity.append([name, status.st_size, status.st_mtime_ns, status.st_ino])
        return identity

    def require_unchanged(self, file: str, status: os.stat_result | None = None, tensor: str | None = None) -> None:
        """Raise CheckpointError where a weight file is no longer the one whose header was read."""
        with self.reading(file, tensor):
            found = FileIdentity.of(status or (self.directory / file).stat())
        if found != self.weights[file]:
            raise self._changed(file, tensor)

    @contextmanager
    def reading(self, file: str, tensor: str | None = None) -> Iterator[None]:
        """Turn an OSError about one of the files into a CheckpointError."""
        try:
            yield
        except OSError as error:
            raise self._unreadable(file, error, tensor) from error

    def _changed(self, file: str, tensor: str | None) -> CheckpointError:
        return CheckpointError(
            "changed while it was in use",
            model=self.model,
            file=str(self.directory / file),
            tensor=tensor,
            remedy="let whatever writes it finish, then run again",
            code="file-changed",
        )

    def _unreadable(self, file: str, error: OSError, tensor: str | None) -> CheckpointError:
        failing = error.errno == errno.EIO
        return CheckpointError(
            f"cannot be read{'' if failing else ' any more'}: {error.strerror or error}",
            model=self.model,
            file=str(self.directory / file),
            tensor=tensor,
            remedy="its disk fails: put the model on another, from a sound copy, then run again"
            if failing
            else "put the file back, then run again",
            code="file-unreadable" if failing else "file-changed",
        )

    def _view(self, file: str) -> memoryview:
        with self._mapping:  # of several mappings of a file `release` would know one
            if file not in self._views:
                with self.reading(file), (self.directory / file).open("rb") as f:
                    self.require_unchanged(file, os.fstat(f.fileno()))
                    self._views[file] = memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            return self._views[file]
