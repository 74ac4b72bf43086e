"""Sizes of a pool whose models are adapters of common bases, one engine a base."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from sandhi_core.adapters import adapted_modules, base_model
from sandhi_core.deploy.kv import KvCache, kv_cache
from sandhi_core.deploy.sizing import RESERVE, Capacity, ModelMemory, capacity, served_bytes
from sandhi_core.pools.pool import LoraRank
from sandhi_core.records import DTYPE_BYTES, Base, ExportedModel, Manifest, Part, StockPlan

BASIS = (
    f"arithmetic, not a measurement: device memory, less {RESERVE:.0%} for activations, CUDA graphs and contexts, less "
    "every base once, less the buffers that vLLM keeps for all adapters of a base (adapters * rank * (rows + columns) "
    "* bytes of the dtype, of every layer that one of them adapts, at the largest rank that any has), less the whole "
    "weights of every other model; the rest divided equally among all models, and an engine has the shares of its own"
)

PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM runs as one: an adapter of one of them takes buffers of all."""


class BaseMemory(Part):
    """Bytes of one engine that serves a base with its adapters."""

    estimated: Literal[True] = True
    weights_bytes: int
    max_rank: int
    adapter_bytes: int
    kv: KvCache
    capacity: Capacity


class StockMemory(Part):
    """Bytes of all engines on one device. Where weights do not fit there are no tokens."""

    estimated: Literal[True] = True
    basis: str = BASIS
    device_bytes: int
    reserve_bytes: int
    weights_bytes: int  # bases, buffers of adapters, and all other models
    fits: bool
    share_bytes: int  # of the cache, for each model


def stock_memory(
    device_bytes: int,
    manifest: Manifest,
    plan: StockPlan,
    configs: Mapping[str, Mapping[str, Any]],
    dtypes: Mapping[str, str],
    models: Mapping[str, ModelMemory],
) -> tuple[StockMemory, dict[str, BaseMemory]]:
    """Sizes of the pool and, by directory, of each base; `models` are those of models that hold all their weights.

    Mappings are by model name. Raises CheckpointError where a configuration does not give the cache's size.
    """
    weights, buffers = {}, {}
    for base in plan.bases:
        first = next(iter(base.adapters))
        held = base_model(base, manifest.models)
        weights[base.directory] = served_bytes(held, configs[first])
        adapted = adapted_modules(base, manifest.models)
        buffers[base.directory] = _buffers(base, held, adapted) * DTYPE_BYTES[dtypes[first]]
    alone = sum(models[name].weights_bytes for name in plan.ordinary)
    total = sum(weights.values()) + sum(buffers.values()) + alone
    reserve = int(device_bytes * RESERVE)
    share = max((device_bytes - reserve - total) // len(manifest.models), 0)
    pool = StockMemory(
        device_bytes=device_bytes,
        reserve_bytes=reserve,
        weights_bytes=total,
        fits=total + reserve <= device_bytes,
        share_bytes=share,
    )
    return pool, {
        base.directory: BaseMemory(
            weights_bytes=weights[base.directory],
            max_rank=lora_rank(base.rank),
            adapter_bytes=buffers[base.directory],
            kv=kv,
            capacity=capacity(share * len(base.adapters), kv),
        )
        for base in plan.bases
        for first in (next(iter(base.adapters)),)
        for kv in (kv_cache(first, configs[first], dtypes[first]),)
    }


def lora_rank(rank: int) -> int:
    """The smallest --max-lora-rank of vLLM that holds adapters of this rank."""
    ranks: tuple[int, ...] = get_args(LoraRank)
    return next(allowed for allowed in ranks if allowed >= rank)


def _buffers(base: Base, held: ExportedModel, adapted: list[str]) -> int:
    """Elements of the buffers of all adapters."""
    packed = {module for together in PACKED if set(together) & set(adapted) for module in together}
    wide = sum(
        sum(tensor.shape)
        for name, tensor in held.tensors.items()
        if len(tensor.shape) == 2 and name.removesuffix(".weight").rpartition(".")[2] in packed.union(adapted)
    )
    adapters = sum(adapter.directory is not None for adapter in base.adapters.values())
    return adapters * lora_rank(base.rank) * wide
