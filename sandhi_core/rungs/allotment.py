"""How many bytes of residual each slot of a model gets, by one number for the whole model.

Two rules, each a ladder from everything private to nothing but shared tensors. `by_error`: no slot's outputs may be
further off than so much of their size. `by_price`: a direction is kept where what it takes off the error, as a part of
the slot's outputs, is worth its bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sandhi_core.rungs.residual import Spectrum, nbytes

Ranks = Mapping[str, int]
"""Tensor name to the rank of its residual; a slot that is not named keeps its own matrix."""


@dataclass(frozen=True)
class Candidate:
    """One slot that may take a shared tensor: its spectrum, shape [rows, width], and the bytes of its own matrix."""

    spectrum: Spectrum
    shape: tuple[int, ...]
    nbytes: int

    def worth(self, rank: int) -> bool:
        """Whether sharing with a residual of this rank costs less than keeping the own matrix."""
        return nbytes(self.shape, rank) < self.nbytes


Rule = Callable[[Mapping[str, Candidate], float], dict[str, int]]


def by_error(candidates: Mapping[str, Candidate], error: float) -> dict[str, int]:
    """The smallest ranks that leave each slot's outputs off by at most `error`, a part of their mean squared length."""
    ranks = {name: candidate.spectrum.rank(error) for name, candidate in candidates.items()}
    return {name: rank for name, rank in ranks.items() if candidates[name].worth(rank)}


def by_price(candidates: Mapping[str, Candidate], price: float) -> dict[str, int]:
    """Every direction that takes off more than `price` for each MiB it is stored in."""
    ranks = {}
    for name, candidate in candidates.items():
        least = price * nbytes(candidate.shape, 1) / 2**20
        whole = candidate.spectrum.whole
        ranks[name] = int((candidate.spectrum.squares > least * whole).sum()) if whole > 0 else 0
    return {name: rank for name, rank in ranks.items() if candidates[name].worth(rank)}


RULES: Mapping[str, Rule] = {"error": by_error, "price": by_price}


def distinct(rule: Rule, candidates: Mapping[str, Candidate], levels: Sequence[float]) -> list[tuple[float, Ranks]]:
    """The assignments of rising `levels`, from safe to bold, each once, with the first level that gives it."""
    found: list[tuple[float, Ranks]] = []
    for level in levels:
        ranks = rule(candidates, level)
        if not found or ranks != found[-1][1]:
            found.append((level, ranks))
    return found
