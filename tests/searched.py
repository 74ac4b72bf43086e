"""A pool that engines can serve (vLLM's kernels want heads of 32), searched and built for real: near copies of one
random model, which answer the questions of the trained pool by chance."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.models import edit_tensors, tiny_llama

TASKS = {"ann": "sandhi_units", "ben": "sandhi_past"}
SIZE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def searched_pool(folder: Path, trained: Path, dtype: torch.dtype, *, kin: bool = False, **sections: Any) -> Path:
    """Write the models and the pool file; budgets are so large that everything is shared. Models that are `kin` differ
    by what residuals and vectors of rows make good."""
    made: Sequence[str] = tuple(TASKS)
    for seed, name in enumerate(made):
        directory = tiny_llama(folder / name, dtype=dtype, tokenizer=False, **SIZE)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(trained / "models" / "base" / file, directory)
        generator = torch.Generator().manual_seed(seed)

        def vary(tensors: dict[str, torch.Tensor], generator: torch.Generator = generator) -> None:
            for tensor_name, tensor in tensors.items():
                tensor += (tuned if kin else noise)(tensor_name, tensor, generator).to(tensor.dtype)

        edit_tensors(directory, vary)
    evaluation = {"include_path": str(trained / "tasks"), "dtype": "float32", "device": "cpu", "threads": 1}
    pool = {
        "name": "searched",
        "models": [
            {"name": name, "path": str(folder / name), "tasks": [{"task": task, "metric": "acc", "budget": 0.9}]}
            for name, task in TASKS.items()
        ],
        "evaluation": evaluation,
    } | sections
    path = folder / "searched.yaml"
    path.write_text(yaml.safe_dump(pool))
    return path


def noise(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return 0.02 * torch.randn(tensor.shape, generator=generator)


def tuned(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows of some matrices scaled, a matrix of rank two added to others; all else stays as it is."""
    if tensor.dim() != 2 or "proj" not in name:
        return torch.zeros(tensor.shape)
    rows, columns = tensor.shape
    if "down_proj" in name or "k_proj" in name:
        return 0.4 * torch.randn(rows, 1, generator=generator) * tensor
    return 0.03 * torch.randn(rows, 2, generator=generator) @ torch.randn(2, columns, generator=generator)
