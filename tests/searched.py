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


def searched_pool(folder: Path, trained: Path, dtype: torch.dtype, **sections: Any) -> Path:
    """Write the models and the pool file; budgets are so large that everything is shared."""
    made: Sequence[str] = tuple(TASKS)
    for seed, name in enumerate(made):
        directory = tiny_llama(folder / name, dtype=dtype, tokenizer=False, **SIZE)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(trained / "models" / "base" / file, directory)
        generator = torch.Generator().manual_seed(seed)

        def vary(tensors: dict[str, torch.Tensor], generator: torch.Generator = generator) -> None:
            for tensor in tensors.values():
                tensor += 0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

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
