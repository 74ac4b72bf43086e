"""How much memory hidden states may take, and where."""

from contextlib import suppress
from pathlib import Path

import torch

from sandhi_core.evaluation.conditions import device_of
from sandhi_core.pools.pool import EvaluationSettings, size_in_bytes


def cache_bytes(settings: EvaluationSettings) -> dict[str, int]:
    """Bytes for hidden states by the device they may live on: as set, on the device where models are scored; or a
    quarter of what is free there, or in the host's memory."""
    device = device_of(settings)
    if settings.cache_memory is not None:
        return {device: size_in_bytes(settings.cache_memory)}
    return {place: _free(place) // 4 for place in dict.fromkeys([device, "cpu"])}


def _free(device: str) -> int:
    """Bytes that tensors may still take there; none where that cannot be found out."""
    if device.startswith("cuda"):
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return _free_memory() if device == "cpu" else 0


def _free_memory() -> int:
    """Bytes that this process may still take: of the machine, and of its control group where that is limited."""
    limits = []
    with suppress(OSError):  # not Linux
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * int(line.split()[1]))
    with suppress(OSError, ValueError):  # no control groups, or no limit: "max"
        limits.append(_left_to_group(Path("/sys/fs/cgroup")))
    return max(0, min(limits, default=0))


def _left_to_group(group: Path) -> int:
    """Bytes below a control group's limit. Pages of files count as used there, and are given up when memory is needed:
    after a scan of checkpoints nearly all are such."""
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    pages = sum(int(statistics.get(name, 0)) for name in ("active_file", "inactive_file"))
    return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()) + pages
