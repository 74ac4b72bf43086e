"""Recipe -> tensor. Every model that accepts a recipe holds the same bytes, whoever else accepts it and when.

`mean`: that of the contributors' *original* weights, added up in fp32 in the recipe's order, divided once and
cast once: averaging step by step in bf16 loses most small differences. `rescale: common` then gives every
row the mean of the contributors' row means and row standard deviations (SANDHI's row-wise affine
correction, but one and the same for all members: an average of weights that do not correlate has too small
a spread). `regmean`: the contributors weighted by their own inputs (rungs.grams). `member` and `base`: a tensor as
it is.
"""

import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from sandhi_core.checkpoints.scan import RowStatistics, row_statistics_of
from sandhi_core.errors import MergeError
from sandhi_core.records import Contributor, Recipe
from sandhi_core.rungs.grams import Gram, regmean
from sandhi_core.threads import one_thread

BLOCK_BYTES = 2**20
"""Size of the fp32 accumulator: what a merge needs beyond its result, up to a small factor. With more than this it
waits for memory instead of the processor's cache, three times as long."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def merge(
    recipe: Recipe,
    tensors: Sequence[Tensor],
    rows: Sequence[RowStatistics] | None,
    grams: Sequence[Gram] | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Tensor:
    """The recipe's tensor, of its shape (rows, columns; a vector is one row) and dtype.

    `tensors` and, for `rescale: common`, `rows` (float32 row means and population standard deviations) are
    those of the contributors, in the recipe's order; so are, for `regmean`, `grams`, the second moments of their
    inputs. The bytes depend on neither `block_bytes` nor the number of threads: a mean's arithmetic is element by
    element, row statistics are taken row by row, and systems of equations are solved by one thread. A tensor that is
    taken as it is comes back as the contributor's own, not as a copy.

    Raises MergeError where a contributor is not as recorded, or the result is not finite in the recipe's
    dtype.
    """
    if (rows is not None) != (recipe.rescale == "common"):
        raise ValueError("row statistics belong to `rescale: common`, and only to it")
    if (grams is not None) != (recipe.method == "regmean"):
        raise ValueError("moments of inputs belong to `regmean`, and only to it")
    _check(recipe, tensors)
    if recipe.taken is not None:
        return tensors[0]
    if grams is not None:
        with one_thread():
            return _finite(recipe, regmean(tensors, grams).to(DTYPES[recipe.dtype]))
    height, width = recipe.shape if len(recipe.shape) == 2 else (1, *recipe.shape)
    target = _common(rows) if rows is not None else None
    step = max(1, block_bytes // (4 * width))
    tensors = [t.reshape(height, width) for t in tensors]
    merged = torch.empty(height, width, dtype=DTYPES[recipe.dtype])
    room = torch.empty(2, min(step, height), width)  # for all blocks: memory that comes and goes costs more
    for start in range(0, height, step):
        block = slice(start, min(start + step, height))
        mean = _mean([t[block] for t in tensors], room)
        if target is not None:
            mean = _rescaled(mean, RowStatistics(target.mean[block], target.std[block]))
        _finite(recipe, merged[block].copy_(mean))
    return merged.reshape(recipe.shape)


def _finite(recipe: Recipe, made: Tensor) -> Tensor:
    if not bool(torch.stack(made.aminmax()).isfinite().all()):  # one NaN makes both so; isfinite of all takes 20 times
        _refuse(recipe.contributors[0], "the merged tensor is not finite", "leave these models' slot out")
    return made


def squared_distance(one: Tensor, other: Tensor, *, block_bytes: int = BLOCK_BYTES) -> float:
    """Between two matrices of one shape, in float64, row by row: of the same bits for either order."""
    step = max(1, block_bytes // (8 * one.shape[1]))
    rows = [
        (one[start : start + step].double() - other[start : start + step].double()).square().sum(1)
        for start in range(0, len(one), step)
    ]
    return math.fsum(torch.cat(rows).tolist())


def _mean(tensors: Sequence[Tensor], room: Tensor) -> Tensor:
    """In fp32, in `room` (2, at least as many rows, columns)."""
    total, one = room[:, : len(tensors[0])].unbind()
    total.copy_(tensors[0])
    for tensor in tensors[1:]:
        total += one.copy_(tensor)
    return total.div_(len(tensors))


def _common(rows: Sequence[RowStatistics]) -> RowStatistics:
    """What the shared tensor's rows are given: the means of the contributors' row means and deviations."""

    def mean(of: Sequence[Tensor]) -> Tensor:
        return _mean(of, torch.empty(2, *of[0].shape))

    return RowStatistics(mean([r.mean for r in rows]), mean([r.std for r in rows]))


def _rescaled(block: Tensor, target: RowStatistics) -> Tensor:
    """`block` (rows, columns) with the target's row means and deviations; a constant row has its mean set, and so has
    one that varies by so little that no number widens it."""
    found = row_statistics_of(block)
    scale = target.std / found.std
    scale = torch.where((found.std > 0) & scale.isfinite(), scale, 0.0)
    return block.sub_(found.mean[:, None]).mul_(scale[:, None]).add_(target.mean[:, None])


def _check(recipe: Recipe, tensors: Sequence[Tensor]) -> None:
    for contributor, tensor in zip(recipe.contributors, tensors, strict=True):
        if tuple(tensor.shape) != recipe.shape or tensor.dtype != DTYPES[recipe.dtype]:
            _refuse(
                contributor,
                f"has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                f"but its group was formed for {recipe.shape} and {recipe.dtype}",
                "build again, so that the model's checkpoint stage sees the new files",
            )


def _refuse(contributor: Contributor, message: str, remedy: str) -> NoReturn:
    raise MergeError(message, model=contributor.model, tensor=contributor.tensor, remedy=remedy)
