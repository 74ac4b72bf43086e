"""Exports for real engines: which tensors are merged, and what is added to them, is said by the test."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.records import Adjustment
from sandhi_core.store import Store
from tests.exported import Case, fingerprint_of, make_residual, own_tensor
from tests.models import edit_json, edit_tensors

Merged = Mapping[str, Sequence[str]]
"""Tensor name to the models that hold its mean over all models."""
Added = Mapping[tuple[str, str], tuple[int, bool]]
"""Model and tensor to the rank of a residual, and whether rows are scaled and shifted."""


def exported(root: Path, models: Mapping[str, Path], merged: Merged, added: Added) -> Path:
    """The export of checkpoints of one architecture."""
    checkpoints = {name: Checkpoint.open(path, name) for name, path in models.items()}
    store = Store(root / "store")
    tensors: dict[str, dict[str, str]] = {name: {} for name in models}
    means = {}
    for tensor, holders in merged.items():
        own = [own_tensor(checkpoint, tensor) for checkpoint in checkpoints.values()]
        mean = torch.stack([t.float() for t in own]).mean(0).to(own[0].dtype)
        digest = store.put(tensor, mean)
        means[digest] = mean
        for model in holders:
            tensors[model][tensor] = digest
    adjustments: dict[str, dict[str, Adjustment]] = {}
    for (model, tensor), (rank, affine) in added.items():
        shape = checkpoints[model].header(tensor).shape
        adjustments.setdefault(model, {})[tensor] = make_residual(store, tensor, shape, rank, affine)
    tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
    entries = tuple(ModelEntry(name=n, path=str(p), tasks=tasks) for n, p in models.items())
    case = Case(
        root=root,
        pool=Pool(name="served", models=entries),
        checkpoints=checkpoints,
        fingerprints={name: fingerprint_of(checkpoint) for name, checkpoint in checkpoints.items()},
        tensors=tensors,
        merged=means,
        adjustments=adjustments,
    )
    return case.root / case.export().export


def moved(source: Path, directory: Path, seed: int, by: float = 0.02, dtype: torch.dtype | None = None) -> Path:
    """A copy of a checkpoint whose matrices are moved as fine-tuning moves them, embeddings and head excepted; 0: none
    is. In another dtype where one is given."""
    shutil.copytree(source, directory)
    drawn = torch.Generator().manual_seed(seed)

    def move(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in sorted(tensors.items()):
            if tensor.ndim == 2 and name.endswith("_proj.weight"):
                tensors[name] = (tensor + by * torch.randn(tensor.shape, generator=drawn)).to(tensor.dtype)
            tensors[name] = tensors[name].to(dtype or tensor.dtype)

    edit_tensors(directory, move)
    return directory


def widened(source: Path, directory: Path) -> Path:
    """A copy of a trained fixture model with attention heads of 32 instead of 16 numbers, which answers the same: vLLM
    on the CPU has no kernel for 16.

    The new numbers are nought; the others keep their rotary frequencies, of which twice as wide a head has every second
    one again. Queries grow by the root of 2, since their products are divided by a larger root.
    """
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    old, new = config["head_dim"], 2 * config["head_dim"]
    half = torch.arange(old // 2)
    spread = torch.cat([2 * half, old + 2 * half])

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            kind = name.split(".")[-2]
            if kind in ("q_proj", "k_proj", "v_proj"):
                heads = tensor.reshape(-1, old, tensor.shape[1])
                wide = heads.new_zeros(len(heads), new, tensor.shape[1])
                wide[:, spread] = heads * (2**0.5 if kind == "q_proj" else 1)
                tensors[name] = wide.reshape(-1, tensor.shape[1])
            elif kind == "o_proj":
                heads = tensor.reshape(len(tensor), -1, old)
                wide = heads.new_zeros(len(tensor), heads.shape[1], new)
                wide[:, :, spread] = heads
                tensors[name] = wide.reshape(len(tensor), -1)

    edit_tensors(directory, widen)
    edit_json(directory / "config.json", head_dim=new)
    return directory
