"""How many bytes of residual each slot of a model gets, by one number for the whole model.

A price says what error a MiB must take off. Sharing a slot without a residual, with one of any rank, and keeping the
model's own matrix (no error, all bytes) are bids of one auction; each slot takes the cheapest. This is Lagrangian
allocation of a byte budget (Everett 1963, "Generalized Lagrange Multiplier Method"; Shoham and Gersho 1988 for bits):
of all assignments with as few bytes, none has less error in sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LADDER_VERSION = 1
"""Of everything between a plan and its ladder: changes whenever the same models and questions would give other
moments, spectra or rungs, or another climb."""

FACTOR_BYTES = 2
"""Of one element of a residual: bfloat16."""

Ranks = dict[str, int]
"""Tensor name to the rank of its residual; a slot that is not named keeps its own matrix."""

PRICES = tuple(2.0 ** (n / 4) for n in range(-80, 45))
"""Tried, from safe to bold: four to an octave. Error is a part of the slot's outputs (their mean squared length)."""


@dataclass(frozen=True)
class Candidate:
    """One slot that may take a shared tensor of `shape` (rows, columns). `squares`: falling, what each direction of
    the difference adds to the mean squared error of the slot's outputs, as a part of their mean squared length;
    `spared`: bytes that the pool spares where the slot shares; `limit`: the largest rank of a residual (0: none)."""

    squares: npt.NDArray[np.float64]
    shape: tuple[int, ...]
    spared: float
    limit: int


def bid(candidate: Candidate, price: float) -> tuple[float, int | None]:
    """What a slot costs at least at `price`, an error for each MiB, and the rank at which it does; None where that is
    its own matrix."""
    rank = min(int((candidate.squares > price * _mib(candidate, 1)).sum()), candidate.limit)
    shared = float(candidate.squares[rank:].sum()) + price * _mib(candidate, rank)
    private = price * candidate.spared / 2**20
    return (shared, rank) if shared < private else (private, None)


def by_price(candidates: Mapping[str, Candidate], price: float) -> Ranks:
    """The cheapest for every slot at `price`, an error for each MiB. As the price rises, ranks fall and slots share."""
    bids = {name: bid(candidate, price)[1] for name, candidate in candidates.items()}
    return {name: rank for name, rank in bids.items() if rank is not None}


def nbytes(shape: Sequence[int], rank: int) -> int:
    """Bytes of a residual of a matrix [rows, columns]."""
    rows, width = shape
    return rank * (rows + width) * FACTOR_BYTES


def _mib(candidate: Candidate, rank: int) -> float:
    return nbytes(candidate.shape, rank) / 2**20


def distinct(candidates: Mapping[str, Candidate], prices: Sequence[float]) -> list[tuple[float, Ranks]]:
    """The assignments at rising `prices`, from safe to bold, each once, with the first price that gives it; that of
    nothing shared left out."""
    found: list[tuple[float, Ranks]] = []
    for price in prices:
        ranks = by_price(candidates, price)
        if ranks and (not found or ranks != found[-1][1]):
            found.append((price, ranks))
    return found
