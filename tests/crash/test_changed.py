"""A checkpoint that changes between the stage that fingerprinted it and one that reads it: an error, never a mix."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assets.stage import Job
from assets.stages import STAGE_ASSETS
from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import load_catalogue
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.errors import CheckpointError, SandhiError
from sandhi_core.evaluation.evaluator import Weights
from sandhi_core.graph import Node
from tests.conftest import CHECKOUT
from tests.crash import line
from tests.models import WEIGHTS

pytestmark = pytest.mark.slow

GATE = "model.layers.1.mlp.gate_proj.weight"
READ = ("profile", "groups", "trajectory", "holdout", "merged_weights")
"""Stages that read weights once they are fingerprinted, where nothing that they need is kept already."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with all its stages run but the SLOW ones."""
    folder = tmp_path_factory.mktemp("made")
    pool = line.make_pool(folder)
    for node in line.nodes(pool):
        line.run(pool, folder / "root", node, lambda model, seconds: None)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, in which nothing that is computed from weights is kept beside records and the store's tensors. Times of
    files stay: a checkpoint is known by them."""
    subprocess.run(["cp", "-a", f"{made}/.", str(tmp_path)], check=True)
    for kept in ("scores", "inputs", "spectra", "exports", "store"):
        shutil.rmtree(tmp_path / "root" / kept)
    return tmp_path


def bench(folder: Path) -> Bench:
    catalogue, root = load_catalogue([folder / "tiny.yaml"]), Artifacts(folder / "root")
    for name in line.MODELS:  # the copy's files have inodes of their own
        envelope = root.required(("checkpoint", name))
        own = envelope.own | {"files": Checkpoint.open(folder / name, name).identity()}
        root.save(("checkpoint", name), envelope.fingerprint, own, root.load(type_of("checkpoint"), "checkpoint", name))
    return Bench(catalogue, root, lambda model, seconds: None)


def type_of(stage: str) -> type:
    from sandhi_core.artifacts import RECORDS

    return RECORDS[stage]


def overwritten(path: Path) -> None:
    """Other bytes in the same file, as a copy onto it leaves them."""
    with path.open("r+b") as f:
        f.seek(-64, os.SEEK_END)
        f.write(bytes(range(64)))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def run(given: Bench, node: Node) -> None:
    stage = STAGE_ASSETS[node[0]]
    stage.run(Job(given, node[1], False, lambda told: None))


def refused_by_name(error: SandhiError, folder: Path) -> None:
    assert error.problem.model == "a"
    assert error.problem.file is not None and str(folder / "a").startswith(error.problem.file[: len(str(folder / "a"))])
    assert "build again" in error.problem.remedy or "run again" in error.problem.remedy


@pytest.mark.parametrize("stage", READ)
def test_a_stage_that_reads_weights_refuses_others(folder: Path, stage: str) -> None:
    given = bench(folder)
    node = next(node for node in line.nodes(folder / "tiny.yaml") if node[0] == stage)
    before = line.tree(folder / "root" / "records")
    overwritten(folder / "a" / WEIGHTS)
    with pytest.raises(CheckpointError) as refused:
        run(given, node)
    refused_by_name(refused.value, folder)
    assert line.tree(folder / "root" / "records") == before
    assert line.lines(folder / "root") == 0


def test_weights_that_change_before_the_model_is_loaded(folder: Path) -> None:
    given = bench(folder)
    evaluator = given.evaluator(*given.catalogue.entry("a"))
    overwritten(folder / "a" / WEIGHTS)
    with pytest.raises(CheckpointError) as refused:
        evaluator.evaluate("profile", evaluator.original)
    refused_by_name(refused.value, folder)
    assert line.lines(folder / "root") == 0


def test_a_tokenizer_that_changes_before_the_model_is_loaded(folder: Path) -> None:
    given = bench(folder)
    evaluator = given.evaluator(*given.catalogue.entry("a"))
    (folder / "a" / "tokenizer_config.json").write_text((folder / "b" / "tokenizer_config.json").read_text() + "\n")
    with pytest.raises(CheckpointError, match="the files are not those that were fingerprinted"):
        evaluator.evaluate("profile", evaluator.original)


def test_weights_that_change_while_the_model_is_in_memory(folder: Path) -> None:
    """What was replaced must come back from the file: of other bytes nothing comes back."""
    given = bench(folder)
    evaluator = given.evaluator(*given.catalogue.entry("a"))
    own = Checkpoint.open(folder / "a", "a").tensor(GATE)
    evaluator.evaluate("profile", Weights("other", {GATE: "other"}, lambda name: torch.zeros_like(own)))
    scored = line.lines(folder / "root")
    overwritten(folder / "a" / WEIGHTS)
    with pytest.raises(CheckpointError, match="changed while it was in use") as refused:
        evaluator.evaluate("profile", evaluator.original)
    refused_by_name(refused.value, folder)
    assert line.lines(folder / "root") == scored


CUT = """
import importlib, os, sys
from sandhi_core.__main__ import main

module, _, name = sys.argv[1].rpartition(".")
file, sys.argv = sys.argv[2], sys.argv[2:]
module = importlib.import_module(module)
plain = getattr(module, name)

def cut(*given):
    os.truncate(file, 4096)
    return plain(*given)

setattr(module, name, cut)
sys.exit(main())
"""


def cut_within(call: str, folder: Path, root: Path, command: str) -> subprocess.CompletedProcess[str]:
    """What a command comes to that finds a file cut short when it is about to make a call."""
    given = [call, str(folder / "a" / WEIGHTS), command, str(folder / "tiny.yaml"), "--root", str(root)]
    return subprocess.run(
        [sys.executable, "-c", CUT, *given], cwd=CHECKOUT, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_file_that_is_cut_short_between_two_reads_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder / "a", "a")
    checkpoint.raw(GATE)
    os.truncate(folder / "a" / WEIGHTS, 4096)
    with pytest.raises(CheckpointError, match="changed while it was in use") as refused:
        checkpoint.raw(GATE)
    refused_by_name(refused.value, folder)


def test_a_file_that_is_cut_short_while_it_is_scanned_is_named(folder: Path) -> None:
    """Scanning reads, and maps nothing: in a file that somebody writes just then nothing can end the process."""
    root = folder / "other"
    done = cut_within("sandhi_core.checkpoints.scan.row_moments", folder, root, "check")
    assert done.returncode == 1, done.stderr
    assert "error: file-changed: model a" in done.stderr and WEIGHTS in done.stderr and "tensor " in done.stderr
    assert "Bus error" not in done.stderr and "Traceback" not in done.stderr
    assert [path for path in line.tree(root) if not path.startswith("scans/")] == []


def test_a_file_that_is_cut_short_while_it_is_merged_ends_the_process_and_says_where(folder: Path) -> None:
    """Tensors that are merged are mapped, looked at just before: in between no call is left that could fail, and the
    kernel ends the process. It is as if it had been killed: whatever it wrote is whole, and the next build names the
    file."""
    done = cut_within("sandhi_core.recipes.merge", folder, folder / "other", "build")
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert "Bus error" in done.stderr and "merging.py" in done.stderr
    assert line.exports_problems(folder / "other") == []
    with pytest.raises(CheckpointError, match="bytes") as refused:
        Checkpoint.open(folder / "a", "a")
    assert refused.value.problem.model == "a" and WEIGHTS in str(refused.value.problem.file)
