"""The boldest rung of a ladder that a model can stand on, in few evaluations."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def boldest(rungs: Sequence[T], stands: Callable[[T], bool]) -> list[T]:
    """The rungs that were tried and held, from safe to bold; the last is where the bisection ended.

    `rungs`: from safe to bold; nothing is asked of what lies below the first. Where a bolder rung never holds after a
    safer one has failed, the last is the boldest of all that hold, found in log2(n) + 1 evaluations; otherwise it is
    one that holds and has a bolder neighbour that does not.
    """
    held: list[T] = []
    low, high = -1, len(rungs)
    while high - low > 1:
        at = (low + high) // 2
        if stands(rungs[at]):
            held.append(rungs[at])
            low = at
        else:
            high = at
    return held
