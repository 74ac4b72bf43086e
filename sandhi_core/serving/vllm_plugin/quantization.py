"""The quantization `sandhi`: which layers of a model work over mapped matrices.

Nothing is quantized. It is by its quantization that vLLM lets others say how a layer holds its weights.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sandhi_core.deploy.vllm import DTYPES, NAME
from sandhi_core.errors import UsageError
from sandhi_core.serving.vllm_plugin.linear import MappedLinear
from sandhi_core.serving.vllm_plugin.pieces import stored_names
from sandhi_core.serving.vllm_plugin.provider import Source, opened
from sandhi_core.serving.vllm_plugin.vocabulary import MappedVocabulary

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


@register_quantization_config(NAME)
class SandhiConfig(QuantizationConfig):  # type: ignore[misc]
    """What vLLM asks for each layer's method. The loader binds it to the model's tensors, in the process that has
    them; sent to another process, or copied, it is unbound again."""

    def __init__(self) -> None:
        super().__init__()
        self.source: Source | None = None
        self._tied = False
        self._stored: dict[str, str] = {}  # by what vLLM calls a tensor: what the files call it

    def bind(self, source: Source, tied: bool) -> None:
        """`tied`: vLLM lets the head have the embedding's matrix."""
        self.source = source
        self._tied = tied
        self._stored = {name: name for name in source.model.tensors}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"source": None, "_stored": {}}

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, dtype) for dtype in DTYPES.values()]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SandhiConfig":
        return cls()

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """vLLM calls this in its first process, before any engine starts: what is no whole model of an export ends
        here. Raises SandhiError."""
        opened(Path(model_name))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self._stored = {hf_to_vllm_mapper.map_name(name) or name: stored for name, stored in self._stored.items()}

    def get_quant_method(self, layer: Module, prefix: str) -> QuantizeMethodBase | None:
        """Ours where something of the layer is shared or has something added to it, else vLLM's own."""
        if self.source is None:
            message = f"--quantization {NAME} needs --load-format {NAME}"
            raise UsageError(message, remedy="give both, or neither to serve without sharing")
        if isinstance(layer, LinearBase):
            names = self._names(prefix)
            if any(self.source.maps(name) for name in names):
                return MappedLinear(self.source, names)
            return UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return self._vocabulary(self.source, prefix)
        return None

    def _names(self, prefix: str) -> tuple[str, ...]:
        names = stored_names(prefix, self.packed_modules_mapping)
        return tuple(self._stored.get(name, name) for name in names)

    def _vocabulary(self, source: Source, prefix: str) -> QuantizeMethodBase | None:
        """Embedding and head go together, since vLLM may tie them: both are mapped if one is shared, or if the files
        have a head of its own where vLLM would take the embedding instead."""
        stored = [name for name in source.model.tensors if name.endswith(_EMBEDDING) or name == _HEAD]
        if not any(map(source.maps, stored)) and not (self._tied and _HEAD in stored):
            return None
        (name,) = self._names(prefix)
        # Some models of vLLM do not tell the embedding its name, and a tied head has no matrix of its own.
        embedding = next((other for other in stored if other != _HEAD), None)
        found = name if name in stored else embedding
        return None if found is None else MappedVocabulary(source, found)
