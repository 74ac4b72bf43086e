"""Linear layers over mapped matrices: one product for each, whatever the engine fuses, and what is added after it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearMethodBase, QKVParallelLinear, RowParallelLinear

from sandhi_core.rungs.residual import added, moved
from sandhi_core.serving.vllm_plugin.pieces import Piece, by_columns, by_rows
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
        pieces = self._pieces(layer, input_size_per_partition, output_partition_sizes)
        alone = len(pieces) == 1
        self._parts = ("weight",) if alone else tuple(f"weight_{place}" for place in range(len(pieces)))
        for part, piece in zip(self._parts, pieces, strict=True):
            layer.register_parameter(part, Parameter(self._source.weight(piece), requires_grad=False))
            for name, tensor in self._source.residual(piece).parts.items():
                layer.register_buffer(f"{part}_{name}", tensor, persistent=False)

    def _pieces(self, layer: Any, columns: int, rows: Sequence[int]) -> tuple[Piece, ...]:
        shapes = [self._source.shape(name) for name in self._names]
        try:
            if isinstance(layer, RowParallelLinear):
                (name,), (shape,) = self._names, shapes
                pieces: tuple[Piece, ...] = (by_columns(name, shape, columns, layer.tp_rank, layer.tp_size),)
            else:
                pieces = by_rows(self._names, shapes, _logical(layer), rows, layer.tp_rank, layer.tp_size)
            for piece, held in zip(pieces, rows, strict=True):
                if piece.shape != (held, columns):
                    raise ValueError(f"is {list(piece.shape)} for this rank, the layer has {[held, columns]}")
        except ValueError as error:
            raise self._source.wrong(self._names[0], str(error)) from None
        return pieces

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


def _logical(layer: Any) -> list[int]:
    """Rows of each of a layer's matrices over all ranks, each counted once."""
    if isinstance(layer, QKVParallelLinear):
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        sizes = (layer.head_size, layer.head_size, layer.v_head_size)
        return [number * size for number, size in zip(heads, sizes, strict=True)]
    return list(getattr(layer, "output_sizes", [layer.output_size]))
