"""What a process works with of a stored matrix, as views; knows no engine.

A piece is one range of rows and one of columns, hence a view: a rank's slice of a matrix that is stored fused is
several (slices.py). An engine fuses matrices that are stored apart (q, k and v; gate and up) as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from sandhi_core.rungs.residual import Residual
from sandhi_core.serving.slices import Range, Slice


@dataclass(frozen=True)
class Piece:
    """Rows and columns of the matrix that is stored as `name`. `start`: its first row within all that its rank holds of
    the matrix. `first`: of the pieces whose outputs are summed it is the one that adds what must be added once."""

    name: str
    rows: Range
    columns: Range
    start: int = 0
    first: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of(self, matrix: Tensor) -> Tensor:
        """A view of the whole matrix."""
        return matrix[slice(*self.rows), slice(*self.columns)]

    def of_slice(self, held: Tensor) -> Tensor:
        """A view of what its rank holds of the matrix."""
        return held[self.start : self.start + self.shape[0]]

    def of_residual(self, residual: Residual) -> Residual:
        """What goes with the piece of what is added to the whole matrix: the sum over all pieces of s * (W x) + t +
        B (A x) is that of the whole."""
        rows, columns = slice(*self.rows), slice(*self.columns)
        up, down, scale, shift = residual.up, residual.down, residual.scale, residual.shift
        if shift is not None:
            shift = shift[rows] if self.first else shift[rows].new_zeros(self.shape[0])
        return Residual(
            up=None if up is None else up[rows],
            down=None if down is None else down[:, columns],
            scale=None if scale is None else scale[rows],
            shift=shift,
        )


def stored_names(layer: str, fused: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """What the matrices of an engine's layer are stored as, in the order in which it puts their rows one after
    another. `fused`: the last part of a layer's name to those of the layers that it is made of."""
    parent, dot, last = layer.rpartition(".")
    return tuple(f"{parent}{dot}{part}.weight" for part in fused.get(last, (last,)))


def pieces(name: str, shape: Sequence[int], held: Slice) -> tuple[Piece, ...]:
    """What a rank holds of a matrix of this shape, in order."""
    rows, columns = shape
    if held.dimension == 1:
        return tuple(Piece(name, (0, rows), part, first=held.first) for part in held.ranges)
    ranges = held.ranges or ((0, rows),)
    starts = accumulate((end - start for start, end in ranges), initial=0)
    return tuple(Piece(name, part, (0, columns), start) for part, start in zip(ranges, starts, strict=False))
