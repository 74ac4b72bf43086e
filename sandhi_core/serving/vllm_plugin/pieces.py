"""Which part of a stored matrix a process works with, as a function of shapes and ranks; knows no engine.

An engine fuses matrices that are stored apart (q, k and v; gate and up) and splits each among the ranks of a
tensor-parallel group: by rows where ranks share the outputs (column parallel, in the words of Megatron-LM), by columns
where they share the inputs (row parallel). A piece is always one range of rows and one of columns, hence a view.
Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from sandhi_core.rungs.residual import Residual

Range = tuple[int, int]
"""From the first up to, but not including, the second."""


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


def by_rows(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    logical: Sequence[int],
    held: Sequence[int],
    rank: int,
    ranks: int,
) -> tuple[Piece, ...]:
    """The pieces of a layer whose ranks share its outputs, one for each logical matrix.

    `shapes` are those of the stored matrices: one for each logical matrix, or one that holds all. `logical`: rows of
    each logical matrix (only looked at where one is stored for all); `held`: how many of them this rank holds. Where
    a matrix has fewer rows than all ranks hold together, neighbouring ranks hold the same ones (heads of keys and
    values under more ranks than heads).

    Raises ValueError with the reason where shapes and ranks do not go together.
    """
    if len(names) == len(held):
        whole = [(name, 0, shape) for name, shape in zip(names, shapes, strict=True)]
        rows = [shape[0] for shape in shapes]
    elif len(names) == 1:
        starts = [0, *accumulate(logical)]
        if shapes[0][0] != starts[-1]:
            raise ValueError(f"has {shapes[0][0]} rows, the layer has {starts[-1]}")
        whole = [(names[0], start, shapes[0]) for start in starts[:-1]]
        rows = list(logical)
    else:
        raise ValueError(f"the layer is made of {len(held)} matrices, {len(names)} are stored")
    pieces = []
    before = 0
    for (name, start, shape), count, mine in zip(whole, rows, held, strict=True):
        at = start + _share(count, mine, rank, ranks) * mine
        pieces.append(Piece(name, (at, at + mine), (0, shape[1]), before))
        before += mine if len(names) == 1 else 0
    return tuple(pieces)


def _share(rows: int, held: int, rank: int, ranks: int) -> int:
    """Which of the equal shares of some rows is a rank's."""
    shares, rest = divmod(rows, held) if held else (0, rows)
    if rest or not shares or ranks % shares:
        raise ValueError(f"{rows} rows cannot be {held} of each of {ranks} ranks")
    return rank // (ranks // shares)


def by_columns(name: str, shape: tuple[int, ...], held: int, rank: int, ranks: int) -> Piece:
    """The piece of a layer whose ranks share its inputs and sum their outputs; `held` is how many columns this rank
    holds. Raises ValueError with the reason where they do not go together."""
    if shape[1] != held * ranks:
        raise ValueError(f"{shape[1]} columns cannot be {held} of each of {ranks} ranks")
    return Piece(name, (0, shape[0]), (rank * held, (rank + 1) * held), first=rank == 0)


def of_vocabulary(name: str, shape: tuple[int, ...], tokens: int, held: Range) -> Piece:
    """The piece of an embedding or a head; `held`: this rank's tokens, without those that only pad.

    Raises ValueError with the reason where the matrix has not a row for every token, or the rank has none.
    """
    if shape[0] != tokens:
        raise ValueError(f"has {shape[0]} rows, the vocabulary has {tokens} tokens")
    if held[0] >= held[1]:
        raise ValueError(f"a vocabulary of {tokens} tokens leaves a rank without any")
    return Piece(name, held, (0, shape[1]))
