"""What a run's log says of the evaluations of a long step: how many, and how long the rest takes at most."""

import time
from collections.abc import Callable

from sandhi_core.words import duration

EVERY_SECONDS = 5.0
SHARE = 0.02
"""After a while a line comes whenever so much of the time has passed again: about 300 lines a day, not thousands."""


class Telling:
    """Counts evaluations of one step and tells of them by `log`. `expected`: how many it makes at most, 0 where that is
    not known; scores that were kept are not made again, so it may need fewer."""

    def __init__(self, expected: int, log: Callable[[str], None]) -> None:
        self._expected = expected
        self._log = log
        self._spent = 0.0
        self._begun = time.monotonic()
        self._due = 0.0  # the first is told at once: a person sees that it has begun, and how long one takes
        self.evaluations = 0

    def evaluated(self, model: str, seconds: float) -> None:
        """Count one; says so where the last line is long enough ago."""
        self.evaluations += 1
        self._spent += seconds
        passed = time.monotonic() - self._begun
        if passed < self._due:
            return
        self._due = passed + max(EVERY_SECONDS, SHARE * passed)
        left = self._expected - self.evaluations
        about = duration(left * self._spent / self.evaluations)
        rest = f", at most {left} more (about {about})" if left > 0 else ""
        self._log(f"evaluation {self.evaluations} of {model} in {duration(passed)}{rest}")
