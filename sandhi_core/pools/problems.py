"""Mistakes in a pool file: where each stands, what it is, what to do about it, and all of them as one error."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sandhi_core.errors import PoolMistakesError, Problem

Loc = tuple[int | str, ...]
"""Where a value stands: keys and list indices from the top of the document."""

LOOK_UP = "`sandhi schema` prints what may stand in a pool file"


MOST = 200
"""Mistakes of one file that are told: a file with more was written by a program, or is no pool."""


class Mistake(NamedTuple):
    line: int  # counted from 1
    message: str
    remedy: str


class Fault(NamedTuple):
    """What is wrong with the value at `loc`, before its line is looked up."""

    loc: Loc
    message: str
    remedy: str


class FieldError(ValueError):
    """Raised by a field's own check. The message goes on from the field's name: `must be ...`."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def pool_error(path: Path, mistakes: Iterable[Mistake]) -> PoolMistakesError:
    """One error for all mistakes, in the order of the file; of very many for the first."""
    ordered = sorted(set(mistakes))
    told = ordered[:MOST]
    if len(ordered) > MOST:
        told.append(Mistake(told[-1].line, f"{len(ordered) - MOST} more mistakes follow", "correct these first"))
    return PoolMistakesError(
        [
            Problem(
                code=PoolMistakesError.code,
                severity="error",
                file=f"{shown_path(path)}:{mistake.line}",
                message=mistake.message,
                remedy=mistake.remedy,
            )
            for mistake in told
        ]
    )


def shown(text: str) -> str:
    """`text` quoted, with everything unprintable escaped, at most some eighty characters."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def shown_text(text: str) -> str:
    """A message of a library, safe to print whatever part of the file it quotes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown_path(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "replace")
