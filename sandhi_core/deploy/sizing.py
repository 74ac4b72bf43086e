"""Weights and cache of a pool on one device, with private copies of all and with shared tensors held once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sandhi_core.assignment import factors_among
from sandhi_core.deploy.kv import KvCache, kv_cache
from sandhi_core.records import ExportedModel, ExportedTensor, Manifest, Part

RESERVE = 0.1
"""Part of the device left for activations, CUDA graphs and contexts of all servers."""

BASIS = (
    f"arithmetic, not a measurement: device memory, less {RESERVE:.0%} for activations, CUDA graphs and "
    "contexts, less the weights of all models, divided equally among them; a token takes 2 * layers * kv "
    "heads * head size * bytes of the dtype. `before`: every server holds a private copy of all its weights, as "
    "stock vLLM does. `after`: servers hold shared tensors once for all models, as those of sandhi_core.serving.load "
    "and of vLLM with Sandhi's plugin do"
)


class Capacity(Part):
    """What one model's share of the free memory holds."""

    kv_bytes: int
    kv_tokens: int


class ModelMemory(Part):
    """Bytes of one model. `weights_bytes` counts what a server keeps, residuals included: a tied head is no tensor of
    its own."""

    estimated: Literal[True] = True
    weights_bytes: int
    private_bytes: int
    shared_bytes: int  # private + shared = weights
    kv: KvCache
    before: Capacity
    after: Capacity
    more_kv_tokens: int


class PoolMemory(Part):
    """Bytes of all models on one device. Where weights do not fit there are no tokens."""

    estimated: Literal[True] = True
    basis: str = BASIS
    device_bytes: int
    reserve_bytes: int
    weights_bytes_before: int
    weights_bytes_after: int
    fits_before: bool
    fits_after: bool
    kv_tokens_before: int
    kv_tokens_after: int
    more_kv_tokens: int


@dataclass(frozen=True)
class _Weights:
    """Bytes of one model's served tensors: its own, of these what it adds to shared ones, and by (name, digest) the
    shared ones."""

    private: int
    added: int
    shared: Mapping[tuple[str, str], int]


def memory_of(
    device_bytes: int, manifest: Manifest, configs: Mapping[str, Mapping[str, Any]], dtypes: Mapping[str, str]
) -> tuple[PoolMemory, dict[str, ModelMemory]]:
    """Sizes of the pool and of each model on a device of `device_bytes`.

    `configs` and `dtypes` (safetensors' spelling, of weights and cache alike) are by model name.
    Raises CheckpointError where a configuration does not give the cache's size.
    """
    weights = {name: _weights(model, configs[name]) for name, model in manifest.models.items()}
    private = sum(w.private for w in weights.values())
    before = sum(w.private - w.added + sum(w.shared.values()) for w in weights.values())
    distinct = {key: size for w in weights.values() for key, size in w.shared.items()}
    after = private + sum(distinct.values())
    reserve = int(device_bytes * RESERVE)
    models = {
        name: _model(
            weights[name],
            kv_cache(name, configs[name], dtypes[name]),
            (device_bytes - reserve - before) // len(weights),
            (device_bytes - reserve - after) // len(weights),
        )
        for name in weights
    }
    tokens_before = sum(m.before.kv_tokens for m in models.values())
    tokens_after = sum(m.after.kv_tokens for m in models.values())
    pool = PoolMemory(
        device_bytes=device_bytes,
        reserve_bytes=reserve,
        weights_bytes_before=before,
        weights_bytes_after=after,
        fits_before=before + reserve <= device_bytes,
        fits_after=after + reserve <= device_bytes,
        kv_tokens_before=tokens_before,
        kv_tokens_after=tokens_after,
        more_kv_tokens=tokens_after - tokens_before,
    )
    return pool, models


def _model(weights: _Weights, kv: KvCache, share_before: int, share_after: int) -> ModelMemory:
    shared = sum(weights.shared.values())
    before, after = capacity(share_before, kv), capacity(share_after, kv)
    return ModelMemory(
        weights_bytes=weights.private + shared,
        private_bytes=weights.private,
        shared_bytes=shared,
        kv=kv,
        before=before,
        after=after,
        more_kv_tokens=after.kv_tokens - before.kv_tokens,
    )


def capacity(share: int, kv: KvCache) -> Capacity:
    """What so many bytes hold."""
    room = max(share, 0)
    return Capacity(kv_bytes=room, kv_tokens=room // kv.bytes_per_token)


def served_bytes(model: ExportedModel, config: Mapping[str, Any]) -> int:
    """Bytes that a server keeps of a model's tensors."""
    weights = _weights(model, config)
    return weights.private + sum(weights.shared.values())


def _weights(model: ExportedModel, config: Mapping[str, Any]) -> _Weights:
    kept = {name: tensor for name, tensor in model.tensors.items() if not _tied_head(name, tensor, model, config)}
    return _Weights(
        private=sum(tensor.nbytes for tensor in kept.values() if tensor.sharing == "private"),
        added=sum(kept[factor].nbytes for factor in factors_among(kept)),
        shared={(n, t.digest): t.nbytes for n, t in kept.items() if t.sharing != "private"},
    )


def _tied_head(name: str, tensor: ExportedTensor, model: ExportedModel, config: Mapping[str, Any]) -> bool:
    """Whether this is a copy of the embedding that a server does not keep beside it."""
    embeddings = {t.digest for n, t in model.tensors.items() if n.endswith("embed_tokens.weight")}
    untied = config.get("tie_word_embeddings") is False
    return name.endswith("lm_head.weight") and tensor.digest in embeddings and not untied
