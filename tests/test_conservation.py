"""Nothing of a checkpoint is lost, added, renamed or changed by an export, whatever the pool: read with safetensors
alone."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sandhi_core.assignment import Assignment
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError
from sandhi_core.export import export_pool
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import ModelEntry, Pool, TaskBudget
from sandhi_core.records import Fingerprint, Slot
from sandhi_core.store import Store
from tests.models import BUILDERS, INDEX, WEIGHTS, edit_tensors, shard

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
EXTRA = {"notes.txt": b"of the model\r\n", "deep/er/data.bin.txt": bytes(range(256)), "empty": b"", "ü .md": b"\xff"}
"""Files beside the weights; the last is no UTF-8."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that pools are drawn from, made when first drawn."""
    return tmp_path_factory.mktemp("bases")


def base(bases: Path, drawn: Mapping[str, Any]) -> Path:
    directory = bases / "-".join(str(drawn[part]) for part in ("kind", "seed", "dtype", "tied"))
    if directory.exists():
        return directory
    return BUILDERS[drawn["kind"]](directory, drawn["seed"], dtype=drawn["dtype"], tie_word_embeddings=drawn["tied"])


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kind": draw(st.sampled_from(sorted(BUILDERS))),
        "seed": draw(st.integers(0, 1)),
        "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        "tied": draw(st.booleans()),
        "shards": draw(st.integers(1, 4)),
        "extra": draw(st.sets(st.sampled_from(sorted(EXTRA)))),
        "linked": draw(st.booleans()),
        "buffer": draw(st.booleans()),
        "float32_norm": draw(st.booleans()),
        "unknown": draw(st.integers(0, 9)) == 0,
    }


def made(directory: Path, drawn: Mapping[str, Any], bases: Path) -> Path:
    shutil.copytree(base(bases, drawn), directory)

    def edit(tensors: dict[str, Tensor]) -> None:
        if drawn["buffer"]:
            tensors[INV_FREQ] = torch.arange(4.0)
        if drawn["float32_norm"]:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
        if drawn["unknown"]:
            tensors["model.layers.0.self_attn.surplus.weight"] = torch.ones(3)

    edit_tensors(directory, edit)
    for name in drawn["extra"]:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(EXTRA[name])
    if drawn["linked"]:
        elsewhere = directory.with_name(f"{directory.name}.blob")
        elsewhere.write_bytes(b"in the hub's cache")
        (directory / "linked.json").symlink_to(elsewhere)
    return shard(directory, drawn["shards"]) if drawn["shards"] > 1 else directory


def opened(directory: Path, name: str, scans: Path) -> tuple[Checkpoint, Fingerprint] | None:
    try:
        checkpoint = Checkpoint.open(directory, name)
        return checkpoint, fingerprint(checkpoint, scans)
    except CheckpointError:
        return None


def assigned(
    draw: st.DataObject, found: Mapping[str, tuple[Checkpoint, Fingerprint]], store: Store
) -> tuple[dict[str, dict[str, str]], dict[str, Tensor]]:
    """Some slots of each key get one tensor in several models, or in one; and that tensor by digest."""
    by_key: dict[str, list[Slot]] = {}
    for _, record in found.values():
        for slot in record.slots:
            by_key.setdefault(slot.key, []).append(slot)
    tensors: dict[str, dict[str, str]] = {name: {} for name in found}
    shared: dict[str, Tensor] = {}
    for key in sorted(by_key):
        taking = draw.draw(st.lists(st.sampled_from(by_key[key]), max_size=4, unique=True), label="taking")
        if not taking:
            continue
        own = found[taking[0].model][0].tensor(taking[0].tensor)
        tensor = own.clone() if draw.draw(st.booleans(), label="a member's") else torch.randn(own.shape).to(own.dtype)
        digest = store.put(taking[0].tensor, tensor)
        shared[digest] = tensor
        for slot in taking:
            tensors[slot.model][slot.tensor] = digest
    return tensors, shared


def weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of every file that the index names, or of the one file."""
    if not (directory / INDEX).exists():
        return load_file(directory / WEIGHTS)
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    held: dict[str, Tensor] = {}
    for file in sorted(set(index.values())):
        with safe_open(directory / file, "pt") as part:
            for name in part.keys():  # noqa: SIM118 - no dict
                assert index[name] == file and name not in held
                held[name] = part.get_tensor(name)
    assert held.keys() == index.keys()
    return held


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, -0 and all."""
    bits = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(models(), min_size=1, max_size=4), st.data())
def test_every_tensor_and_file_of_an_export_is_accounted_for(
    bases: Path, drawn: list[dict[str, Any]], data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder)
        sources = {f"m{i}": made(root / f"m{i}", one, bases) for i, one in enumerate(drawn)}
        looked = {name: opened(path, name, root / "scans") for name, path in sources.items()}
        for (name, seen), one in zip(looked.items(), drawn, strict=True):
            assert (seen is None) == one["unknown"], name  # refused as a whole, or taken as a whole
        found = {name: seen for name, seen in looked.items() if seen is not None}
        if not found:
            return
        store = Store(root / "store")
        tensors, shared = assigned(data, found, store)
        tasks = (TaskBudget(task="t", metric="acc", budget=0.1),)
        entries = tuple(ModelEntry(name=n, path=str(sources[n]), tasks=tasks) for n in found)
        merged = export_pool(
            Pool(name="drawn", models=entries),
            "deployed",
            {n: checkpoint for n, (checkpoint, _) in found.items()},
            {n: record for n, (_, record) in found.items()},
            {n: Assignment(held) for n, held in tensors.items()},
            {n: n for n in found},
            store,
            root / "exports",
        )
        export = root / merged.export
        manifest = read_manifest(export)
        assert verify_disk(export, manifest).problems == ()
        for name in found:
            conserved(sources[name], export / name, tensors[name], shared)


def conserved(source: Path, exported: Path, held: Mapping[str, str], shared: Mapping[str, Tensor]) -> None:
    before, after = weights(source), weights(exported)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert same(after[name], shared[held[name]] if name in held else tensor), name
    beside, copied = others(source), others(exported)
    assert beside == copied


def others(directory: Path) -> dict[str, bytes]:
    files = (p for p in directory.rglob("*") if p.is_file())
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in files
        if p.suffix != ".safetensors" and p.name != INDEX
    }
