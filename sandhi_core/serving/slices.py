"""Which part of every matrix one rank of tensor parallelism works with: pure, from the architecture tables.

    slices = Slices("legal", config, size=2, rank=1)
    slices.of("model.layers.0.self_attn.q_proj.weight")   # Slice(0, ((2048, 4096),)): the upper half of its rows
    slices.of("model.layers.0.mlp.down_proj.weight").of(tensor)   # a view of its columns

Names may have `model.` in front or not. The division is Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053, section
3) as vLLM lays it out. A column parallel layer (its outputs are divided) is divided by rows, a row parallel one (its
inputs are divided, and the outputs of all ranks summed) by columns. Query heads go in equal numbers; key and value
heads too, or, where there are more ranks than heads, each head to several neighbouring ranks; embeddings and head in
equal numbers of rows, counting those that pad the vocabulary to a multiple of 64, which no rank holds. A fused matrix
(qkv, gate_up) is divided within each of its parts, so a rank's slice of it is several ranges of rows.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sandhi_core.checkpoints.architectures import Experts, Matrix
from sandhi_core.checkpoints.meaning import EMBEDDING, HEAD, Meaning
from sandhi_core.errors import ServingError
from sandhi_core.records import ExportedTensor

VOCABULARY_PADDING = 64
"""vLLM's: the rows of embeddings and head are a multiple of it (vocab_parallel_embedding.py, 0.32)."""

Range = tuple[int, int]
"""From the first up to, but not including, the second."""
_ROW_PARALLEL = ("o", "down")
_LAYER = re.compile(r"layers\.[0-9]{1,6}\.")


def matrices(tensors: Mapping[str, ExportedTensor], shared: Collection[str]) -> dict[str, ExportedTensor]:
    """Those of a model's shared tensors that engines map. Norms and biases, a thousandth, they copy."""
    return {name: tensors[name] for name in sorted(shared) if len(tensors[name].shape) == 2}


@dataclass(frozen=True, order=True)
class Slice:
    """Ranges of a matrix's rows (`dimension` 0) or columns (1), one after another. Without ranges: the whole matrix.
    `first`: where the outputs of several ranks are summed, this one's has what is to be added once."""

    dimension: Literal[0, 1] = 0
    ranges: tuple[Range, ...] = ()
    first: bool = True

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The slice's shape, of a matrix of this shape."""
        if not self.ranges:
            return tuple(shape)
        length = sum(end - start for start, end in self.ranges)
        return (*shape[: self.dimension], length, *shape[self.dimension + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """The slice of a matrix. A view where it is one range (of columns: not contiguous), else a copy."""
        if not self.ranges:
            return tensor
        parts = [tensor.narrow(self.dimension, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)


WHOLE = Slice()


class Slices:
    """What one of `size` ranks holds of a model with this config.json.

    Raises CheckpointError for a configuration that Sandhi does not support, ServingError where the ranks do not divide
    what they would have to (heads, key-value heads, width of the MLP, vocabulary): naming the dimension.
    """

    def __init__(self, model: str, config: Mapping[str, Any], size: int = 1, rank: int = 0) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ServingError(
                f"there is no rank {rank} among {size}",
                model=model,
                remedy="ranks count from 0, below the number of ranks",
                code="rank-invalid",
            )
        self.model, self.size, self.rank = model, size, rank
        self._meaning = Meaning(model, dict(config))
        dims = self._meaning.dims
        padded = -(-dims["V"] // VOCABULARY_PADDING) * VOCABULARY_PADDING
        self._held = padded // size  # rows of the vocabulary
        for divides, what, number in (
            (dims["heads"] % size == 0, "attention heads", dims["heads"]),
            (dims["key_heads"] % size == 0 or size % dims["key_heads"] == 0, "key-value heads", dims["key_heads"]),
            (dims["I"] % size == 0, "rows of the MLP (intermediate_size)", dims["I"]),
            (padded % size == 0, "rows of the padded vocabulary", padded),
            ((size - 1) * self._held < dims["V"], f"tokens, {self._held} a rank,", dims["V"]),
        ):
            if not divides:
                raise self._refused(f"its {number} {what} cannot be divided among {size} tensor-parallel ranks")
        self._matrices = {**self._meaning.architecture.attention, **self._meaning.architecture.mlp}

    def of(self, tensor: str) -> Slice:
        """The rank's slice of a matrix, by its name. Raises ServingError for an expert's where there are several ranks,
        and for a name that no tensor of the model has."""
        if _short(tensor) in (EMBEDDING, HEAD):
            start, vocabulary = self.rank * self._held, self._meaning.dims["V"]
            return Slice(0, ((start, min(start + self._held, vocabulary)),)) if self.size > 1 else WHOLE
        matrix = self._matrix(tensor)
        if self.size == 1 or matrix is None:
            return WHOLE
        projection, rows, columns = matrix
        if projection in _ROW_PARALLEL:
            return Slice(1, self._ranges(columns), first=self.rank == 0)
        return Slice(0, self._ranges(rows))

    # --- the parts ------------------------------------------------------------------------------------------

    def _ranges(self, dims: str) -> tuple[Range, ...]:
        """The rank's range in each part of a dimension of the tables, such as Q, 2I or Q+2K."""
        ranges, offset = [], 0
        for letter in (part[-1] for part in dims.split("+") for _ in range(int(part[:-1] or 1))):
            start, end = self._range(letter)
            ranges.append((offset + start, offset + end))
            offset += self._meaning.dims[letter]
        return tuple(ranges)

    def _range(self, letter: str) -> Range:
        whole = self._meaning.dims[letter]
        ranks, rank = self.size, self.rank
        if letter == "K" and (copies := self.size // self._meaning.dims["key_heads"]) > 1:
            ranks, rank = self.size // copies, self.rank // copies
        return rank * whole // ranks, (rank + 1) * whole // ranks

    def _matrix(self, tensor: str) -> Matrix | None:
        """The projection that a tensor belongs to, None for a norm."""
        architecture, short = self._meaning.architecture, _short(tensor)
        layer = _LAYER.match(short)
        module = short[layer.end() if layer else 0 :].removesuffix(".weight")
        if layer and module in self._matrices:
            return self._matrices[module]
        if module in architecture.norms or (not layer and module == "norm"):
            return None
        if layer and any(_is_expert(module, experts) for experts in architecture.experts):
            if self.size == 1:
                return None
            raise self._refused("experts are not divided among ranks by Sandhi", tensor)
        raise ServingError(
            f"no matrix of a {self._meaning.config['model_type']} model has this name",
            model=self.model,
            tensor=tensor,
            remedy="use the config.json that belongs to these weights",
            code="tensor-unknown",
        )

    def _refused(self, reason: str, tensor: str | None = None) -> ServingError:
        remedy = "choose a number of ranks that divides it, or serve the model without sharing"
        return ServingError(reason, model=self.model, tensor=tensor, remedy=remedy, code="ranks-unaligned")


def _short(tensor: str) -> str:
    return tensor.removeprefix("model.")


def _is_expert(module: str, experts: Experts) -> bool:
    names = (experts.router, *experts.separate, *experts.stacked)
    return re.sub(r"\.[0-9]+\.", ".{}.", module) in names
