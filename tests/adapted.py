"""A pool of tiny models of which some are adapters of one base, and its export, made by hand."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.pools.pool import Adapters, DeploySettings, ModelEntry, Pool, TaskBudget
from sandhi_core.store import Store
from tests.exported import Case, fingerprint_of, make_residual, own_tensor
from tests.models import WEIGHTS, edit_tensors, tiny_llama

NORM = "model.norm.weight"  # small: private in every model
RANKS = {  # of residuals, by model and the layer's place among the linear ones
    "ann": {0: 3, 1: 1, 9: 8},
    "ben": {2: 5},
    "cat": {},  # holds the base as it is
    "dot": {0: 2},  # has a norm of its own
    "eve": {1: 17},  # of a larger rank than is allowed
}
ADAPTED = ("ann", "ben", "cat")
MAX_RANK = 16


def adapted_case(root: Path, dtype: torch.dtype = torch.float32) -> Case:
    """Six models: three adapters, and three that are none. `far` is of another width."""
    size = {"dtype": dtype, "head_dim": 32}  # vLLM's least on a CPU
    directories = {name: tiny_llama(root / "models" / name, seed=seed, **size) for seed, name in enumerate(RANKS)}
    directories["far"] = tiny_llama(root / "models" / "far", seed=9, hidden_size=64, **size)
    first = load_file(directories["ann"] / WEIGHTS)
    for name in RANKS:
        rest = {n: t for n, t in first.items() if not n.endswith("proj.weight")}
        edit_tensors(directories[name], lambda tensors, rest=rest: tensors.update(rest))
    edit_tensors(directories["dot"], lambda tensors: tensors[NORM].mul_(2.0))
    checkpoints = {name: Checkpoint.open(path, name) for name, path in directories.items()}
    store, merged = Store(root / "store"), {}
    linear = [name for name in sorted(first) if name.endswith("proj.weight")]
    tensors: dict[str, dict[str, str]] = {name: {} for name in directories}
    for tensor in linear:
        mean = torch.stack([own_tensor(checkpoints[m], tensor).float() for m in RANKS]).mean(0).to(dtype)
        digest = store.put(tensor, mean)
        merged[digest] = mean
        for model in RANKS:
            tensors[model][tensor] = digest
    adjustments = {
        model: {linear[at]: make_residual(store, linear[at], first[linear[at]].shape, rank) for at, rank in of.items()}
        for model, of in RANKS.items()
    }
    tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
    entries = tuple(ModelEntry(name=n, path=str(p), tasks=tasks) for n, p in directories.items())
    return Case(
        root=root,
        pool=Pool(
            name="small", models=entries, deploy=DeploySettings(plugin=False, adapters=Adapters(max_rank=MAX_RANK))
        ),
        checkpoints=checkpoints,
        fingerprints={name: fingerprint_of(c) for name, c in checkpoints.items()},
        tensors=tensors,
        merged=merged,
        adjustments=adjustments,
    )
