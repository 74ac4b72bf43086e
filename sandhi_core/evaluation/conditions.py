"""Under what conditions models are scored: everything besides weights and tasks that decides a score."""

from typing import Any

import torch

from sandhi_core.evaluation.taskfiles import installed
from sandhi_core.pools.pool import EvaluationSettings

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
        "versions": {package: installed(package) for package in ("torch", "transformers", "lm_eval")},
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
