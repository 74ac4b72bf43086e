"""What a person sees while a build runs: a line a stage, and while one lasts how far it is or that it goes on."""

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

from pipelines.jobs import Run
from sandhi_core.graph import Node
from sandhi_core.words import duration, size

REPEAT_SECONDS = 5.0
QUIET_SECONDS = 10.0


class Progress:
    """Writes to standard error. `expected` is how many evaluations the plan foresees of each node at most: a walk that
    rejects little needs fewer, and what a node that has ended did not need, nobody does."""

    def __init__(self, expected: Mapping[Node, int], stream: TextIO = sys.stderr) -> None:
        self._left = dict(expected)
        self._running = ""
        self._stream = stream
        self._done = 0
        self._seconds = 0.0
        self._begun = self._said = time.monotonic()

    def evaluated(self, stage: str, model: str, seconds: float) -> None:
        """Count one fresh evaluation; says something at most every few seconds."""
        self._done += 1
        self._seconds += seconds
        node = (stage, self._running)
        self._left[node] = max(self._left.get(node, 0) - 1, 0)
        if time.monotonic() - self._said >= REPEAT_SECONDS:
            self._say(f"  {stage} {model}: {self._done} evaluations so far{self._more()}")

    def told(self, text: str) -> None:
        """Say at once something that a stage has to say."""
        self._say(f"  {text}")

    def keep(self, stale: Collection[Node]) -> None:
        """All other nodes turned out to need nothing."""
        self._left = {node: count for node, count in self._left.items() if node in stale}

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """Say whenever nothing else was said for a while that a run goes on; if it succeeds, how long it took."""
        name = f"{' + '.join(run.stages)} {run.key}"
        self._running = run.key
        begun = self._said = time.monotonic()
        ended = Event()
        beat = Thread(target=self._beat, args=(name, begun, ended), daemon=True)
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
        for stage in run.stages:
            self._left.pop((stage, run.key), None)
        self._say(f"{name}: {time.monotonic() - begun:.1f} s")

    def _beat(self, name: str, begun: float, ended: Event) -> None:
        while not ended.wait(max(self._said + QUIET_SECONDS - time.monotonic(), 0.1)):
            if time.monotonic() - self._said >= QUIET_SECONDS:
                self._say(f"  {name}: at work for {duration(time.monotonic() - begun)}")

    def _more(self) -> str:
        """The bound is one of evaluations: how long they take is known of those before."""
        left = sum(self._left.values())
        about = duration(left * self._seconds / self._done)
        return f", at most {left} more (about {about})" if left else ""

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"[{duration(self._said - self._begun)}] {text}", file=self._stream, flush=True)


class Reading:
    """Says now and then how much of `total` bytes of weights has been read, and how long the rest takes at that speed.
    What an earlier pass has kept is not read again: the time left is an upper bound."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.about = ""
        self._total = total
        self._stream = stream
        self._read = 0
        self._begun = self._said = time.monotonic()

    def __str__(self) -> str:
        return f", {size(self._total)}" if self._total else ""

    def told(self, nbytes: int) -> None:
        """Count bytes that were read just now."""
        self._read += nbytes
        self.passed()

    def passed(self) -> None:
        """Say something, at most every few seconds."""
        now = time.monotonic()
        if now - self._said < REPEAT_SECONDS:
            return
        self._said = now
        speed = self._read / max(now - self._begun, 1e-9)
        left = max(self._total - self._read, 0) / speed if speed else 0.0
        at = f": {size(self._read)} read, {size(round(speed))}/s, at most {duration(left)} left" if speed else ""
        print(f"  {self.about}{at}", file=self._stream, flush=True)
