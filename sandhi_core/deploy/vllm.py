"""vLLM's commands and what to know about them. Flags as of vLLM 0.32 (`vllm serve --help`; for adapters also
vllm/config/lora.py and docs/features/lora)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from sandhi_core.deploy import launch as launches
from sandhi_core.deploy.kv import KvCache, head_size
from sandhi_core.deploy.launch import PYTHON, Launch
from sandhi_core.deploy.sizing import Capacity, ModelMemory, PoolMemory
from sandhi_core.deploy.stock import BaseMemory, StockMemory
from sandhi_core.errors import ProofError
from sandhi_core.records import Base

FIRST_PORT = 8000
METRICS = "/metrics"
MODULE = "vllm.entrypoints.openai.api_server"
"""vLLM's server by its module: the `vllm` command is there only where a distribution of that name is installed."""
NAME = "sandhi"
"""Of the plugin's quantization and load format."""
PLUGIN = ("--quantization", NAME, "--load-format", NAME)
"""What has vLLM use Sandhi's plugin: shared tensors are mapped, and what models add to them is applied."""
BLOCK = 16
"""Tokens in a block of vLLM's cache, by default: a sequence takes whole ones."""

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of a head that vLLM's attention takes on a CPU (vllm/v1/attention/backends/cpu_attn.py); an engine with
others starts, and fails at the first request."""

DTYPES = {stored: name for stored, name in launches.DTYPES.items() if stored != "F64"}
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


def heads_beyond_cpu(config: Mapping[str, Any]) -> int | None:
    """Elements of a head of the model with this config.json where vLLM does not take such on a CPU; None where it does,
    or the configuration is one of which vLLM says more itself."""
    with suppress(KeyError, TypeError, ValueError, ZeroDivisionError):
        size = head_size(config.get("text_config") or config)
        return None if size in CPU_HEADS else size
    return None


def command(
    export: PurePath,
    directory: str,
    options: Sequence[str],
    port: int | None,
    *,
    python: str = PYTHON,
    host: str = "127.0.0.1",
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, ...]:
    """What starts vLLM's OpenAI server for what lies in `directory` of the export. `adapters`: directories there, by
    the names that they answer by."""
    address = ("--host", host, "--port", str(port))
    modules = [_module(name, str(export / adapter)) for name, adapter in adapters.items()]
    lora = ("--lora-modules", *modules) if modules else ()
    return (python, "-m", MODULE, "--model", str(export / directory), *options, *lora, *address)


def _module(name: str, path: str) -> str:
    """An adapter as --lora-modules takes it: of a path with one of these signs `name=path` would be read otherwise."""
    return json.dumps({"name": name, "path": path}) if set(path) & set("=,") else f"{name}={path}"


def served(names: Sequence[str], dtype: str, plugin: bool) -> tuple[str, ...]:
    """The options that every server has: the names it answers by, the dtype, and whether it has Sandhi's plugin."""
    return ("--served-model-name", *names, "--dtype", dtype, *(PLUGIN if plugin else ()))


def launch(
    model: str,
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    pool: PoolMemory,
    memory: ModelMemory,
    plugin: bool,
) -> Launch:
    """Start `model` as number `place` (from 0) on the device.

    With the plugin shared tensors are held once, and the cache is given the room of `memory.after`: the plugin refuses
    to start where it would have to copy them. Stock vLLM holds private copies of all, so there it is that of
    `memory.before`. Where the pool does not fit the device, the cache is left to vLLM.
    """
    fits, room = (pool.fits_after, memory.after) if plugin else (pool.fits_before, memory.before)
    options, weights = served([model], dtype, plugin), memory.weights_bytes
    return _launch(options, place, dtype, config, weights, room if fits else None, pool, memory.kv)


def launch_base(
    base: Base,
    modules: Sequence[str],
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
    names = [model for model, adapter in base.adapters.items() if adapter.directory is None]
    adapters = len(base.adapters) - len(names)
    options = served(names or [base.directory], dtype, plugin=False)
    if adapters:
        options += ("--enable-lora", "--max-lora-rank", str(memory.max_rank), "--max-loras", str(adapters))
        options += ("--lora-target-modules", *modules)
    room = memory.capacity if pool.fits else None
    weights = memory.weights_bytes + memory.adapter_bytes
    found = _launch(options, place, dtype, config, weights, room, pool, memory.kv)
    if adapters and dtype == DTYPES["F32"]:
        note = "on GPUs vLLM's kernels for adapters take bfloat16 and float16 only: in float32 serve from a CPU"
        return found._replace(notes=(*found.notes, note))
    return found


def _launch(
    options: tuple[str, ...],
    place: int,
    dtype: str,
    config: Mapping[str, Any],
    weights_bytes: int,
    room: Capacity | None,
    pool: PoolMemory | StockMemory,
    kv: KvCache,
) -> Launch:
    """With a cache of `room`, which None leaves to vLLM, beside weights of this size.

    vLLM refuses to start where less than --gpu-memory-utilization of the device is free, so that goes along although
    the cache's size is given. It counts all weights, those too that another process holds for it: vLLM takes off by
    itself what its loader says of them (request_memory in vllm/v1/worker/utils.py, 0.32)."""
    length = _context(config, None if room is None else room.kv_tokens)
    if length is not None:
        options += ("--max-model-len", str(length))
    if room is not None:
        share = (weights_bytes + room.kv_bytes) / pool.device_bytes
        utilization = min(max(math.ceil(share * 1e4), 1) / 1e4, 1.0)
        options += ("--kv-cache-memory-bytes", str(room.kv_bytes))
        options += ("--gpu-memory-utilization", f"{utilization:.4f}")
    return Launch(options, FIRST_PORT + place, METRICS, dtype, length, tuple(_notes(config, kv, length)))


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
    "shared tensors from the export's files and hold each once. On a GPU a process of its own holds them, which runs "
    "before the servers and is named to each: `sandhi serve` starts it (sandhi_core.serving.cuda.owner). The plugin "
    "refuses to start rather than copy"
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
