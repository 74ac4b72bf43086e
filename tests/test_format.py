"""docs/format.md against the code, to the byte. Expected bytes are spelled out, not computed by the code."""

import hashlib
import json
import re
import struct
from pathlib import Path

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import DTYPES, Entry, raw_bytes, write_safetensors
from sandhi_core.savings import MIN_SHARED_BYTES
from sandhi_core.store import ALIGNMENT, Store
from tests.exported import EMBED, GATE, MODELS, UP, Case, make_case, make_models

DOCUMENT = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
PAIR = torch.tensor([[1.0], [2.0]])
PAIR_DIGEST = "e4a43113bc6864b8b368bda7be030111dc85cece3e25073a55343b8acc9d511f"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("root"), make_models(tmp_path_factory.mktemp("models")))


def test_the_digest_is_the_documented_one() -> None:
    hashed = bytes.fromhex("46 33 32 3a 32 2c 31 0a  00 00 80 3f 00 00 00 40")
    assert hashlib.sha256(hashed).hexdigest() == PAIR_DIGEST == tensor_digest("F32", (2, 1), raw_bytes(PAIR))
    assert "46 33 32 3a 32 2c 31 0a  00 00 80 3f 00 00 00 40" in DOCUMENT
    assert PAIR_DIGEST in DOCUMENT


def test_a_tensor_without_dimensions_has_no_sizes() -> None:
    scalar = torch.tensor(1.0, dtype=torch.bfloat16)
    hashed = b"BF16:\n\x80\x3f"
    assert tensor_digest("BF16", (), raw_bytes(scalar)) == hashlib.sha256(hashed).hexdigest()


def test_dtype_and_shape_are_part_of_the_digest_and_the_name_is_not() -> None:
    raw = raw_bytes(PAIR)
    digests = {tensor_digest(d, s, raw) for d, s in [("F32", (2, 1)), ("F32", (1, 2)), ("F32", (2,)), ("I32", (2, 1))]}
    assert len(digests) == 4


def test_a_weight_file_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    half = torch.tensor([1.0], dtype=torch.bfloat16)
    entries = [Entry("b", "BF16", (1,), raw_bytes(half)), Entry("a", "F32", (2, 1), raw_bytes(PAIR))]
    write_safetensors(path, entries)
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},'
        b'"b":{"dtype":"BF16","shape":[1],"data_offsets":[8,10]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    data = bytes.fromhex("0000803f 00000040 803f")
    assert path.read_bytes() == struct.pack("<Q", len(padded)) + padded + data


def test_the_documented_order_of_dtypes_is_the_written_one() -> None:
    listed = re.search(r"widest dtype first \(([^)]*)\)", DOCUMENT)
    assert listed and listed[1].split() == list(DTYPES)
    widths = [d.itemsize for d in DTYPES.values()]
    assert widths == sorted(widths, reverse=True)


def test_a_store_entry_to_the_byte(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.put("w.weight", PAIR) == PAIR_DIGEST
    header = b'{"__metadata__":{"format":"pt"},"w.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}'
    expected = struct.pack("<Q", 4088) + header.ljust(4088) + bytes.fromhex("0000803f 00000040")
    path = tmp_path / PAIR_DIGEST / "w.weight.safetensors"
    assert path.read_bytes() == expected
    assert ALIGNMENT == 4096 and "4096 in store entries" in " ".join(DOCUMENT.split())


def test_a_recipes_note_to_the_byte(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.remember_recipe("r" * 64, store.put("w", PAIR))
    note = (tmp_path / "recipes" / f"{'r' * 64}.json").read_bytes()
    assert note == f'{{"recipe":"{"r" * 64}","tensor":"{PAIR_DIGEST}"}}'.encode()


def test_the_manifest_is_canonical_and_names_its_directory(case: Case) -> None:
    root, _ = case.exported()
    data = (root / "sandhi.json").read_bytes()
    value = json.loads(data)
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert root.name == hashlib.sha256(data).hexdigest()[:16]
    assert root.parts[-3:-1] == ("exports", "small")
    assert value.keys() == {"schema_version", "pool", "point", "models"}
    assert value["models"].keys() == set(MODELS)
    for model in value["models"].values():
        assert model.keys() == {"directory", "weights", "files", "linked", "tensors"}
        for tensor in model["tensors"].values():
            assert tensor.keys() == {"digest", "dtype", "shape", "nbytes", "file", "sharing"}
    for field in ("schema_version", "directory", "weights", "files", "linked", "digest", "nbytes", "sharing"):
        assert f"{field}`" in DOCUMENT


def test_the_index_to_the_byte(case: Case) -> None:
    root, manifest = case.exported()
    tensors = manifest.models["tied"].tensors
    lines = ",\n".join(f'    "{name}": "{tensors[name].file}"' for name in sorted(tensors))
    total = sum(t.nbytes for t in case.fingerprints["tied"].tensors)
    expected = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'
    assert (root / "tied" / "model.safetensors.index.json").read_bytes() == expected.encode()


def test_the_index_of_a_model_with_residuals_to_the_byte(tmp_path: Path, case: Case) -> None:
    directories = {name: checkpoint.directory for name, checkpoint in case.checkpoints.items()}
    adjusted = make_case(tmp_path, directories, {("tied", UP): 2})
    root, manifest = adjusted.exported()
    tensors = manifest.models["tied"].tensors
    layer = "base_model.model." + UP.removesuffix("weight")
    factors = {f"{layer}lora_A.weight": [2, 32], f"{layer}lora_B.weight": [48, 2]}
    assert tensors.keys() - case.exported()[1].models["tied"].tensors.keys() == factors.keys()
    value = json.loads((root / "sandhi.json").read_bytes())["models"]["tied"]["tensors"]
    for name, shape in factors.items():
        assert value[name] == {
            "digest": tensors[name].digest,
            "dtype": "BF16",
            "shape": shape,
            "nbytes": 2 * shape[0] * shape[1],
            "file": "adapter_model.sandhi",
            "sharing": "private",
        }
    lines = ",\n".join(f'    "{name}": "{tensors[name].file}"' for name in sorted(tensors))
    total = sum(t.nbytes for t in case.fingerprints["tied"].tensors) + 2 * 2 * (32 + 48)
    expected = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'
    assert (root / "tied" / "sandhi.index.json").read_bytes() == expected.encode()
    digest = adjusted.tensors["tied"][UP]
    shared = f"shared-{digest[:16]}-0.sandhi"
    files = {"private.sandhi", "adapter_model.sandhi", shared}
    assert {tensor.file for tensor in tensors.values()} == files
    assert (root / "tied" / shared).samefile(tmp_path / "store" / digest / f"{UP}.safetensors")
    beside = set(adjusted.checkpoints["tied"].beside())
    assert {p.name for p in (root / "tied").iterdir()} == {"sandhi.index.json"} | files | beside
    for name in ("sandhi.index.json", "private.sandhi", "adapter_model.sandhi", "base_model.model.X.lora_A.weight"):
        assert f"`{name}`" in DOCUMENT


def test_an_export_holds_the_documented_files_and_no_others(case: Case) -> None:
    root, _ = case.exported()
    expected = {"sandhi.json"}
    for name, checkpoint in case.checkpoints.items():
        shared = {"sharded": (GATE, UP, EMBED), "single": (GATE, UP, EMBED), "tied": (UP,)}[name]
        own = {t.name: t.digest for t in case.fingerprints[name].tensors} | case.tensors[name]
        files = {"model.safetensors.index.json", "private.safetensors", *checkpoint.beside()}
        files |= {f"shared-{own[tensor][:16]}-0.safetensors" for tensor in shared}
        expected |= {f"{name}/{file}" for file in files}
    assert {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()} == expected


def test_a_shared_shard_is_its_store_entry_and_a_private_one_is_aligned_to_8(case: Case) -> None:
    root, _ = case.exported()
    digest = case.tensors["tied"][UP]
    shard = root / "tied" / f"shared-{digest[:16]}-0.safetensors"
    assert shard.samefile(case.root / "store" / digest / f"{UP}.safetensors")
    (length,) = struct.unpack("<Q", (root / "tied" / "private.safetensors").read_bytes()[:8])
    assert length % 8 == 0 and (8 + length) % 4096


def test_equal_digests_of_one_model_are_numbered_by_name(tmp_path: Path, case: Case) -> None:
    value = torch.full((48, 32), 0.5)
    digest = Store(tmp_path / "store").put(UP, value)
    twins = sorted([GATE, UP])
    assignments = {name: dict.fromkeys(twins, digest) for name in MODELS}
    twin = Case(tmp_path, case.pool, case.checkpoints, case.fingerprints, assignments, {digest: value})
    root, manifest = twin.exported()
    for name in MODELS:
        tensors = manifest.models[name].tensors
        assert [tensors[t].file for t in twins] == [f"shared-{digest[:16]}-{n}.safetensors" for n in (0, 1)]
        assert all(tensors[t].sharing == "merged" for t in twins)
    # two names, two files, each shared by all three models
    assert (
        len({(root / n / f"shared-{digest[:16]}-{i}.safetensors").stat().st_ino for n in MODELS for i in (0, 1)}) == 2
    )


def test_the_smallest_shared_duplicate_is_the_documented_one() -> None:
    assert f"at least {MIN_SHARED_BYTES} bytes" in " ".join(DOCUMENT.split())
