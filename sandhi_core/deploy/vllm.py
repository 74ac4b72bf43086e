"""vLLM's commands and what to know about them. Flags as of vLLM 0.32 (`vllm serve --help`; for adapters also
vllm/config/lora.py and docs/features/lora)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sandhi_core.deploy.kv import KvCache
from sandhi_core.deploy.launch import Launch
from sandhi_core.deploy.sizing import Capacity, ModelMemory, PoolMemory
from sandhi_core.deploy.stock import BaseMemory, StockMemory
from sandhi_core.errors import ProofError
from sandhi_core.records import Base

FIRST_PORT = 8000
METRICS = "/metrics"
PLUGIN = ("--quantization", "sandhi", "--load-format", "sandhi")
"""What has vLLM use Sandhi's plugin: shared tensors are mapped, and what models add to them is applied."""
BLOCK = 16
"""Tokens in a block of vLLM's cache, by default: a sequence takes whole ones."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' spelling to vLLM's."""


def residuals(plugin: bool) -> bool:
    """Whether residuals and row vectors are applied. Stock vLLM would leave them out, and nothing would say so."""
    return plugin


def served_dtype(model: str, dtype: str) -> str:
    """vLLM's name of the dtype of the weights' files, in which they are served.

    Raises ProofError for one that vLLM lacks: converted weights would not be the proved ones.
    """
    if dtype not in DTYPES:
        raise ProofError(
            f"vLLM does not serve weights in {dtype}, and converted ones would not be those that were scored",
            model=model,
            remedy="store the checkpoint in bfloat16, float16 or float32",
        )
    return DTYPES[dtype]


def launch(
    model: str,
    directory: Path,
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: PoolMemory,
    memory: ModelMemory,
    plugin: bool,
) -> Launch:
    """Start `model` from `directory` as number `place` (from 0) on the device.

    With the plugin a server holds its private weights, and the cache is given the room of `memory.after`: the plugin
    refuses to start where it would have to copy shared tensors. Stock vLLM holds private copies of all, so there it is
    that of `memory.before`. vLLM refuses to start where less than --gpu-memory-utilization of the device is free, so
    that goes along although the cache's size is given. Where the pool does not fit the device, both are left to vLLM.
    """
    port = FIRST_PORT + place
    argv = ["vllm", "serve", str(directory), "--served-model-name", model, "--port", str(port), "--dtype", dtype]
    if plugin:
        argv += PLUGIN
        own, room = memory.private_bytes, memory.after if pool.fits_after else None
    else:
        own, room = memory.weights_bytes, memory.before if pool.fits_before else None
    sizes, length = _sizes(config, own, room, pool.device_bytes)
    return Launch((*argv, *sizes), port, METRICS, dtype, length, tuple(_notes(config, memory.kv, length)))


def launch_base(
    base: Base,
    modules: Sequence[str],
    export_root: Path,
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: StockMemory,
    memory: BaseMemory,
) -> Launch:
    """Start one engine for all models of a base as number `place` on the device: by their names its adapters, and for
    a model that adds nothing the base itself.

    All adapters stay on the device, in buffers of `memory.max_rank`; only the `modules` that they adapt get buffers.
    """
    port = FIRST_PORT + place
    names = [model for model, adapter in base.adapters.items() if adapter.directory is None]
    adapters = [f"{m}={export_root / a.directory}" for m, a in base.adapters.items() if a.directory is not None]
    argv = ["vllm", "serve", str(export_root / base.directory), "--served-model-name", *(names or [base.directory])]
    argv += ["--port", str(port), "--dtype", dtype]
    if adapters:
        argv += ["--enable-lora", "--max-lora-rank", str(memory.max_rank), "--max-loras", str(len(adapters))]
        argv += ["--lora-target-modules", *modules, "--lora-modules", *adapters]
    room = memory.capacity if pool.fits else None
    sizes, length = _sizes(config, memory.weights_bytes + memory.adapter_bytes, room, pool.device_bytes)
    notes = list(_notes(config, memory.kv, length))
    if adapters and dtype == DTYPES["F32"]:
        notes.append("on GPUs vLLM's kernels for adapters take bfloat16 and float16 only: in float32 serve from a CPU")
    return Launch((*argv, *sizes), port, METRICS, dtype, length, tuple(notes))


def _sizes(
    config: Mapping[str, Any], weights_bytes: int, room: Capacity | None, device_bytes: int
) -> tuple[list[str], int | None]:
    """The flags of a cache of this capacity beside weights of this size, and the length of a sequence. Without `room`
    the cache is left to vLLM."""
    length = _context(config, None if room is None else room.kv_tokens)
    argv = [] if length is None else ["--max-model-len", str(length)]
    if room is not None:
        share = (weights_bytes + room.kv_bytes) / device_bytes
        utilization = min(max(math.ceil(share * 1e4), 1) / 1e4, 1.0)
        argv += ["--kv-cache-memory-bytes", str(room.kv_bytes)]
        argv += ["--gpu-memory-utilization", f"{utilization:.4f}"]
    return argv, length


def _context(config: Mapping[str, Any], kv_tokens: int | None) -> int | None:
    """Tokens of the longest sequence: what the model was made for, as far as the cache holds one such
    sequence (vLLM refuses to start otherwise). None leaves it to vLLM."""
    limits = [made_for] if (made_for := _made_for(config)) else []
    if kv_tokens is not None:
        limits.append(max(kv_tokens // BLOCK, 1) * BLOCK)
    return min(limits, default=None)


def _made_for(config: Mapping[str, Any]) -> int | None:
    return (config.get("text_config") or config).get("max_position_embeddings")


def _notes(config: Mapping[str, Any], kv: KvCache, length: int | None) -> Iterator[str]:
    if kv.windowed_layers:
        yield (
            f"{kv.windowed_layers} of {kv.layers} layers look back {kv.window} tokens only: an engine that "
            "frees what they no longer need holds more tokens than given here"
        )
        if str(config.get("model_type")).startswith("qwen"):
            yield (
                "vLLM has attended fully in Qwen layers that have a window (vllm#39514): "
                "compare answers to prompts longer than the window"
            )
    made_for = _made_for(config)
    if made_for and length and length < made_for:
        yield f"sequences are limited to {length} of {made_for} tokens, as many as the cache holds"


_SHARING = (
    "these commands need Sandhi's plugin beside vLLM (pip install sandhi in its environment). On a CPU servers map "
    "shared tensors from the export's files and hold each once, which was measured. On a GPU a process of its own "
    "holds them (python3 -m sandhi_core.serving.cuda.owner), and has to run before the servers; that was never run on "
    "a GPU yet. The plugin refuses to start rather than copy"
)
_COPYING = (
    "stock vLLM copies every weight to the device: these commands share files on disk and in the page cache, not "
    "device memory"
)


def pool_notes(pool: PoolMemory, plugin: bool) -> tuple[str, ...]:
    """What to know about starting all of them."""
    notes = [
        "start the servers one after the other, each when GET /health of the one before answers: vLLM sizes "
        "itself by the memory it finds free and counts another's loading as its own (vllm#55827)",
        _SHARING if plugin else _COPYING,
    ]
    fits, weights = (
        (pool.fits_after, pool.weights_bytes_after) if plugin else (pool.fits_before, pool.weights_bytes_before)
    )
    if not fits:
        short = weights + pool.reserve_bytes - pool.device_bytes
        how = "even with shared tensors held once" if plugin else "with private copies"
        notes.append(
            f"the models do not fit one device {how}, {short} bytes missing: commands leave "
            "the cache to vLLM; give each model its own device, or set deploy.device_memory right"
        )
    return tuple(notes)
