"""What a model adds to a shared tensor: a low-rank residual, truncated where its own inputs notice least.

y = W x + B (A x). The difference of the model's own matrix from the shared one is multiplied by a square root of the
inputs' second moment before its singular value decomposition, so that truncation spares what the outputs depend on.
Sources: SVD-LLM (Wang et al. 2024, arXiv:2403.07378, section 3.1, truncation-aware whitening); QERA (Zhang et al. 2024,
arXiv:2410.06040, theorem 1, the symmetric root).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear as linear_map
from torch.utils.hooks import RemovableHandle

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

    def added(self, shared: Tensor) -> Tensor:
        """The matrix that `shared` and the residual act as, in float32."""
        return shared.float() + self.up.float() @ self.down.float()


def attach(linear: Module, residual: Residual) -> RemovableHandle:
    """Let a linear layer that holds a shared matrix answer W x + b + B (A x), in its own dtype and on its own device.
    Whatever is served applies residuals by this function, and so does whatever is scored."""
    weight = cast(Tensor, linear.weight)
    up, down = (factor.to(weight.device, weight.dtype) for factor in (residual.up, residual.down))

    def adding(module: Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear_map(linear_map(inputs[0], down), up)

    return linear.register_forward_hook(adding)


@dataclass(frozen=True)
class Spectrum:
    """The difference of one slot, decomposed. `squares`: falling squared singular values, each what its direction adds
    to the mean squared error of the outputs; `whole`: the mean squared length of the original's outputs."""

    up: Tensor  # [rows, n], scaled by the singular values
    down: Tensor  # [n, width]
    squares: Tensor  # [n], float64
    whole: float

    def rank(self, error: float) -> int:
        """The smallest rank that leaves at most `error` of `whole` in the outputs."""
        left = self.squares.flip(0).cumsum(0).flip(0)  # of rank 0, 1, ...
        return int((left > error * self.whole).sum())

    def gain(self, rank: int) -> float:
        """Part of `whole` that the direction after so many would still take off the error; nought after the last."""
        return float(self.squares[rank]) / self.whole if rank < len(self.squares) and self.whole > 0 else 0.0

    def truncated(self, rank: int) -> Residual:
        return Residual(self.up[:, :rank].to(DTYPE).contiguous(), self.down[:rank].to(DTYPE).contiguous())


def spectrum(own: Tensor, shared: Tensor, gram: Gram) -> Spectrum:
    """Of what the model's `own` matrix [rows, width] differs from the `shared` one in, on inputs of second moment
    `gram`."""
    damped = gram.damped()
    difference = own.double() - shared.double()
    roots = [_root(block) for block in damped.blocks]
    weighted = torch.cat([difference[:, s] @ root for s, (root, _) in zip(damped.spans, roots, strict=True)], dim=1)
    up, values, down = torch.linalg.svd(weighted, full_matrices=False)
    down = torch.cat([down[:, s] @ inverse for s, (_, inverse) in zip(damped.spans, roots, strict=True)], dim=1)
    # Balanced, so that neither factor is rounded in a range of its own; a vanished direction stays one.
    even = values.sqrt()
    return Spectrum(up * even, even[:, None] * down, values.square(), damped.energy(own))


def _root(block: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(block)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def nbytes(shape: Sequence[int], rank: int) -> int:
    """Bytes of a residual of a matrix [rows, width]."""
    rows, width = shape
    return rank * (rows + width) * DTYPE.itemsize
