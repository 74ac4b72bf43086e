"""What a model adds to a shared tensor: a low-rank residual, truncated where its own inputs notice least, and where
it pays a scale and a shift of the rows.

y = W x + B (A x), or y = s * (W x) + t + B (A x). The difference of the model's own matrix from the shared one, its
rows scaled, is multiplied by a square root of the inputs' second moment, or with a shift of their covariance, before
its singular value decomposition, so that truncation spares what the outputs depend on.
Sources: SVD-LLM (Wang et al. 2024, arXiv:2403.07378, section 3.1, truncation-aware whitening); QERA (Zhang et al. 2024,
arXiv:2410.06040, theorem 1, the symmetric root).

Scale and shift are the least squares of each row's own outputs on its shared ones, the regression with intercept of
Gauss and Legendre under the inputs' moments. Their fixed ancestor is the row-wise affine correction of SANDHI, which
matches mean and deviation of a row's weights and knows no inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear as linear_map

from sandhi_core.rungs.allotment import nbytes
from sandhi_core.rungs.grams import Gram
from sandhi_core.threads import one_thread

DTYPE = torch.bfloat16
"""What residuals are stored in."""


@dataclass(frozen=True)
class Residual:
    """`up` [rows, rank] and `down` [rank, width], as they are stored, both or neither; `scale` and `shift`, [rows],
    likewise."""

    up: Tensor | None = None
    down: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.down is None else len(self.down)

    @property
    def parts(self) -> dict[str, Tensor]:
        """What is there, by name."""
        return {name: part for name, part in vars(self).items() if part is not None}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


_PARTS = tuple(f"residual_{field.name}" for field in fields(Residual))  # of a layer, each a buffer


class Attached:
    """A residual that a linear layer applies, until `remove`."""

    def __init__(self, linear: Module, residual: Residual) -> None:
        self._linear = linear
        # As buffers they follow the model to other devices; none is part of its state.
        self._names = [f"residual_{name}" for name in residual.parts]
        for name, part in zip(self._names, residual.parts.values(), strict=True):
            linear.register_buffer(name, part, persistent=False)
        hooks = [hook for hook, first in ((_moving, residual.scale), (_adding, residual.down)) if first is not None]
        self._handles = [linear.register_forward_hook(hook) for hook in hooks]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for name in self._names:
            delattr(self._linear, name)


def attach(linear: Module, residual: Residual) -> Attached:
    """Let a linear layer that holds a shared matrix answer s * (W x) + t + b + B (A x), or as much of that as the
    residual has, computed in its own dtype; factors and vectors are kept as they are stored. Whatever is served applies
    residuals by this function, and so does whatever is scored."""
    weight = cast(Tensor, linear.weight)
    return Attached(linear, Residual(**{name: part.to(weight.device) for name, part in residual.parts.items()}))


def moved(output: Tensor, scale: Tensor, shift: Tensor, bias: Tensor | None) -> Tensor:
    """`output` [..., rows], scaled and shifted by its rows."""
    scale, shift = scale.to(output.dtype), shift.to(output.dtype)
    # The output has the bias in it, which is not to be scaled.
    return scale * output + (shift if bias is None else shift + bias - scale * bias)


def added(output: Tensor, inputs: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """`output` [..., rows], and what the factors make of `inputs` [..., width]."""
    return output + linear_map(linear_map(inputs, down.to(output.dtype)), up.to(output.dtype))


def _moving(linear: Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    scale, shift = cast(Tensor, linear.residual_scale), cast(Tensor, linear.residual_shift)
    return moved(output, scale, shift, cast(Tensor | None, linear.bias))


def _adding(linear: Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return added(output, inputs[0], cast(Tensor, linear.residual_down), cast(Tensor, linear.residual_up))


def factors(model: Module) -> list[Tensor]:
    """Those of all residuals that are attached to layers of a model, and the vectors."""
    return [factor for name, factor in model.named_buffers() if name.rpartition(".")[2] in _PARTS]


@dataclass(frozen=True)
class Weighting:
    """How much a matrix's columns matter on a model's own inputs: their damped second moment, and of each of its blocks
    the symmetric square root and the inverse of that. Where outputs are shifted the roots are those of the covariance,
    and `centre`, [width], is what the inputs are on average."""

    gram: Gram
    roots: tuple[tuple[Tensor, Tensor], ...]
    centre: Tensor | None = None

    def applied(self, matrix: Tensor) -> Tensor:
        """`matrix` [rows, width] times the roots: the squared length of a row is the mean square of its output."""
        pairs = zip(self.gram.spans, self.roots, strict=True)
        return torch.cat([matrix[:, span] @ root for span, (root, _) in pairs], dim=1)


@one_thread()
def weighting(gram: Gram, affine: bool = False) -> Weighting:
    """Of differences that a residual alone is to make up for, or `affine` a residual beside scale and shift. Its bits
    do not depend on the number of threads."""
    damped = gram.damped()
    weighs = damped.centred() if affine else damped
    return Weighting(damped, tuple(_root(b) for b in weighs.blocks), gram.centre.double() if affine else None)


@dataclass(frozen=True)
class Spectrum:
    """The difference of one slot, decomposed. `squares`: falling, what each direction adds to the mean squared error of
    the outputs, as a part of the mean squared length of the original's (without limit where these are nought)."""

    up: Tensor  # [rows, n], float64
    down: Tensor  # [n, width], float64
    squares: Tensor  # [n], float64
    scale: Tensor | None = None  # [rows], as it is stored: the difference is from the shared matrix so scaled
    drift: Tensor | None = None  # [rows], float64: the outputs of the difference on average
    centre: Tensor | None = None  # [width], float64: the inputs on average

    def truncated(self, rank: int) -> Residual:
        return cut(self._stored(rank), rank)

    def kept(self, limit: int) -> dict[str, Tensor]:
        """What is worth keeping, for `cut`: all `squares`, and of `up` and `down` as many directions as take `limit`
        bytes."""
        return self._stored(min(len(self.squares), limit // nbytes((len(self.up), self.down.shape[1]), 1)))

    def _stored(self, rank: int) -> dict[str, Tensor]:
        up, down = self.up[:, :rank].to(DTYPE).contiguous(), self.down[:rank].to(DTYPE).contiguous()
        found = {"squares": self.squares, "up": up, "down": down}
        if self.scale is None or self.drift is None or self.centre is None:
            return found
        return {**found, "scale": self.scale, "drift": self.drift, "along": down.double() @ self.centre}


def cut(found: Mapping[str, Tensor], rank: int) -> Residual:
    """The residual of `rank` of a spectrum that was kept. Its shift is what the others leave of the outputs' mean."""
    up, down = found["up"][:, :rank].contiguous(), found["down"][:rank].contiguous()
    factors = {"up": up, "down": down} if rank else {}
    if "scale" not in found:
        return Residual(**factors)
    shift = found["drift"] - up.double() @ found["along"][:rank]
    return Residual(**factors, scale=found["scale"], shift=shift.to(DTYPE))


@one_thread()
def spectrum(own: Tensor, shared: Tensor, on: Weighting) -> Spectrum:
    """Of what the model's `own` matrix [rows, width] differs from the `shared` one in, weighted as its inputs are. In a
    weighting for scale and shift, of what it differs from the scaled one in. Its bits do not depend on the number of
    threads: a residual that was lost is made again, perhaps by another."""
    own, shared = own.double(), shared.double()
    scale = None if on.centre is None else _row_scale(on.applied(own), on.applied(shared))
    difference = own - (shared if scale is None else scale.double()[:, None] * shared)
    up, values, down = _decomposed(on.applied(difference))
    pairs = zip(on.gram.spans, on.roots, strict=True)
    down = torch.cat([down[:, s] @ inverse for s, (_, inverse) in pairs], dim=1)
    whole = on.gram.energy(own)
    squares = values.square()
    # Outputs of nought take no error at all.
    squares = squares / whole if whole > 0 else torch.where(squares > 0, torch.inf, 0.0).to(squares)
    # Balanced, so that neither factor is rounded in a range of its own; a vanished direction stays one.
    even = values.sqrt()
    drift = None if on.centre is None else difference @ on.centre
    return Spectrum(up * even, even[:, None] * down, squares, scale, drift, on.centre)


def _decomposed(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors and values of a float64 `matrix` [rows, width], values falling, by the eigenvectors of its
    shorter side's Gram matrix: several times faster than a decomposition of the whole. Whatever the smallest values
    are exact to, as many directions as are taken give the matrix projected on them; one without length is nought."""
    tall = matrix.shape[0] > matrix.shape[1]
    side = matrix.T if tall else matrix
    _, vectors = torch.linalg.eigh(side @ side.T)
    vectors = vectors.flip(1)
    other = vectors.T @ side
    values = other.square().sum(1).sqrt()
    order = values.argsort(descending=True, stable=True)  # rounding may have swapped neighbours
    vectors, other, values = vectors[:, order], other[order], values[order]
    other = torch.where(values[:, None] > 0, other / values[:, None], 0.0)
    return (other.T, values, vectors.T) if tall else (vectors, values, other)


def _row_scale(own: Tensor, shared: Tensor) -> Tensor:
    """What brings each row of `shared` nearest to that of `own`, as it is stored; 1 where nothing does."""
    scale = ((own * shared).sum(1) / shared.square().sum(1)).to(DTYPE)
    return torch.where(scale.isfinite(), scale, torch.ones_like(scale))


def _root(block: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a positive definite matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(block)
    root = values.clamp_min(torch.finfo(values.dtype).tiny).sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
