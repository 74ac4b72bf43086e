"""Means and deviations of matrix rows, the same to the bit however the work is cut up.

Sums are numpy's pairwise ones in fp64, row by row and on one thread: a row's statistics depend on its values
only, neither on the block of rows it comes in nor on the number of threads.
"""

from threading import local
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Doubles = npt.NDArray[np.float64]

_BLOCK = 1 << 18  # elements at once, 2 MiB in fp64: near the processor, and threads seldom wait for one another
_PIECE = 16384  # columns at once; longer rows are put together from pieces
_kept = local()


class RowStatistics(NamedTuple):
    """Mean and population standard deviation of every row of a matrix: float32, shape (rows,)."""

    mean: Tensor
    std: Tensor


def row_statistics_of(block: Tensor) -> RowStatistics:
    """Row statistics of a matrix or of some of its rows, accumulated in fp64 and rounded to fp32 once."""
    return rounded(*row_moments(block), block.shape[1])


def rounded(mean: Doubles, squares: Doubles, width: int) -> RowStatistics:
    """Row statistics from row_moments of rows of `width` elements."""
    std = np.sqrt(squares / max(1, width))
    return RowStatistics(*(torch.from_numpy(v).to(torch.float32) for v in (mean, std)))


def rows_at_once(width: int) -> int:
    """How many rows of `width` elements make up one block."""
    return max(1, _BLOCK // max(1, min(width, _PIECE)))


def row_moments(matrix: Tensor) -> tuple[Doubles, Doubles]:
    """Mean and sum of squared deviations of every row of a matrix of real numbers, shape (rows,) each. A mean
    is finite iff all its row is. Pieces of long rows are combined as in Chan, Golub and LeVeque (1979)."""
    height, width = matrix.shape
    mean, squares = np.zeros(height), np.zeros(height)
    step = rows_at_once(width)
    for start in range(0, height, step):
        rows = slice(start, min(start + step, height))
        for left in range(0, width, _PIECE):
            piece = matrix[rows, left : left + _PIECE]
            with np.errstate(invalid="ignore", over="ignore"):  # infinities are for the caller to see
                _add(mean[rows], squares[rows], left, piece)
    return mean, squares


def _room(shape: torch.Size) -> Doubles:
    """For a block in fp64, one in a thread. Blocks that come and go would not be given back to the system: between them
    lies what is kept of every tensor."""
    rows, columns = shape
    if not hasattr(_kept, "room"):
        _kept.room = np.empty(_BLOCK)
    room: Doubles = _kept.room[: rows * columns].reshape(rows, columns)
    return room


def _add(mean: Doubles, squares: Doubles, seen: int, piece: Tensor) -> None:
    """Take `piece` (rows, columns) into the moments of what the `seen` columns before it held."""
    values = _room(piece.shape)
    torch.from_numpy(values).copy_(piece)
    count = values.shape[1]
    middle = values.sum(axis=1) / count
    values -= middle[:, None]
    values *= values
    delta = middle - mean
    squares += values.sum(axis=1) + delta * delta * (seen * count / (seen + count))
    mean += delta * (count / (seen + count))
