"""A small pool of real checkpoints (one file, several shards, tied head) and its export, made by hand."""

import hashlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from sandhi_core.assignment import Assignment, factor_names, vector_names
from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.safetensors_file import tensor_over
from sandhi_core.export import export_pool
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import DeploySettings, ModelEntry, Pool, TaskBudget
from sandhi_core.records import Adjustment, Fingerprint, Manifest, MergedWeights, TensorInfo
from sandhi_core.rungs.residual import DTYPE, Residual, attach
from sandhi_core.store import Store
from tests.models import WEIGHTS, edit_tensors, shard, tiny_llama

GATE = "model.layers.0.mlp.gate_proj.weight"  # merged for single and sharded
UP = "model.layers.1.mlp.up_proj.weight"  # merged for all three
DOWN = "model.layers.1.mlp.down_proj.weight"  # merged for tied alone: private
EMBED = "model.embed_tokens.weight"  # the same in single and sharded
NORM = "model.norm.weight"  # the same in all, and small: private
VECTORS = {("single", GATE), ("tied", UP)}  # of rows, beside a residual and without one
RANKS = {("single", GATE): 2, ("single", UP): 3, ("tied", DOWN): 1}  # of residuals; sharded adds nothing
MODELS = ("sharded", "single", "tied")


def make_models(directory: Path, dtype: torch.dtype = torch.float32, **size: int) -> dict[str, Path]:
    """Three tiny Llamas with files beside their weights."""
    made = {
        name: tiny_llama(directory / name, seed, dtype=dtype, tie_word_embeddings=name == "tied", **size)
        for seed, name in enumerate(MODELS)
    }
    embedding = load_file(made["sharded"] / WEIGHTS)[EMBED]
    edit_tensors(made["single"], lambda tensors: tensors.update({EMBED: embedding}))
    for path in made.values():
        edit_tensors(path, lambda tensors: tensors[NORM].fill_(1.0))
        (path / "notes.txt").write_bytes(f"{path.name}\r\n".encode())
    shard(made["sharded"], 3)
    blob = directory / "blob"
    blob.write_bytes(b"linked, as in the hub's cache")
    (made["single"] / "extra").mkdir()
    (made["single"] / "extra" / "linked.txt").symlink_to(blob)
    return made


def fingerprint_of(checkpoint: Checkpoint) -> Fingerprint:
    tensors = []
    for name in sorted(checkpoint.names):
        h = checkpoint.header(name)
        digest = tensor_digest(h.dtype, h.shape, checkpoint.raw(name))
        tensors.append(
            TensorInfo(
                name=name,
                file=h.file,
                dtype=h.dtype,
                shape=tuple(h.shape),
                nbytes=h.nbytes,
                digest=digest,
                mean=0.0,
                std=1.0,
                constant_rows=0,
            )
        )
    files = {f: hashlib.sha256((checkpoint.directory / f).read_bytes()).hexdigest() for f in checkpoint.beside()}
    return Fingerprint(
        model=checkpoint.model,
        model_type="llama",
        layers=2,
        dtype=tensors[0].dtype,
        files=files,
        tensors=tuple(tensors),
        slots=(),
        private=(),
        rows="",
    )


@dataclass
class Case:
    """Everything that an export is made from, and where it goes."""

    root: Path
    pool: Pool
    checkpoints: dict[str, Checkpoint]
    fingerprints: dict[str, Fingerprint]
    tensors: dict[str, dict[str, str]]
    merged: dict[str, Tensor]  # by digest
    adjustments: dict[str, dict[str, Adjustment]] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def assignments(self) -> dict[str, Assignment]:
        return {name: Assignment(tensors, self.adjustments.get(name, {})) for name, tensors in self.tensors.items()}

    def residual(self, name: str, tensor: str) -> Residual:
        added = self.adjustments[name][tensor]
        digests = {"up": added.up, "down": added.down, "scale": added.scale, "shift": added.shift}
        return Residual(**{part: self.store.tensor(digest) for part, digest in digests.items() if digest})

    def export(self) -> MergedWeights:
        keys = {name: f"weights of {name}" for name in self.checkpoints}
        return export_pool(
            self.pool,
            "deployed",
            self.checkpoints,
            self.fingerprints,
            self.assignments,
            keys,
            self.store,
            self.exports,
        )

    def exported(self) -> tuple[Path, Manifest]:
        root = self.root / self.export().export
        return root, read_manifest(root)

    def swapped(self, name: str) -> PreTrainedModel:
        """The model as the search scores it: the original, its weights replaced in place, residuals attached."""
        model = stock(self.checkpoints[name].directory)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for tensor, digest in self.tensors[name].items():
                parameters[tensor].copy_(self.merged[digest])
        for tensor in self.adjustments.get(name, {}):
            attach(model.get_submodule(tensor.removesuffix(".weight")), self.residual(name, tensor))
        return model


def stock(directory: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True).eval()


def own_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    header = checkpoint.header(name)
    return tensor_over(header.dtype, header.shape, checkpoint.raw(name))


def make_case(
    root: Path,
    directories: dict[str, Path],
    ranks: Mapping[tuple[str, str], int] | None = None,
    vectors: Collection[tuple[str, str]] = (),
) -> Case:
    """`ranks`: of the residuals that models add to what they share; none where it is not given. `vectors`: where they
    scale and shift rows."""
    checkpoints = {name: Checkpoint.open(path, name) for name, path in directories.items()}
    store = Store(root / "store")
    dtype = own_tensor(checkpoints["single"], GATE).dtype
    tensors: dict[str, dict[str, str]] = {name: {} for name in checkpoints}
    merged: dict[str, Tensor] = {}
    for tensor, models in {GATE: ("sharded", "single"), UP: MODELS, DOWN: ("tied",)}.items():
        mean = torch.stack([own_tensor(c, tensor).float() for c in checkpoints.values()]).mean(0).to(dtype)
        digest = store.put(tensor, mean)
        merged[digest] = mean
        for model in models:
            tensors[model][tensor] = digest
    adjustments: dict[str, dict[str, Adjustment]] = {}
    for model, tensor in sorted({*(ranks or {}), *vectors}):
        shape, rank = checkpoints[model].header(tensor).shape, (ranks or {}).get((model, tensor), 0)
        residual = make_residual(store, tensor, shape, rank, (model, tensor) in vectors)
        adjustments.setdefault(model, {})[tensor] = residual
    tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
    entries = tuple(ModelEntry(name=n, path=str(p), tasks=tasks) for n, p in directories.items())
    return Case(
        root=root,
        pool=Pool(name="small", models=entries, deploy=DeploySettings(engine="transformers" if ranks else "vllm")),
        checkpoints=checkpoints,
        fingerprints={name: fingerprint_of(c) for name, c in checkpoints.items()},
        tensors=tensors,
        merged=merged,
        adjustments=adjustments,
    )


def make_residual(store: Store, tensor: str, shape: Sequence[int], rank: int, affine: bool = False) -> Adjustment:
    """Random factors, and vectors, in the store."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rank)
    down = torch.randn(rank, columns, generator=generator).to(DTYPE)
    up = (0.1 * torch.randn(rows, rank, generator=generator)).to(DTYPE)
    names = (*factor_names(tensor), *vector_names(tensor))
    scale, shift = (centre + 0.1 * torch.randn(rows, generator=generator).to(DTYPE) for centre in (1.0, 0.0))
    return Adjustment(
        kind="affine" if affine else "low_rank",
        nbytes=down.nbytes + up.nbytes + affine * (scale.nbytes + shift.nbytes),
        rank=rank,
        down=store.put(names[0], down) if rank else "",
        up=store.put(names[1], up) if rank else "",
        scale=store.put(names[2], scale) if affine else "",
        shift=store.put(names[3], shift) if affine else "",
    )


def copy_case(case: Case, root: Path) -> Case:
    """The same inputs under another artifact root."""
    shutil.copytree(case.root / "store", root / "store")
    return Case(root, case.pool, case.checkpoints, case.fingerprints, case.tensors, case.merged, case.adjustments)
