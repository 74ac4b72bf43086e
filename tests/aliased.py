"""An export in which equal bytes go by several names: a head that repeats the embedding, and names without a prefix."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.store import Store
from tests.exported import EMBED, GATE, UP, Case, fingerprint_of, own_tensor
from tests.models import WEIGHTS, edit_tensors, tiny_llama

HEAD = "lm_head.weight"
NAMES = ("bare", "other", "twice")
BARE = UP.removeprefix("model.")


def make_aliased(root: Path, dtype: torch.dtype = torch.float32) -> Case:
    """`twice` stores its embedding as its head again, `other` has that embedding and a merged matrix in common with it,
    `bare` has the same matrices by names without `model.` before them."""
    size = {"intermediate_size": 64}  # no matrix of an MLP is smaller than a page
    made = {name: tiny_llama(root / "models" / name, seed, dtype=dtype, **size) for seed, name in enumerate(NAMES)}
    twice = load_file(made["twice"] / WEIGHTS)
    edit_tensors(made["twice"], lambda tensors: tensors.update({HEAD: twice[EMBED].clone()}))
    edit_tensors(made["other"], lambda tensors: tensors.update({EMBED: twice[EMBED]}))
    edit_tensors(made["bare"], lambda tensors: tensors.update({UP: twice[UP], EMBED: twice[EMBED]}))
    edit_tensors(made["bare"], _without_prefix)
    checkpoints = {name: Checkpoint.open(path, name) for name, path in made.items()}
    mean = torch.stack([own_tensor(checkpoints[m], GATE).float() for m in ("other", "twice")]).mean(0).to(dtype)
    digest = Store(root / "store").put(GATE, mean)
    tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
    entries = tuple(ModelEntry(name=n, path=str(p), tasks=tasks) for n, p in made.items())
    return Case(
        root=root,
        pool=Pool(name="aliased", models=entries),
        checkpoints=checkpoints,
        fingerprints={name: fingerprint_of(checkpoint) for name, checkpoint in checkpoints.items()},
        tensors={"bare": {}, "other": {GATE: digest}, "twice": {GATE: digest}},
        merged={digest: mean},
    )


def _without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    for name in [n for n in tensors if n.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)
