"""Brings what a model alone holds into the page cache, by several readers at once, while the model is made.

A mapping is read page by page as it is touched, each time by one thread that waits; a disk answers many requests as
quickly as one. What is shared is not read: it is there already where another member serves. Reading also tells of a
disk's error (EIO) that would kill a process that meets it in a mapping (SIGBUS).
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import NamedTuple

from sandhi_core.disk import RESTORE
from sandhi_core.errors import CheckpointError
from sandhi_core.serving.mapped import MappedModel

_CHUNK = 4 << 20  # bytes that one reader asks for at a time, and keeps
_READERS = 8


class Span(NamedTuple):
    """Bytes of a file, from `start` up to `end`."""

    path: Path
    start: int
    end: int


def private_spans(mapped: MappedModel) -> list[Span]:
    """Where the tensors lie that a model alone holds, in order and without seams."""
    found: list[Span] = []
    places = ((*mapped.file(name), mapped.tensors[name].nbytes) for name in mapped.tensors.keys() - mapped.shared())
    for path, start, nbytes in sorted(places):
        if found and (found[-1].path, found[-1].end) == (path, start):
            found[-1] = found[-1]._replace(end=start + nbytes)
        else:
            found.append(Span(path, start, start + nbytes))
    return found


@contextmanager
def prefetching(model: str, spans: Iterable[Span], readers: int = _READERS) -> Iterator[None]:
    """Read these bytes of a model's files while the block runs, which finds the same bytes however far that is. All are
    read when the block ends; no more are where it raises.

    Raises CheckpointError where a file cannot be read.
    """
    stop = Event()
    with ExitStack() as stack, ThreadPoolExecutor(readers, "prefetch") as pool:
        pending: list[tuple[Path, Future[None]]] = []
        try:
            for path, start, end in spans:
                with _reading(model, path):
                    file = stack.enter_context(path.open("rb", buffering=0))
                for at in range(start, end, _CHUNK):
                    pending.append((path, pool.submit(_read, file.fileno(), at, min(_CHUNK, end - at), stop)))
            yield
            for path, reader in pending:
                with _reading(model, path):
                    reader.result()
        finally:
            stop.set()


def _read(descriptor: int, start: int, nbytes: int, stop: Event) -> None:
    if not stop.is_set():
        os.preadv(descriptor, [bytearray(nbytes)], start)


@contextmanager
def _reading(model: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot be read: {error.strerror or error}", model=model, file=str(path), remedy=RESTORE
        ) from error
