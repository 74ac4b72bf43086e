"""Every evaluation ever made of one model, in a file that survives a kill at any moment.

One JSON line an evaluation (of an abandoned one: what its scores are at most) with its digest, appended in one write
and fsynced. The key is what decides a score: the weights, and the context (tasks, documents, settings, versions). A
search that is killed finds all its scores here when it runs again, which is all the resuming it needs.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Self

from sandhi_core.errors import StoreError
from sandhi_core.files import fsync_directory, writing
from sandhi_core.records import Evaluation


class _Line(Evaluation):
    """`sealed`: the evaluation's digest, without which a number with a flipped bit is another score; empty in lines of
    before there was one."""

    sealed: str = ""

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        return cls(**dict(evaluation), sealed=evaluation.digest)

    def opened(self) -> Evaluation:
        """Raises ValueError where the line does not hold what was sealed."""
        evaluation = Evaluation(**{name: value for name, value in self if name != "sealed"})
        if self.sealed not in ("", evaluation.digest):
            raise ValueError("its digest is another")
        return evaluation


class ScoreLog:
    """Opens (and where a kill left half a line, mends) the log at `path`.

    Raises StoreError where the file, or a line other than a torn last one, cannot be read, or the file not be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, str], Evaluation] = {}
        self._read = 0
        self._refresh()

    def get(self, weights: str, context: str) -> Evaluation | None:
        """The score of these weights in this context, if it was ever made (by any process)."""
        key = (weights, context)
        if key not in self._found:
            self._refresh()
        return self._found.get(key)

    def add(self, evaluation: Evaluation) -> None:
        """Append one evaluation; it is on the disk when this returns."""
        line = _Line.of(evaluation).canonical() + b"\n"
        with writing(self._path, len(line)):
            self._append(line)
        self._found[evaluation.weights, evaluation.context] = evaluation

    def _append(self, line: bytes) -> None:
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            _drop_torn_line(self._path)
            if os.write(handle, line) < len(line):  # the rest of the line is torn off by whoever writes next
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
            if self._read == 0:
                fsync_directory(self._path.parent)
        finally:
            os.close(handle)

    def _refresh(self) -> None:
        """Read what was appended since; a last line without its end belongs to a writer, alive or killed."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            remedy = "make it readable to who builds; where its disk fails, restore the file to another --root"
            raise StoreError(f"cannot be read: {error.strerror}", file=str(self._path), remedy=remedy) from error
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                evaluation = _Line.parse(line).opened()
            except ValueError:  # a ValidationError too
                raise StoreError(
                    f"a line near byte {self._read} is not an evaluation",
                    file=str(self._path),
                    remedy="restore the file, or delete it: its scores are then made again",
                ) from None
            self._found[evaluation.weights, evaluation.context] = evaluation
        self._read += len(whole)


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed writer left after the last whole line. To be called under the file's lock."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(size - 1)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
