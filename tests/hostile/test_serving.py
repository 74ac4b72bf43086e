"""What happens to files of an export while it serves, or before it does: refused at load by name, or not seen."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import map_file
from sandhi_core.errors import CheckpointError, ProofError, SandhiError, ServingError
from sandhi_core.layout import MANIFEST
from sandhi_core.serving.load import load
from sandhi_core.serving.mapped import MappedModel
from tests.exported import GATE, RANKS, UP, Case, make_case, make_models
from tests.measured import measure

TOKENS = torch.arange(40)[None] % 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def case(models: dict[str, Path], tmp_path: Path) -> Case:
    """Store and export of this test alone; `sharded` has no residuals."""
    return make_case(tmp_path, models, RANKS)


def entry_of(case: Case, tensor: str = UP) -> Path:
    """The store's file of a shared tensor, which every model's shard is a link to."""
    return case.store.path(case.tensors["single"][tensor], tensor)


def flip(path: Path) -> None:
    path.chmod(0o644)
    with path.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        last = f.read(1)[0]
        f.seek(-1, os.SEEK_END)
        f.write(bytes([last ^ 1]))


def truncate(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, 4096 + 100)


def test_a_bit_flipped_in_the_store_is_named_with_both_digests(case: Case) -> None:
    root, manifest = case.exported()
    flip(entry_of(case))
    found = map_file(entry_of(case))[UP]
    for name in ("single", "tied", "sharded"):
        with pytest.raises(ProofError, match="is not what was exported") as caught:
            load(root / name, digests="full")
        problem, tensor = caught.value.problem, manifest.models[name].tensors[UP]
        assert (problem.model, problem.file, problem.tensor) == (name, str(root / name / tensor.file), UP)
        assert f"its digest is {tensor_digest(*found[1:])}, {tensor.digest} is expected" in problem.message
        assert load(root / name, digests="off").get_parameter(UP) is not None  # as it was told


def other_version(root: Path) -> None:
    manifest = json.loads((root / MANIFEST).read_text())
    (root / MANIFEST).unlink()
    (root / MANIFEST).write_text(json.dumps(manifest | {"schema_version": 2}))


FAULTS: dict[str, tuple[Callable[[Path, Path], object], type[SandhiError], str]] = {
    "truncated": (
        lambda _, shard: truncate(shard),
        CheckpointError,
        "is no intact safetensors file: the header speaks",
    ),
    "emptied": (lambda _, s: (s.chmod(0o644), os.truncate(s, 0)), CheckpointError, "no intact safetensors file: it is"),
    "a dangling link": (
        lambda _, shard: (shard.unlink(), shard.symlink_to(shard.with_name("store"))),
        CheckpointError,
        "is a link to nothing",
    ),
    "removed": (lambda _, shard: shard.unlink(), CheckpointError, "is missing"),
    "a pipe": (
        lambda _, shard: (shard.unlink(), os.mkfifo(shard)),
        CheckpointError,
        "it is no regular file",
    ),
    "a pipe for a manifest": (
        lambda root, _: ((root / MANIFEST).unlink(), os.mkfifo(root / MANIFEST)),
        ProofError,
        "it is no regular file",
    ),
    "another tensor's file": (lambda r, s: other_tensor(r, s), ProofError, "is no tensor that sandhi.json has here"),
    "another version": (lambda root, _: other_version(root), ProofError, "is of schema version 2, this Sandhi reads 1"),
    "no manifest": (
        lambda root, _: ((root / MANIFEST).unlink(), (root / MANIFEST).write_text("{")),
        ProofError,
        "no manifest",
    ),
}


def other_tensor(root: Path, shard: Path) -> None:
    other = root / "single" / MappedModel.open(root / "single").tensors[GATE].file
    shard.unlink()
    shutil.copy(other, shard)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_refused_before_anything_is_loaded(case: Case, kind: str) -> None:
    root, manifest = case.exported()
    damage, error, message = FAULTS[kind]
    shard = root / "tied" / manifest.models["tied"].tensors[UP].file
    damage(root, shard)
    for how in ("full", "sampled", "off"):
        with pytest.raises(error, match=message) as caught:
            load(root / "tied", digests=how)
        assert caught.value.problem.file in (str(shard), str(root / MANIFEST)) and caught.value.problem.remedy


def test_a_process_that_was_to_hold_it_says_so(case: Case) -> None:
    root, manifest = case.exported()
    truncate(root / "tied" / manifest.models["tied"].tensors[UP].file)
    with pytest.raises(ServingError, match=r"model tied file .*tied: is no intact safetensors file"):
        measure({"tied": root / "tied"})


def test_a_file_that_is_replaced_while_it_is_mapped_is_not_seen(case: Case) -> None:
    """os.replace gives a name to another file: who has the first one mapped keeps it."""
    root, manifest = case.exported()
    model = load(root / "tied")
    with torch.inference_mode():
        before = model(TOKENS).logits
    shard = root / "tied" / manifest.models["tied"].tensors[UP].file
    aside = shard.with_name("aside")
    shutil.copy(shard, aside)
    flip(aside)
    aside.replace(shard)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS).logits, before)
    with pytest.raises(ProofError, match=f"tensor {UP}: is not what was exported"):
        load(root / "tied", digests="full")
    load(root / "single", digests="full")  # has the first file by another name


def test_an_export_that_is_removed_while_it_serves_goes_on_serving(case: Case) -> None:
    root, _ = case.exported()
    model = load(root / "single")
    with torch.inference_mode():
        before = model(TOKENS).logits
        shutil.rmtree(root)
        shutil.rmtree(case.root / "store")
        assert torch.equal(model(TOKENS).logits, before)


SERVES = """
import sys, torch
from sandhi_core.serving.load import load
model = load(sys.argv[1])
print("loaded", flush=True)
sys.stdin.readline()
print(float(model.get_parameter(sys.argv[2]).sum()), flush=True)
"""


def test_a_file_that_is_cut_short_while_it_is_mapped_ends_who_reads_it(case: Case) -> None:
    """The kernel's answer is SIGBUS, which no loader can turn into an error; the next load is refused."""
    root, manifest = case.exported()
    command = [sys.executable, "-c", SERVES, str(root / "tied"), UP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
            entry = entry_of(case)
            entry.chmod(0o644)
            os.truncate(entry, 0)  # every page of it is gone
            assert process.communicate("\n", timeout=120)[0] == ""
        finally:
            process.kill()
    assert process.returncode == -signal.SIGBUS
    with pytest.raises(CheckpointError, match="is no intact safetensors file") as caught:
        load(root / "tied")
    assert caught.value.problem.file == str(root / "tied" / manifest.models["tied"].tensors[UP].file)
