"""Which part of every tensor one rank of tensor parallelism holds: pure, from the architecture tables.

    slices = Slices("legal", config, size=2, rank=1)
    slices.of("model.layers.0.self_attn.q_proj.weight")   # Slice(0, ((2048, 4096),)): the upper half of its rows
    slices.of("model.layers.0.mlp.down_proj.weight").of(tensor)   # a view of its columns
    slices.parallel("model.layers.0.mlp.down_proj.weight")   # "row"

Names may have `model.` in front or not. What holds for a weight holds for what an export adds to it: of a column
parallel layer (its outputs are divided) bias, B, scale and shift are divided by rows and A is whole; of a row parallel
layer (its inputs are divided) A is divided by columns and the rest is whole, because it acts on the sum of all ranks.

The division is Megatron-LM's (Shoeybi et al. 2019, section 3) as vLLM lays it out: query heads in equal numbers; key
and value heads too, or, where there are more ranks than heads, each head on several neighbouring ranks; embeddings and
head in equal numbers of rows, after the vocabulary is padded by zeros to a multiple of 64. A fused matrix (qkv,
gate_up) is divided within each of its parts, so a rank's slice of it is several ranges of rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sandhi_core.architectures import Experts, Matrix
from sandhi_core.assignment import PEFT
from sandhi_core.errors import ServingError
from sandhi_core.meaning import EMBEDDING, HEAD, Meaning

VOCABULARY_PADDING = 64
"""vLLM's: the rows of embeddings and head are a multiple of it (vocab_parallel_embedding.py, 0.32)."""

Parallel = Literal["column", "row", "vocabulary", "whole"]
_ROW_PARALLEL = ("o", "down")
_PART = re.compile(r"(\.lora_[AB])?\.(weight|bias|row_scale|row_shift)$")
_LAYER = re.compile(r"layers\.[0-9]{1,6}\.")


@dataclass(frozen=True, order=True)
class Slice:
    """Ranges of a tensor's rows (`dimension` 0) or columns (1), one after another, then `padding` rows or columns of
    zeros. Without ranges: the whole tensor."""

    dimension: Literal[0, 1] = 0
    ranges: tuple[tuple[int, int], ...] = ()
    padding: int = 0

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The slice's shape, of a tensor of this shape."""
        if not self.ranges:
            return tuple(shape)
        length = sum(end - start for start, end in self.ranges) + self.padding
        return (*shape[: self.dimension], length, *shape[self.dimension + 1 :])

    def of(self, tensor: Tensor) -> Tensor:
        """The slice of a tensor. A view where it is one range without padding (of columns: not contiguous), else a
        copy."""
        if not self.ranges:
            return tensor
        parts = [tensor.narrow(self.dimension, start, end - start) for start, end in self.ranges]
        if self.padding:
            zeros = list(tensor.shape)
            zeros[self.dimension] = self.padding
            parts.append(tensor.new_zeros(zeros))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dimension)


WHOLE = Slice()


class Slices:
    """What one of `size` ranks holds of a model with this config.json. The vocabulary is padded to a multiple of
    `padding`: 1 for not at all.

    Raises CheckpointError for a configuration that Sandhi does not support, ServingError where the ranks do not divide
    what they would have to (heads, key-value heads, width of the MLP, vocabulary): naming the dimension.
    """

    def __init__(
        self, model: str, config: Mapping[str, Any], size: int = 1, rank: int = 0, padding: int = VOCABULARY_PADDING
    ) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ServingError(
                f"there is no rank {rank} among {size}",
                model=model,
                remedy="ranks count from 0, below the number of ranks",
                code="rank-invalid",
            )
        self.model, self.size, self.rank = model, size, rank
        self._meaning = Meaning(model, dict(config))
        self._padding = padding
        dims = self._meaning.dims
        for divides, what, number in (
            (dims["heads"] % size == 0, "attention heads", dims["heads"]),
            (dims["key_heads"] % size == 0 or size % dims["key_heads"] == 0, "key-value heads", dims["key_heads"]),
            (dims["I"] % size == 0, "rows of the MLP (intermediate_size)", dims["I"]),
            (self._vocabulary % size == 0, "rows of the padded vocabulary", self._vocabulary),
        ):
            if not divides:
                raise self._refused(f"its {number} {what} cannot be divided among {size} tensor-parallel ranks")
        self._matrices = {**self._meaning.architecture.attention, **self._meaning.architecture.mlp}

    def parallel(self, tensor: str) -> Parallel:
        """How the layer of a tensor is divided; `whole` for norms. Raises ServingError as `of` does."""
        if _short(tensor) in (EMBEDDING, HEAD):
            return "vocabulary"
        matrix = self._matrix(tensor)
        if matrix is None:
            return "whole"
        return "row" if matrix[0] in _ROW_PARALLEL else "column"

    def of(self, tensor: str) -> Slice:
        """The rank's slice of a tensor, by its name. Raises ServingError for an expert's where there are several ranks,
        and for a name that no tensor of the model has."""
        how = self.parallel(tensor)
        if how == "vocabulary":
            return self._rows_of_vocabulary()
        matrix = self._matrix(tensor)
        if self.size == 1 or matrix is None:
            return WHOLE
        down = tensor.endswith(".lora_A.weight")
        if how == "column":
            return WHOLE if down else Slice(0, self._ranges(matrix[1]))
        added = tensor.endswith((".lora_B.weight", ".bias", ".row_scale", ".row_shift"))
        return WHOLE if added else Slice(1, self._ranges(matrix[2]))

    # --- the parts ------------------------------------------------------------------------------------------

    @property
    def _vocabulary(self) -> int:
        return -(-self._meaning.dims["V"] // self._padding) * self._padding

    def _rows_of_vocabulary(self) -> Slice:
        held, vocabulary = self._vocabulary // self.size, self._meaning.dims["V"]
        start, end = (min(row, vocabulary) for row in (self.rank * held, (self.rank + 1) * held))
        padding = held - (end - start)
        return Slice(0, ((start, end),), padding) if self.size > 1 or padding else WHOLE

    def _ranges(self, dims: str) -> tuple[tuple[int, int], ...]:
        """The rank's range in each part of a dimension of the tables, such as Q, 2I or Q+2K."""
        ranges, offset = [], 0
        for letter in (part[-1] for part in dims.split("+") for _ in range(int(part[:-1] or 1))):
            start, end = self._range(letter)
            ranges.append((offset + start, offset + end))
            offset += self._meaning.dims[letter]
        return tuple(ranges)

    def _range(self, letter: str) -> tuple[int, int]:
        whole = self._meaning.dims[letter]
        ranks, rank = self.size, self.rank
        if letter == "K" and (copies := self.size // self._meaning.dims["key_heads"]) > 1:
            ranks, rank = self.size // copies, self.rank // copies
        return rank * whole // ranks, (rank + 1) * whole // ranks

    def _matrix(self, tensor: str) -> Matrix | None:
        """The projection that a tensor belongs to, None for a norm."""
        architecture, short = self._meaning.architecture, _short(tensor)
        layer = _LAYER.match(short)
        module = _PART.sub("", short[layer.end() :] if layer else short)
        if layer and module in self._matrices:
            return self._matrices[module]
        if module in architecture.norms or (not layer and module == "norm"):
            return None
        if layer and any(_is_expert(module, experts) for experts in architecture.experts):
            if self.size == 1:
                return None
            raise self._refused("experts are not divided among ranks by Sandhi", tensor)
        raise ServingError(
            f"no tensor of a {self._meaning.config['model_type']} model has this name",
            model=self.model,
            tensor=tensor,
            remedy="use the config.json that belongs to these weights",
            code="tensor-unknown",
        )

    def _refused(self, reason: str, tensor: str | None = None) -> ServingError:
        remedy = "choose a number of ranks that divides it, or serve the model without sharing"
        return ServingError(reason, model=self.model, tensor=tensor, remedy=remedy, code="ranks-unaligned")


def _short(tensor: str) -> str:
    return tensor.removeprefix(PEFT).removeprefix("model.")


def _is_expert(module: str, experts: Experts) -> bool:
    names = (experts.router, *experts.separate, *experts.stacked)
    return re.sub(r"\.[0-9]+\.", ".{}.", module) in names
