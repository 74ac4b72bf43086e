"""What a person sees while a build runs: a line a stage, and while models are scored how much is left."""

import sys
import time
from typing import TextIO

from pipelines.jobs import Run

REPEAT_SECONDS = 5.0


class Progress:
    """Writes to standard error. `expected` is how many evaluations the plan foresees at most, so that the time
    left is an upper bound; a walk that rejects little needs fewer."""

    def __init__(self, expected: int, stream: TextIO = sys.stderr) -> None:
        self._expected = expected
        self._stream = stream
        self._done = 0
        self._seconds = 0.0
        self._begun = self._run_begun = self._said = time.monotonic()

    def evaluated(self, stage: str, model: str, seconds: float) -> None:
        """Count one fresh evaluation; says something at most every few seconds."""
        self._done += 1
        self._seconds += seconds
        if time.monotonic() - self._said >= REPEAT_SECONDS:
            self._say(f"  {stage} {model}: {self._done} evaluations so far, {self._left()}")

    def started(self, run: Run) -> None:
        self._run_begun = self._said = time.monotonic()

    def finished(self, run: Run) -> None:
        """Report a run that succeeded."""
        self._say(f"{' + '.join(run.stages)} {run.key}: {time.monotonic() - self._run_begun:.1f} s")

    def _left(self) -> str:
        remaining = max(self._expected - self._done, 0) * self._seconds / self._done
        return f"at most {_duration(remaining)} of scoring left"

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"[{_duration(self._said - self._begun)}] {text}", file=self._stream, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
