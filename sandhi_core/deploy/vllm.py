"""vLLM's commands and what to know about them. Flags as of vLLM 0.32 (`vllm serve --help`)."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandhi_core.deploy.launch import Launch
from sandhi_core.deploy.sizing import ModelMemory, PoolMemory
from sandhi_core.errors import ProofError

RESIDUALS = False  # are not applied, and nothing would say so
FIRST_PORT = 8000
BLOCK = 16
"""Tokens in a block of vLLM's cache, by default: a sequence takes whole ones."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""safetensors' spelling to vLLM's."""


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
) -> Launch:
    """Start `model` from `directory` as number `place` (from 0) on the device.

    Stock vLLM holds private copies, so the cache is given the room of `memory.before`. vLLM refuses to start
    where less than --gpu-memory-utilization of the device is free, so that goes along although the cache's
    size is given. Where the pool does not fit the device, both are left to vLLM.
    """
    port = FIRST_PORT + place
    kv_tokens = memory.before.kv_tokens if pool.fits_before else None
    length = _context(config, kv_tokens)
    argv = [
        "vllm",
        "serve",
        str(directory),
        "--served-model-name",
        model,
        "--port",
        str(port),
        "--dtype",
        dtype,
    ]
    if length is not None:
        argv += ["--max-model-len", str(length)]
    if pool.fits_before:
        share = (memory.weights_bytes + memory.before.kv_bytes) / pool.device_bytes
        utilization = min(max(math.ceil(share * 1e4), 1) / 1e4, 1.0)
        argv += ["--kv-cache-memory-bytes", str(memory.before.kv_bytes)]
        argv += ["--gpu-memory-utilization", f"{utilization:.4f}"]
    return Launch(tuple(argv), port, dtype, length, tuple(_notes(config, memory, length)))


def _context(config: Mapping[str, Any], kv_tokens: int | None) -> int | None:
    """Tokens of the longest sequence: what the model was made for, as far as the cache holds one such
    sequence (vLLM refuses to start otherwise). None leaves it to vLLM."""
    limits = [made_for] if (made_for := _made_for(config)) else []
    if kv_tokens is not None:
        limits.append(max(kv_tokens // BLOCK, 1) * BLOCK)
    return min(limits, default=None)


def _made_for(config: Mapping[str, Any]) -> int | None:
    return (config.get("text_config") or config).get("max_position_embeddings")


def _notes(config: Mapping[str, Any], memory: ModelMemory, length: int | None) -> Iterator[str]:
    kv = memory.kv
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


def pool_notes(pool: PoolMemory) -> tuple[str, ...]:
    """What to know about starting all of them."""
    notes = [
        "start the servers one after the other, each when GET /health of the one before answers: vLLM sizes "
        "itself by the memory it finds free and counts another's loading as its own (vllm#55827)",
        "stock vLLM copies every weight to the device: these commands share files on disk and in the page "
        "cache, not device memory",
    ]
    if not pool.fits_before:
        short = pool.weights_bytes_before + pool.reserve_bytes - pool.device_bytes
        notes.append(
            f"the models do not fit one device with private copies, {short} bytes missing: commands leave "
            "the cache to vLLM; give each model its own device, or set deploy.device_memory right"
        )
    return tuple(notes)
