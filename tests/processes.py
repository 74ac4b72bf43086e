"""What tests have started and what of it is still there."""

import os

from sandhi_core.serving.keeper import descendants

kept: set[int] = set()
"""Processes that fixtures keep for the tests of other files."""


def left() -> set[int]:
    """Every process below this one, except what is kept and whatever that started."""
    return set(descendants(os.getpid())) - kept.union(*map(descendants, kept))
