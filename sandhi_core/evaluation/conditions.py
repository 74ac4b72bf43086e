"""Under what conditions models are scored: everything besides weights and tasks that decides a score."""

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sandhi_core.pool import EvaluationSettings, size_in_bytes

SCORING_VERSION = 4
"""Changes whenever the same model, questions and settings would be scored otherwise than before."""


def conditions(settings: EvaluationSettings) -> dict[str, Any]:
    """Plain JSON; part of the key of every score and of what the planner compares. Thread counts are left out:
    they move floating-point noise only. Where the task files lie is left out too: their contents count."""
    return {
        "scoring": SCORING_VERSION,
        "splits": settings.splits.model_dump(mode="json"),
        "seed": settings.seed,
        "dtype": str(dtype_of(settings)),
        "device": device_of(settings).partition(":")[0],
        "batch_tokens": settings.batch_tokens,
        "versions": {package: version(package) for package in ("torch", "transformers", "lm_eval")},
    }


def device_of(settings: EvaluationSettings) -> str:
    """Where models are scored."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(settings: EvaluationSettings) -> "torch.dtype | str":
    """What models are scored in, as from_pretrained takes it."""
    if settings.dtype != "auto":
        dtype: torch.dtype = getattr(torch, settings.dtype)
        return dtype
    return torch.float32 if device_of(settings) == "cpu" else "auto"


def cache_bytes(settings: EvaluationSettings) -> dict[str, int]:
    """Bytes for hidden states by the device they may live on, where models are scored first: as set, or a quarter of
    what is free there."""
    device = device_of(settings)
    places = [device] if device == "cpu" else [device, "cpu"]
    if settings.cache_memory is not None:
        return dict.fromkeys(places, size_in_bytes(settings.cache_memory))
    return {place: _free(place) // 4 for place in places}


def _free(device: str) -> int:
    """Bytes that tensors may still take there. Unknown (mps): none."""
    if device.startswith("cuda"):
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return _free_memory() if device == "cpu" else 0


def _free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that is limited."""
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no control groups, or no limit: "max"
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(limits, default=0))
