"""The load format `sandhi`: checks an export, hands its tensors to the layers, and accepts no gap."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.utils import replace
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from sandhi_core.assignment import factors_among
from sandhi_core.deploy.vllm import NAME
from sandhi_core.errors import CheckpointError
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import Slices, matrices
from sandhi_core.serving.vllm_plugin.provider import Files, Provider, Source, attached, external_bytes, opened
from sandhi_core.serving.vllm_plugin.quantization import SandhiConfig
from sandhi_core.serving.vllm_plugin.refuse import EngineSettings, Options, require_servable

logger = init_logger(f"vllm.{NAME}")


def settings_of_config(config: VllmConfig, options: Options) -> EngineSettings:
    """What the plugin depends on of vLLM's configuration."""
    parallel, offload = config.parallel_config, config.offload_config
    extras = {
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "weight offloading": offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0,
        "sleep mode": config.model_config.enable_sleep_mode,
        "expert load balancing": parallel.enable_eplb,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
    }
    return EngineSettings(
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=config.device_config.device_type,
        quantization=config.model_config.quantization,
        load_format=config.load_config.load_format,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        extras=frozenset(extra for extra, on in extras.items() if on),
        options=options,
    )


@register_model_loader(NAME)
class SandhiLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's own loader for what the layers do not map. Raises SandhiError for whatever is wrong with an export or
    cannot be served."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = Options.of(load_config.model_loader_extra_config)
        super().__init__(replace(load_config, model_loader_extra_config={}))
        self.enable_weights_track = True  # vLLM leaves it off with a quantization, and serves what memory held before
        self._source: Source | None = None
        self._mapped: dict[str, int] = {}  # parameters over mapped matrices, and where they lie

    def download_model(self, model_config: ModelConfig) -> None:
        """An export is a directory: there is nothing to fetch."""

    def create_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> Module:
        model, config = opened(Path(model_config.model))
        shared = matrices(model.tensors, model.shared())
        require_servable(model.model, config, shared, settings_of_config(vllm_config, self._options))
        model.check(self._options.digests)
        source = self._opened(model, config, vllm_config)
        tied = getattr(model_config.hf_config.get_text_config(), "tie_word_embeddings", False)
        quantization: SandhiConfig = vllm_config.quant_config
        quantization.bind(source, tied)
        network: Module = super().create_model(vllm_config, model_config, prefix)
        self._source = source
        self._mapped = {
            f"{name}.{part}" if name else part: parameter.data_ptr()
            for name, layer in network.named_modules()
            if getattr(getattr(layer, "quant_method", None), "maps", False)
            for part, parameter in layer.named_parameters(recurse=False)
            if part.startswith("weight")
        }
        _require_taken(source)
        return network

    def _opened(self, model: MappedModel, config: Mapping[str, Any], vllm_config: VllmConfig) -> Source:
        device = torch.device(vllm_config.device_config.device_type)
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        shared: Provider = Files(model)
        if device.type == "cuda":
            died = partial(logger.warning, "the owner %s is gone: this engine goes on", self._options.owner)
            shared = attached(model, self._options, torch.cuda.current_device(), rank, ranks, died)
        slices = Slices(model.model, config, ranks, rank)
        return Source(model, shared, slices, device, vllm_config.model_config.dtype)

    def get_all_weights(self, model_config: ModelConfig, model: Module) -> Iterator[tuple[str, Tensor]]:
        """What no layer maps: norms, biases, and matrices that are the model's own in layers where nothing is shared.
        vLLM copies each, a rank's part of it, into parameters of its own."""
        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the time since
        source = self._require_source()
        added = factors_among(source.model.tensors)
        for name in source.model.tensors:
            if name not in source.taken and name not in added:
                yield name, source.model.tensor(name)

    def track_weights_loading(self, model: Module, loaded_weights: set[str] | None, quantized: bool = False) -> None:
        if loaded_weights is None:
            message = "vLLM's model does not say which weights it has loaded, so gaps would go unnoticed"
            raise CheckpointError(
                message, model=self._require_source().model.model, remedy="serve it with transformers"
            )
        super().track_weights_loading(model, loaded_weights | set(self._mapped), quantized)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> Module:
        network: Module = super().load_model(vllm_config, model_config, prefix)
        parameters = dict(network.named_parameters(remove_duplicate=False))
        for name, address in self._mapped.items():
            if parameters[name].data_ptr() != address:
                message = f"vLLM has replaced the mapped parameter {name} by a copy"
                raise CheckpointError(message, model=model_config.model, remedy="serve it without the plugin")
        self._require_source().model.rest()  # what was copied, or read to be checked, is in memory twice otherwise
        sizes = {address: parameters[name].nbytes for name, address in self._mapped.items()}
        logger.info("%d tensors of %d bytes are mapped", len(sizes), sum(sizes.values()))
        return network

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        """Bytes of a GPU's shared tensors, which their owner has allocated and this engine must not count as its own;
        vLLM asks before it loads, and on GPUs only."""
        model = MappedModel.open(Path(vllm_config.model_config.model))
        return external_bytes(model, vllm_config.parallel_config.tensor_parallel_size)

    def _require_source(self) -> Source:
        assert self._source is not None, "vLLM creates a model before it loads weights"
        return self._source


def _require_taken(source: Source) -> None:
    """No merged matrix, and nothing that has something added to it, is left to a layer that knows nothing of it.

    Duplicates may be: in experts, for instance, vLLM has matrices as it needs them. They are served, copied.
    """
    left = sorted(name for name in source.model.tensors if source.maps(name) and name not in source.taken)
    copied = {name: source.model.tensors[name] for name in left if len(source.model.tensors[name].shape) == 2}
    for name, tensor in copied.items():
        if tensor.sharing == "merged" or name in source.added:
            raise source.wrong(name, "is shared, but no layer of vLLM's model took it")
    if copied:
        total = sum(tensor.nbytes for tensor in copied.values())
        message = "%d duplicate tensors (%d bytes) are copied, not mapped: vLLM has no place to map them, such as %s"
        logger.warning(message, len(copied), total, next(iter(copied)))
