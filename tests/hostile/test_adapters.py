"""Bases and adapters that somebody or something touched: found, whatever it is, and told apart from copied links."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sandhi_core.adapters import all_there
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError, Problem
from sandhi_core.layout import MANIFEST, read_manifest
from sandhi_core.records import Manifest
from sandhi_core.serving.load import load
from tests.adapted import adapted_case

ADAPTER = "ann.adapter/adapter_model.safetensors"
CONFIG = "ann.adapter/adapter_config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapted_case(tmp_path_factory.mktemp("adapted")).exported()[0]


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    """A copy that keeps hard links, as `cp -a` makes one, free to be damaged."""
    copy, first = tmp_path / "copy", dict[int, Path]()
    for path in sorted(p for p in sound.rglob("*") if p.is_file()):
        target = copy / path.relative_to(sound)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_ino in first:
            target.hardlink_to(first[path.stat().st_ino])
        else:
            shutil.copy2(path, target)
            first[path.stat().st_ino] = target
    assert verify_disk(copy, read_manifest(copy)).problems == ()
    return copy


def found(root: Path) -> list[Problem]:
    return list(verify_disk(root, read_manifest(root)).problems)


def own(path: Path) -> bytes:
    """Makes a file one of its own, with the same bytes."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    return data


def flipped(path: Path, at: int) -> None:
    data = bytearray(own(path))
    data[at] ^= 1
    path.write_bytes(data)


def base(root: Path) -> str:
    (directory,) = root.glob("base.*")
    return directory.name


def edited(path: Path, **changes: object) -> None:
    config = json.loads(own(path))
    path.write_text(json.dumps(config | changes, indent=2, sort_keys=True) + "\n")


def of_other(root: Path) -> None:
    """One model's adapter in place of another's."""
    (root / ADAPTER).unlink()
    (root / ADAPTER).hardlink_to(root / "ben.adapter" / "adapter_model.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "adapter missing": (lambda r: (r / ADAPTER).unlink(), ADAPTER, "is missing"),
    "adapter's configuration missing": (lambda r: (r / CONFIG).unlink(), CONFIG, "is missing"),
    "bit flipped in a copy": (lambda r: flipped(r / ADAPTER, -1), ADAPTER, "is not ann/adapter_model.sandhi, whose"),
    "another model's adapter": (of_other, ADAPTER, "is not ann/adapter_model.sandhi, whose bytes it must have"),
    "other rank": (lambda r: edited(r / CONFIG, r=4), CONFIG, "differs from what was exported"),
    "other scale": (lambda r: edited(r / CONFIG, lora_alpha=16), CONFIG, "differs from what was exported"),
    "link": (
        lambda r: ((r / ADAPTER).unlink(), (r / ADAPTER).symlink_to(r / "ann" / "adapter_model.sandhi")),
        ADAPTER,
        "is a symbolic link",
    ),
    "extra file": (
        lambda r: (r / "ann.adapter" / "adapter_model.bin").write_bytes(b""),
        "ann.adapter/adapter_model.bin",
        "is no part of the export",
    ),
    "copied without links": (lambda r: own(r / ADAPTER), ADAPTER, "is a file of its own, not ann/adapter_model.sandhi"),
    "base's index": (
        lambda r: edited(r / base(r) / "model.safetensors.index.json", weight_map={}),
        "{base}/model.safetensors.index.json",
        "differs from what was exported",
    ),
    "base's shard missing": (
        lambda r: (r / base(r) / "private.safetensors").unlink(),
        "{base}/private.safetensors",
        "is missing",
    ),
    "base's shard flipped": (
        lambda r: flipped(r / base(r) / "private.safetensors", -1),
        "{base}/private.safetensors",
        "is not ann/private.sandhi, whose bytes it must have",
    ),
    "base's configuration": (
        lambda r: edited(r / base(r) / "config.json", rms_norm_eps=1.0),
        "{base}/config.json",
        "is not ann/config.json",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_difference_is_one_problem_with_its_file(root: Path, kind: str) -> None:
    damage, file, message = DAMAGES[kind]
    damage(root)
    (problem,) = found(root)
    assert problem.file == file.format(base=base(root)) and message in problem.message and problem.remedy
    assert problem.code == ("export-links" if kind == "copied without links" else "export-file")


@pytest.mark.parametrize("kind", ["bit flipped in a copy", "another model's adapter", "copied without links"])
def test_a_glance_finds_files_that_are_no_links(root: Path, kind: str) -> None:
    assert all_there(root, read_manifest(root))
    DAMAGES[kind][0](root)
    assert not all_there(root, read_manifest(root))


def test_a_bit_flipped_in_the_shared_file_is_found_in_the_model(root: Path) -> None:
    path = root / ADAPTER
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    (problem,) = found(root)
    assert (problem.code, problem.model, problem.file) == ("export-tensor", "ann", "adapter_model.sandhi")


def rewritten(root: Path, edit: Callable[[Manifest], Manifest]) -> None:
    manifest = edit(read_manifest(root))
    (root / MANIFEST).unlink()
    (root / MANIFEST).write_bytes(manifest.canonical())


def elsewhere(manifest: Manifest) -> Manifest:
    assert manifest.stock is not None
    (only,) = manifest.stock.bases
    plan = manifest.stock.model_copy(update={"bases": (only.model_copy(update={"directory": "../../elsewhere"}),)})
    return manifest.model_copy(update={"stock": plan})


def with_larger_ranks(manifest: Manifest) -> Manifest:
    assert manifest.stock is not None
    return manifest.model_copy(update={"stock": manifest.stock.model_copy(update={"max_rank": 64})})


@pytest.mark.parametrize("edit", [elsewhere, with_larger_ranks])
def test_a_plan_that_does_not_follow_from_the_models_is_no_plan(
    root: Path, edit: Callable[[Manifest], Manifest]
) -> None:
    rewritten(root, edit)
    assert [p.message for p in found(root)] == ["has a plan of bases and adapters that does not follow from its models"]


def test_an_adapter_is_no_model(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds residuals of a model, which is not this directory"):
        load(root / "ann.adapter")
