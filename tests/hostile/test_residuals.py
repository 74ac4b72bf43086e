"""Exports with residuals that somebody or something touched: never loaded as something else than was scored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sandhi_core.assignment import factor_names, is_factor, vector_names
from sandhi_core.checkpoints.safetensors_file import Entry, map_file, raw_bytes, write_safetensors
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX, INDEX
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError, ProofError, ServingError
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.serving.load import load
from tests.exported import DOWN, EMBED, GATE, NORM, RANKS, UP, VECTORS, make_case, make_models
from tests.measured import measure

PRIVATE, ADAPTER = "private.sandhi", "adapter_model.sandhi"
A, B = factor_names(GATE)
S, T = vector_names(GATE)
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = make_models(tmp_path_factory.mktemp("models"))
    return make_case(tmp_path_factory.mktemp("sound"), models, RANKS, VECTORS).exported()[0]


@pytest.fixture
def single(sound: Path, tmp_path: Path) -> Path:
    """A copy of one model, free to be damaged."""
    return Path(shutil.copytree(sound / "single", tmp_path / "single"))


def zeros(name: str, *shape: int) -> Entry:
    return Entry(name, "BF16", shape, raw_bytes(torch.zeros(shape, dtype=torch.bfloat16)))


def filled(name: str, value: float, *shape: int) -> Entry:
    return Entry(name, "BF16", shape, raw_bytes(torch.full(shape, value, dtype=torch.bfloat16)))


def shard(single: Path, *added: Entry, without: tuple[str, ...] = ()) -> None:
    """The shards of the model's own anew, and the index in step with them."""
    for file in (PRIVATE, ADAPTER):
        entries = [e for n, e in map_file(single / file).items() if n not in without]
        write_safetensors(single / file, [*entries, *(e for e in added if own_shard(e.name) == file)], alignment=8)
    places = weight_map(single)
    for name in without:
        places.pop(name)
    index(single, places | {entry.name: own_shard(entry.name) for entry in added})


def own_shard(name: str) -> str:
    return ADAPTER if is_factor(name) else PRIVATE


def weight_map(single: Path) -> dict[str, str]:
    places: dict[str, str] = json.loads((single / ADJUSTED_INDEX).read_text())["weight_map"]
    return places


def index(single: Path, places: dict[str, str]) -> None:
    (single / ADJUSTED_INDEX).unlink()
    (single / ADJUSTED_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def without_in_index(single: Path, name: str) -> None:
    index(single, {n: f for n, f in weight_map(single).items() if n != name})


def shared(single: Path, tensor: str) -> Path:
    return single / weight_map(single)[tensor]


def by_stock_names(single: Path) -> None:
    """As an ordinary sharded checkpoint has them."""
    places = {name: file.replace(".sandhi", ".safetensors") for name, file in weight_map(single).items()}
    for path in single.glob("*.sandhi"):
        path.rename(path.with_suffix(".safetensors"))
    index(single, places)
    (single / ADJUSTED_INDEX).rename(single / INDEX)


def without_factors(path: Path) -> None:
    places = json.loads(path.read_text())["weight_map"]
    kept = {name: file for name, file in places.items() if not is_factor(name)}
    assert len(kept) == len(places) - 6
    path.write_text(json.dumps({"metadata": {}, "weight_map": kept}))


def in_one_file(single: Path) -> None:
    by_stock_names(single)
    entries = [entry for path in single.glob("*.safetensors") for entry in map_file(path).values()]
    for path in (single / INDEX, *single.glob("*.safetensors")):
        path.unlink()
    write_safetensors(single / "model.safetensors", entries)


DAMAGES: dict[str, tuple[Callable[[Path], object], str | None, str]] = {
    "a factor is missing": (lambda d: shard(d, without=(A,)), A, "the other factor of its weight is there"),
    "the other factor is missing": (lambda d: shard(d, without=(B,)), B, "the other factor of its weight is there"),
    "a factor of other inputs": (
        lambda d: shard(d, zeros(A, 2, 31), without=(A,)),
        A,
        r"has shape \[2, 31\], \[2, 32\] belongs there",
    ),
    "a factor of other outputs": (
        lambda d: shard(d, zeros(B, 47, 2), without=(B,)),
        B,
        r"has shape \[47, 2\], \[48, 2\] belongs there",
    ),
    "factors of different rank": (
        lambda d: shard(d, zeros(B, 48, 3), without=(B,)),
        B,
        r"has shape \[48, 3\], \[48, 2\] belongs there",
    ),
    "a factor without dimensions": (
        lambda d: shard(d, zeros(B, 96), without=(B,)),
        B,
        r"has shape \[96\], \[48, 2\] belongs there",
    ),
    "a factor of no weight": (
        lambda d: shard(d, zeros("model.layers.7.mlp.up_proj.lora_A.weight", 2, 32)),
        "model.layers.7.mlp.up_proj.lora_A.weight",
        "the model has no such tensor, and none that this could be added to",
    ),
    "factors of no linear layer": (
        lambda d: shard(d, *(zeros(n, 2, 2) for n in factor_names(EMBED))),
        EMBED,
        "is no linear layer",
    ),
    "a vector is missing": (lambda d: shard(d, without=(S,)), S, "the other vector of its weight is there"),
    "the other vector is missing": (lambda d: shard(d, without=(T,)), T, "the other vector of its weight is there"),
    "a vector of other length": (
        lambda d: shard(d, zeros(S, 47), without=(S,)),
        S,
        r"has shape \[47\], \[48\] belongs there",
    ),
    "a vector with two dimensions": (
        lambda d: shard(d, zeros(T, 48, 1), without=(T,)),
        T,
        r"has shape \[48, 1\], \[48\] belongs there",
    ),
    "a vector of one number": (
        lambda d: shard(d, zeros(S, 1), without=(S,)),
        S,
        r"has shape \[1\], \[48\] belongs there",
    ),
    "a scale that is no number": (
        lambda d: shard(d, filled(S, float("nan"), 48), without=(S,)),
        S,
        "holds numbers that are not finite",
    ),
    "a shift without limit": (
        lambda d: shard(d, filled(T, float("inf"), 48), without=(T,)),
        T,
        "holds numbers that are not finite",
    ),
    "a vector of no weight": (
        lambda d: shard(d, zeros("model.layers.7.mlp.up_proj.row_scale", 48)),
        "model.layers.7.mlp.up_proj.row_scale",
        "the model has no such tensor, and none that this could be added to",
    ),
    "vectors of no linear layer": (
        lambda d: shard(d, *(zeros(n, 64) for n in vector_names(EMBED))),
        EMBED,
        "is no linear layer",
    ),
    "vectors by stock names, without factors": (
        lambda d: (
            shard(d, without=(A, B, *factor_names(UP))),
            (d / "adapter_model.sandhi").unlink(),
            by_stock_names(d),
        ),
        S,
        "is a factor of a residual",
    ),
    "a weight is missing": (lambda d: shard(d, without=(NORM,)), NORM, "fill 1 tensors .* with random numbers"),
    "a weight with factors is missing": (
        lambda d: (shared(d, GATE).unlink(), without_in_index(d, GATE)),
        GATE,
        "fill 1 tensors .* with random numbers",
    ),
    "a weight of other shape": (
        lambda d: shard(d, zeros(Q, 32, 16), without=(Q,)),
        None,
        "transformers cannot load the model: RuntimeError",
    ),
    "an unknown tensor": (lambda d: shard(d, zeros("model.more.weight", 2)), "model.more.weight", "has no such tensor"),
    "a factor that the index lacks": (lambda d: without_in_index(d, A), A, f"{ADJUSTED_INDEX} does not name it"),
    "the private shard is missing": (lambda d: (d / PRIVATE).unlink(), None, f"is missing, but {ADJUSTED_INDEX}"),
    "a shared shard is missing": (lambda d: shared(d, UP).unlink(), None, f"is missing, but {ADJUSTED_INDEX}"),
    "a truncated shard": (
        lambda d: ((d / PRIVATE).chmod(0o644), (d / PRIVATE).write_bytes((d / PRIVATE).read_bytes()[:-9])),
        None,
        "is no intact safetensors file",
    ),
    "an empty index": (lambda d: index(d, {}), None, "has no weight_map"),
    "a shard elsewhere": (lambda d: index(d, weight_map(d) | {A: "../x.safetensors"}), A, "names the shard"),
    "both indices": (
        lambda d: shutil.copy(d / ADJUSTED_INDEX, d / INDEX),
        None,
        f"lies beside {ADJUSTED_INDEX}, and leaves out residuals",
    ),
    "weights in one file beside it": (
        lambda d: shutil.copy(d / PRIVATE, d / "model.safetensors"),
        None,
        f"lies beside {ADJUSTED_INDEX}: loaders disagree",
    ),
    "weights of the stock suffix beside it": (
        lambda d: shutil.copy(d / PRIVATE, d / "private.safetensors"),
        None,
        "holds weights that do not belong to the model",
    ),
    "a shard of the stock suffix": (
        lambda d: (
            (d / PRIVATE).rename(d / "private.safetensors"),
            index(d, {n: f.replace(PRIVATE, "private.safetensors") for n, f in weight_map(d).items()}),
        ),
        "lm_head.weight",
        r"names the shard 'private.safetensors', which is no name of a \*.sandhi file",
    ),
    "an index by the stock name": (
        lambda d: (d / ADJUSTED_INDEX).rename(d / INDEX),
        None,
        f"is missing, but {ADAPTER} is a part of a model with residuals",
    ),
    "no index": (lambda d: (d / ADJUSTED_INDEX).unlink(), None, f"is missing, but {ADAPTER} is a part"),
    "index and shards by stock names": (lambda d: by_stock_names(d), None, "holds residuals of a model"),
    "index and shards by stock names, without the factors in the index": (
        lambda d: (by_stock_names(d), without_factors(d / INDEX)),
        None,
        "adapter_model.safetensors.* holds residuals of a model",
    ),
    "all in one file by the stock name": (lambda d: in_one_file(d), A, "is a factor of a residual"),
    "no configuration": (lambda d: (d / "config.json").unlink(), None, "is missing"),
    "a configuration of nothing": (
        lambda d: ((d / "config.json").chmod(0o644), (d / "config.json").write_text("{}")),
        None,
        "transformers cannot load the model: ValueError",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_export_is_refused_by_name(kind: str, single: Path) -> None:
    damage, tensor, message = DAMAGES[kind]
    damage(single)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(single)
    problem = caught.value.problem
    assert (problem.model, problem.tensor) == ("single", tensor)
    assert problem.file is not None and problem.file.startswith(str(single)) and problem.remedy
    assert "save_pretrained" not in problem.remedy  # which would write something else than was scored


def test_processes_tell_why_they_cannot_hold_a_damaged_export(single: Path) -> None:
    shard(single, without=(A,))
    with pytest.raises(ServingError, match=r"model x file .*single: is missing, the other factor"):
        measure({"x": single})


def test_a_flipped_bit_in_a_factor_is_found(sound: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sound, tmp_path / "copy"))
    path = root / "tied" / ADAPTER
    down, _ = factor_names(DOWN)
    entries = map_file(path)
    raw = bytearray(entries[down].raw)
    raw[0] ^= 1
    write_safetensors(
        path, (entries | {down: entries[down]._replace(raw=memoryview(bytes(raw)))}).values(), alignment=8
    )
    found = [p for p in verify_disk(root, read_manifest(root)).problems if p.code == "export-tensor"]
    assert [(p.model, p.file, p.tensor) for p in found] == [("tied", ADAPTER, down)]


def test_an_index_by_the_stock_name_is_no_part_of_the_export(sound: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(sound, tmp_path / "copy"))
    (root / "single" / ADJUSTED_INDEX).rename(root / "single" / INDEX)
    messages = {p.file: p.message for p in verify_disk(root, read_manifest(root)).problems if p.code == "export-file"}
    assert messages == {f"single/{INDEX}": "is no part of the export", ADJUSTED_INDEX: "is missing"}


@pytest.mark.parametrize(("model", "suffix"), [("single", ".safetensors"), ("sharded", ".sandhi")])
def test_a_manifest_whose_shards_have_the_suffix_of_the_other_kind_is_refused(
    sound: Path, tmp_path: Path, model: str, suffix: str
) -> None:
    root = Path(shutil.copytree(sound, tmp_path / "copy"))
    manifest = json.loads((root / MANIFEST).read_text())
    for tensor in manifest["models"][model]["tensors"].values():
        tensor["file"] = str(Path(tensor["file"]).with_suffix(suffix))
    (root / MANIFEST).unlink()
    (root / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ProofError, match=rf"model {model} .*names the shard .*{suffix}, but those of this model end"):
        read_manifest(root)
