"""Linear layers over mapped matrices: one product for each, whatever the engine fuses, and what is added after it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearMethodBase

from sandhi_core.rungs.residual import added, moved
from sandhi_core.serving.vllm_plugin.pieces import Piece
from sandhi_core.serving.vllm_plugin.provider import Source


class MappedLinear(LinearMethodBase):  # type: ignore[misc]
    """A layer of which at least one matrix is shared, or has something added to it.

    Each of its matrices is a parameter of its own: a view, which has no private copy at any time. Unlike vLLM's own
    method this one never repacks."""

    supports_pre_processed_weights = True
    maps = True

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        self._source = source
        self._names = names  # of the stored matrices
        self._parts: tuple[str, ...] = ()  # of the layer's parameters, in order of their rows

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        pieces = self._pieces(input_size_per_partition, output_partition_sizes)
        alone = len(pieces) == 1
        self._parts = ("weight",) if alone else tuple(f"weight_{place}" for place in range(len(pieces)))
        for part, piece in zip(self._parts, pieces, strict=True):
            layer.register_parameter(part, Parameter(self._source.weight(piece), requires_grad=False))
            for name, tensor in self._source.residual(piece).parts.items():
                layer.register_buffer(f"{part}_{name}", tensor, persistent=False)

    def _pieces(self, columns: int, rows: Sequence[int]) -> list[Piece]:
        """Those of all matrices, held to what the engine's layer has for this rank: of each matrix so many rows."""
        held = {name: self._source.pieces(name) for name in self._names}
        for name, pieces in held.items():
            expected = [sum(rows) if len(held) == 1 else rows[self._names.index(name)], columns]
            found = [sum(piece.shape[0] for piece in pieces), pieces[0].shape[1]]
            if len(held) not in (1, len(rows)) or found != expected:
                raise self._source.wrong(name, f"is {found} for this rank, the engine's layer has {expected}")
        return [piece for pieces in held.values() for piece in pieces]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        outputs = []
        start = 0
        for part in self._parts:
            weight = getattr(layer, part)
            own = None if bias is None else bias[start : start + weight.shape[0]]
            output = linear(x, weight, own)
            if hasattr(layer, f"{part}_scale"):
                output = moved(output, getattr(layer, f"{part}_scale"), getattr(layer, f"{part}_shift"), own)
            if hasattr(layer, f"{part}_down"):
                output = added(output, x, getattr(layer, f"{part}_down"), getattr(layer, f"{part}_up"))
            outputs.append(output)
            start += weight.shape[0]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
