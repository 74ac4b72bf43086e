"""Owners and engines as processes of their own, forked from the test's so that none imports everything again."""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from sandhi_core.serving.cuda import owner
from sandhi_core.serving.cuda.client import Attached, attach
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import matrices
from tests.serving.cuda.fake import Fake, driver

PATIENCE = 60.0
_fork = multiprocessing.get_context("fork")


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {PATIENCE} s: {what}"
        time.sleep(0.01)
    return found


@dataclass
class Owner:
    process: ForkProcess
    socket: Path
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def ready(self) -> dict[str, Any]:
        """The line on standard output."""
        line = until(lambda: self.log.with_suffix(".out").read_text(), f"a ready owner; it said: {self.said}")
        assert line.count("\n") == 1
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: int) -> int:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        return self.ended()

    def ended(self) -> int:
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None
        return self.process.exitcode


@contextmanager
def owning(
    root: Path, socket: Path, *arguments: str, fake: Fake | None = None, before: Callable[[], None] = lambda: None
) -> Iterator[Owner]:
    """An owner's main() in a process; killed at the end. `before` runs in it first. What its driver still holds at the
    end is the last line of the log."""
    log = socket.with_name(f"{socket.name}.{time.monotonic_ns()}.log")
    for path in (log, log.with_suffix(".out")):
        path.touch()

    def run() -> None:
        redirect(log.with_suffix(".out"), log)
        before()
        held = fake or Fake()
        status = owner.main([str(root), "--socket", str(socket), *arguments], driver(held))
        print(f"left: {len(held.handles)} handles, {len(held.mapped)} mappings", file=sys.stderr, flush=True)
        os._exit(status)

    process = _fork.Process(target=run)
    process.start()
    try:
        yield Owner(process, socket, log)
    finally:
        process.kill()
        process.join()


@contextmanager
def engine(work: Callable[[Connection], None]) -> Iterator[tuple[ForkProcess, Connection]]:
    """A process that does `work` with its end of a pipe; killed at the end."""
    here, there = _fork.Pipe()

    def run() -> None:
        null = Path(os.devnull)
        redirect(null, null)
        work(there)
        os._exit(0)

    process = _fork.Process(target=run)
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


def redirect(output: Path, errors: Path) -> None:
    """Of a fork: its streams into files, and nothing of what pytest does with signals."""
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    for path, stream, number in ((output, sys.stdout, 1), (errors, sys.stderr, 2)):
        stream.flush()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


def attached(root: Path, socket: Path, model: str, **options: Any) -> Attached:
    """As an engine does that serves a model of the export."""
    mapped = MappedModel.open(root / model)
    digests = options.pop("digests", {n: t.digest for n, t in matrices(mapped.tensors, mapped.shared()).items()})
    manifest = options.pop("manifest", mapped.manifest.digest)
    options.setdefault("driver", driver())
    return attach(socket, manifest, model, digests, **options)
