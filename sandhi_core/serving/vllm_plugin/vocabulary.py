"""Embeddings and heads over mapped matrices: one view for both where a model ties them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import embedding, linear, pad
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from sandhi_core.serving.vllm_plugin.provider import Source


class MappedVocabulary(QuantizeMethodBase):  # type: ignore[misc]
    """A matrix with a row for each token. vLLM pads the vocabulary, a mapped matrix has no rows for padding: tokens
    never ask for them, and a head answers 0 there, as vLLM's rows of zeros do."""

    supports_pre_processed_weights = True
    maps = True

    def __init__(self, source: Source, name: str) -> None:
        self.name = name  # of the stored matrix
        self._source = source

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
        (piece,) = self._source.pieces(self.name)
        held = (layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index)
        if (piece.rows, piece.shape[1]) != (held, input_size_per_partition):
            found = f"its rows {piece.rows} of {piece.shape[1]} numbers are this rank's"
            raise self._source.wrong(self.name, f"{found}, the layer has {held} of {input_size_per_partition}")
        layer.register_parameter("weight", Parameter(self._source.weight(piece), requires_grad=False))

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """A head that has a matrix of its own in the files keeps it, as transformers does."""
        method = embed_tokens.quant_method
        if isinstance(method, MappedVocabulary) and method.name == self.name:
            layer.weight = embed_tokens.weight
        return layer

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        missing = layer.num_embeddings_per_partition - layer.weight.shape[0]
        if bias is not None and missing:
            bias = bias[: layer.weight.shape[0]]
        logits = linear(x, layer.weight, bias)
        return pad(logits, (0, missing)) if missing else logits

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        return embedding(input_, layer.weight)
