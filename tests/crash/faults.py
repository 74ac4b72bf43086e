"""The file system's boundary, watched: every call that changes something below a folder can be told, made to fail, or
be the last that the process makes.

Python files are watched below their buffers, where a write is one system call. What C libraries write themselves
(sqlite for Dagster) is not seen; commits and the start of processes stand in for that.
"""

import builtins
import errno
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.conftest import CHECKOUT

When = Literal["before", "torn", "after"]
"""The process dies before the call, having written half of it, or after it."""

Verdict = When | OSError | None
"""What happens at an event: the process ends, the call fails, or nothing."""

_OURS = tuple(str(CHECKOUT / package) + os.sep for package in ("sandhi_core", "assets", "resources", "pipelines"))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Event:
    """`site`: the innermost places of the project that lead to the call, innermost first."""

    operation: str
    path: str
    site: tuple[str, ...]


Decide = Callable[[Event], Verdict]


def watch(root: Path, decide: Decide, done: Callable[[Event], None] = lambda event: None) -> None:
    """From now on, and for good: call `decide` before every change below `root`, and `done` after it."""
    below = str(root) + os.sep

    def around(operation: str, path: str, call: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        if not (path + os.sep).startswith(below):
            return call()
        event = Event(operation, path, _site())
        verdict = decide(event)
        if isinstance(verdict, OSError):
            raise verdict
        if verdict == "before":
            die()
        if verdict == "torn" and half is not None:
            half()
            die()
        found = call()
        if verdict == "after":
            die()
        done(event)
        return found

    _watch_calls(around)
    _watch_files(around)
    _watch_processes(around, root)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _watch_calls(around: Callable[..., Any]) -> None:
    def of_path(operation: str, place: int) -> Any:
        call = getattr(os, operation)

        def watched(*arguments: Any, **options: Any) -> Any:
            path = _path(arguments[place], options.get("dir_fd"))
            return around(operation, path, lambda: call(*arguments, **options))

        return watched

    for operation in ("mkdir", "rmdir", "unlink", "chmod", "truncate"):
        setattr(os, operation, of_path(operation, 0))
    for operation in ("replace", "rename", "link", "symlink"):
        setattr(os, operation, of_path(operation, 1))
    opened, write, fsync = os.open, os.write, os.fsync

    def watched_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        call = lambda: opened(path, flags, *arguments, **options)  # noqa: E731
        found: int = around("open", _path(path, options.get("dir_fd")), call) if flags & _WRITES else call()
        return found

    def watched_write(handle: int, data: Any) -> int:
        half = lambda: write(handle, memoryview(data)[: len(data) // 2])  # noqa: E731
        found: int = around("write", _path(handle), lambda: write(handle, data), half)
        return found

    os.open, os.write = watched_open, watched_write
    os.fsync = lambda handle: around("fsync", _path(handle), lambda: fsync(handle))


def _watch_files(around: Callable[..., Any]) -> None:
    class Raw(io.FileIO):
        def write(self, data: Any, /) -> int:
            whole = super().write
            half = lambda: whole(memoryview(data)[: len(data) // 2])  # noqa: E731
            found: int = around("write", str(self.name), lambda: whole(data), half)
            return found

        def truncate(self, size: int | None = None, /) -> int:
            found: int = around("truncate", str(self.name), lambda: super(Raw, self).truncate(size))
            return found

    plain = io.open

    def watched(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "b" not in mode or not set(mode) & set("wax+") or isinstance(file, int):
            return plain(file, mode, *arguments, **options)
        path = os.path.abspath(file)  # noqa: PTH100 - links stay
        raw = around("open", path, lambda: Raw(path, mode.replace("b", "")))
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    io.open = builtins.open = watched  # type: ignore[assignment]


def _watch_processes(around: Callable[..., Any], root: Path) -> None:
    started = subprocess.Popen.__init__

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        around("process", f"{root}{os.sep}", lambda: started(self, *arguments, **options))

    subprocess.Popen.__init__ = watched  # type: ignore[method-assign]


def watch_commits(root: Path, decide: Decide) -> None:
    """Dagster's own files: an event before every commit."""
    from sqlalchemy import event as events
    from sqlalchemy.engine import Engine

    def committing(connection: Any) -> None:
        if decide(Event("commit", f"{root}/dagster", _site())) is not None:
            die()

    events.listen(Engine, "commit", committing)


def _path(given: Any, within: int | None = None) -> str:
    if isinstance(given, int):
        return os.readlink(f"/proc/self/fd/{given}")  # noqa: PTH115
    path = os.fsdecode(given)
    return os.path.join(os.readlink(f"/proc/self/fd/{within}"), path) if within is not None else os.path.abspath(path)  # noqa: PTH100, PTH115, PTH118


def _site() -> tuple[str, ...]:
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 3:  # type: ignore[redundant-expr]
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            found.append(f"{file.removeprefix(str(CHECKOUT) + os.sep)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)
