"""How many bytes of residual each slot of a model gets, by one number for the whole model.

A price says what error a MiB must take off. Sharing a slot without a residual, with one of any rank, the same with
vectors of the rows, and keeping the model's own matrix (no error, all bytes) are bids of one auction; each slot takes
the cheapest. This is Lagrangian allocation of a byte budget (Everett 1963, "Generalized Lagrange Multiplier Method";
Shoham and Gersho 1988 for bits): of all assignments with as few bytes, none has less error in sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LADDER_VERSION = 3
"""Of everything between a plan and its ladder: changes whenever the same models and questions would give other
moments, spectra or rungs, or another climb."""

FACTOR_BYTES = 2
"""Of one element of a residual: bfloat16."""


class Bid(NamedTuple):
    """What a slot adds to its shared tensor: a residual of `rank`, and with `affine` a scale and a shift a row."""

    rank: int
    affine: bool = False


Ranks = dict[str, Bid]
"""Tensor name to what is added there; a slot that is not named keeps its own matrix."""

PRICES = tuple(2.0 ** (n / 4) for n in range(-80, 45))
"""Tried, from safe to bold: four to an octave. Error is a part of the slot's outputs (their mean squared length), or
that of a slot on which answers depend as on the average one."""


@dataclass(frozen=True)
class Candidate:
    """One slot that may take a shared tensor of `shape` (rows, columns; a vector is one column). `squares`: falling,
    what each direction of the difference adds to the mean squared error of the slot's outputs, as a part of their mean
    squared length (of what takes no residual: each place where it acts); `spared`: bytes that the pool spares where the
    slot shares; `limit`: the largest rank of a residual (0: none); `affine`: the `squares` of what differs once rows
    are scaled and shifted, where that is offered."""

    squares: npt.NDArray[np.float64]
    shape: tuple[int, ...]
    spared: float
    limit: int
    affine: npt.NDArray[np.float64] | None = None


def bid(candidate: Candidate, price: float, own: bool = True) -> tuple[float, Bid | None]:
    """What a slot costs at least at `price`, an error for each MiB, and what it adds at that cost; None where it keeps
    its own matrix, which it never does without `own`."""
    kinds = (False, True) if candidate.affine is not None else (False,)
    cost, added = min((_cheapest(candidate, affine, price) for affine in kinds), key=lambda found: found[0])
    private = price * candidate.spared / 2**20
    return (cost, added) if cost < private or not own else (private, None)


def by_price(candidates: Mapping[str, Candidate], price: float, own: bool = True) -> Ranks:
    """The cheapest for every slot at `price`, an error for each MiB. As the price rises, what is added takes fewer
    bytes and slots share, though a slot may give up its vectors for one more direction. Without `own` no slot may keep
    its own matrix, whatever that costs."""
    bids = {name: bid(candidate, price, own)[1] for name, candidate in candidates.items()}
    return {name: added for name, added in bids.items() if added is not None}


def nbytes(shape: Sequence[int], rank: int, affine: bool = False) -> int:
    """Bytes of a residual of a matrix [rows, columns]."""
    rows, width = shape
    return (rank * (rows + width) + 2 * rows * affine) * FACTOR_BYTES


def _cheapest(candidate: Candidate, affine: bool, price: float) -> tuple[float, Bid]:
    """Of all ranks, with its cost."""
    squares = candidate.affine if affine and candidate.affine is not None else candidate.squares
    direction = nbytes(candidate.shape, 1) / 2**20
    rank = min(int((squares > price * direction).sum()), candidate.limit)
    mib = nbytes(candidate.shape, rank, affine) / 2**20
    return float(squares[rank:].sum()) + price * mib, Bid(rank, affine)


def distinct(
    candidates: Mapping[str, Candidate], prices: Sequence[float], own: bool = True
) -> list[tuple[float, Ranks]]:
    """The assignments at rising `prices`, from safe to bold, each once, with the first price that gives it; that of
    nothing shared left out."""
    found: list[tuple[float, Ranks]] = []
    for price in prices:
        ranks = by_price(candidates, price, own)
        if ranks and (not found or ranks != found[-1][1]):
            found.append((price, ranks))
    return found
