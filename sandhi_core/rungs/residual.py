"""What a model adds to a shared tensor: a low-rank residual, truncated where its own inputs notice least.

y = W x + B (A x). The difference of the model's own matrix from the shared one is multiplied by a square root of the
inputs' second moment before its singular value decomposition, so that truncation spares what the outputs depend on.
Sources: SVD-LLM (Wang et al. 2024, arXiv:2403.07378, section 3.1, truncation-aware whitening); QERA (Zhang et al. 2024,
arXiv:2410.06040, theorem 1, the symmetric root).
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear as linear_map

from sandhi_core.rungs.allotment import nbytes
from sandhi_core.rungs.grams import Gram

DTYPE = torch.bfloat16
"""What residuals are stored in."""


@dataclass(frozen=True)
class Residual:
    """`up` [rows, rank] and `down` [rank, width], as they are stored."""

    up: Tensor
    down: Tensor

    @property
    def rank(self) -> int:
        return int(self.up.shape[1])

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes


class Attached:
    """A residual that a linear layer applies, until `remove`."""

    def __init__(self, linear: Module, residual: Residual) -> None:
        self._linear = linear
        # As buffers they follow the model to other devices; none is part of its state.
        linear.register_buffer("residual_down", residual.down, persistent=False)
        linear.register_buffer("residual_up", residual.up, persistent=False)
        self._handle = linear.register_forward_hook(_adding)

    def remove(self) -> None:
        self._handle.remove()
        del self._linear.residual_down, self._linear.residual_up


def attach(linear: Module, residual: Residual) -> Attached:
    """Let a linear layer that holds a shared matrix answer W x + b + B (A x), computed in its own dtype; the factors
    are kept as they are stored. Whatever is served applies residuals by this function, and so does whatever is
    scored."""
    weight = cast(Tensor, linear.weight)
    return Attached(linear, Residual(residual.up.to(weight.device), residual.down.to(weight.device)))


def _adding(linear: Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    down, up = (cast(Tensor, factor).to(output.dtype) for factor in (linear.residual_down, linear.residual_up))
    return output + linear_map(linear_map(inputs[0], down), up)


def factors(model: Module) -> list[Tensor]:
    """Those of all residuals that are attached to layers of a model."""
    names = ("residual_down", "residual_up")
    return [factor for name, factor in model.named_buffers() if name.rpartition(".")[2] in names]


@dataclass(frozen=True)
class Weighting:
    """How much a matrix's columns matter on a model's own inputs: their damped second moment, and of each of its blocks
    the symmetric square root and the inverse of that."""

    gram: Gram
    roots: tuple[tuple[Tensor, Tensor], ...]


def weighting(gram: Gram) -> Weighting:
    damped = gram.damped()
    return Weighting(damped, tuple(_root(block) for block in damped.blocks))


@dataclass(frozen=True)
class Spectrum:
    """The difference of one slot, decomposed. `squares`: falling, what each direction adds to the mean squared error of
    the outputs, as a part of the mean squared length of the original's (without limit where these are nought)."""

    up: Tensor  # [rows, n], float64
    down: Tensor  # [n, width], float64
    squares: Tensor  # [n], float64

    def truncated(self, rank: int) -> Residual:
        return Residual(self.up[:, :rank].to(DTYPE).contiguous(), self.down[:rank].to(DTYPE).contiguous())

    def kept(self, limit: int) -> dict[str, Tensor]:
        """What is worth keeping: all `squares`, and of `up` and `down` as many directions as take `limit` bytes."""
        rank = min(len(self.squares), limit // nbytes((len(self.up), self.down.shape[1]), 1))
        residual = self.truncated(rank)
        return {"squares": self.squares, "up": residual.up, "down": residual.down}


def spectrum(own: Tensor, shared: Tensor, on: Weighting) -> Spectrum:
    """Of what the model's `own` matrix [rows, width] differs from the `shared` one in, weighted as its inputs are."""
    difference = own.double() - shared.double()
    spans = on.gram.spans
    weighted = torch.cat([difference[:, s] @ root for s, (root, _) in zip(spans, on.roots, strict=True)], dim=1)
    up, values, down = torch.linalg.svd(weighted, full_matrices=False)
    down = torch.cat([down[:, s] @ inverse for s, (_, inverse) in zip(spans, on.roots, strict=True)], dim=1)
    whole = on.gram.energy(own)
    squares = values.square()
    # Outputs of nought take no error at all.
    squares = squares / whole if whole > 0 else torch.where(squares > 0, torch.inf, 0.0).to(squares)
    # Balanced, so that neither factor is rounded in a range of its own; a vanished direction stays one.
    even = values.sqrt()
    return Spectrum(up * even, even[:, None] * down, squares)


def _root(block: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(block)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
