"""How much sharing a tensor that takes no residual changes: norms, biases, embeddings, heads."""

import torch
from torch import Tensor

from sandhi_core.evaluation.uses import Use
from sandhi_core.rungs.grams import RIDGE, Gram

_BLOCK = 2**24
"""Elements of a table that are held in float64 at a time."""


def plain_squares(own: Tensor, shared: Tensor, use: Use, offset: float = 0.0) -> Tensor:
    """The error of a model that holds the `shared` tensor in place of its `own`, as a part of the mean squared length
    of what the tensor produces; one number for each place where it acts, falling: what a slot's spectrum says of a
    projection, so that one price decides about both. On the inputs x of the model's own profile split, with D the
    difference:

    - a norm scales its normalised input z by `offset` + w, so that E|D z|^2 / E|(offset + w) z|^2, channel by channel;
    - embeddings have one-hot inputs: their second moment is a diagonal, the frequencies of the tokens. It is ridged as
      Gram.damped is, so that tokens of which no prompt tells count a little;
    - a head is a matrix like any other: E|D x|^2 / E|W x|^2, damped. Tied embeddings act at both ends;
    - a bias is added to what its projection gives: |D|^2 / E|W x + b|^2.

    (What z and x are under other shared tensors is not asked, as for projections.)
    """
    found = []
    if use.whole is not None:
        found.append(_part(float(_difference(own, shared).square().sum()), float(use.whole)))
    if use.rows is not None:
        rows = use.rows.double()
        mean = float(rows.mean())
        found.append(_by_rows(own, shared, rows / (mean if mean > 0 else 1.0) + RIDGE, offset))
    if use.gram is not None:
        found.append(_by_gram(own, shared, use.gram.damped()))
    return torch.tensor(sorted(found, reverse=True), dtype=torch.float64)


def _by_rows(own: Tensor, shared: Tensor, used: Tensor, offset: float) -> float:
    error = whole = 0.0
    for rows in _blocks(own):
        weight = used[rows]
        error += float(weight @ _lengths(_difference(own[rows], shared[rows])))
        whole += float(weight @ _lengths(own[rows].double() + offset))
    return _part(error, whole)


def _by_gram(own: Tensor, shared: Tensor, gram: Gram) -> float:
    error = whole = 0.0
    for rows in _blocks(own):
        error += gram.energy(_difference(own[rows], shared[rows]))
        whole += gram.energy(own[rows])
    return _part(error, whole)


def _blocks(table: Tensor) -> list[slice]:
    step = max(1, _BLOCK // max(1, table[0].numel()))
    return [slice(at, at + step) for at in range(0, len(table), step)]


def _lengths(rows: Tensor) -> Tensor:
    return rows.square().reshape(len(rows), -1).sum(dim=1)


def _difference(own: Tensor, shared: Tensor) -> Tensor:
    return own.double() - shared.double()


def _part(error: float, whole: float) -> float:
    """Outputs of nought take no error at all."""
    return error / whole if whole > 0 else torch.inf if error > 0 else 0.0
