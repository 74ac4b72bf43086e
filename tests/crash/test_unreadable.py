"""Files that cannot be read: a disk fails, or a file is cut short while it is mapped. Every stage that reads weights
ends with one error that names them; nothing is half-made, and a rerun gives the bytes that it would have given."""

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandhi_core.checkpoints import checkpoint as checkpoints
from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.safetensors_file import UnreadError, present, read_header
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError
from sandhi_core.graph import Node
from sandhi_core.layout import read_manifest
from sandhi_core.serving.mapped import MappedModel
from tests.crash import line
from tests.crash.failing import Disk
from tests.crash.forked import Ended, forked
from tests.exported import copy_case, make_case, make_models
from tests.models import WEIGHTS, tiny_llama

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def opened(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(tiny_llama(tmp_path / "m"), "m")


def test_a_mapping_whose_file_was_cut_short_is_noticed_before_it_is_touched(opened: Checkpoint) -> None:
    raw = opened.raw(GATE)
    present(raw)
    os.truncate(opened.directory / WEIGHTS, 4096)
    with pytest.raises(UnreadError, match="cannot be read"):
        present(raw)
    with pytest.raises(UnreadError, match="cannot be read"):
        tensor_digest("BF16", opened.header(GATE).shape, raw)


def test_blocks_are_the_tensor_whatever_their_size(opened: Checkpoint) -> None:
    whole = bytes(opened.raw(GATE))
    for nbytes in (1, 1000, len(whole) - 1, len(whole), len(whole) + 1):
        assert b"".join(bytes(block) for block in opened.blocks(GATE, nbytes)) == whole


def test_a_file_that_is_cut_short_between_two_blocks_is_named(opened: Checkpoint) -> None:
    blocks = opened.blocks(GATE, 64)
    next(blocks)
    os.truncate(opened.directory / WEIGHTS, opened.header(GATE).start + 100)
    with pytest.raises(CheckpointError, match="changed while it was in use") as refused:
        list(blocks)
    assert refused.value.problem.tensor == GATE and WEIGHTS in str(refused.value.problem.file)


def test_a_read_that_fails_halfway_is_named_and_nothing_is_lost_of_short_ones(
    opened: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, plain, fails = bytes(opened.raw(GATE)), os.preadv, False

    def little(handle: int, buffers: list[memoryview], at: int) -> int:
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(handle, [buffers[0][:100]], at)

    monkeypatch.setattr(os, "preadv", little)
    assert b"".join(bytes(block) for block in opened.blocks(GATE, 1000)) == whole
    blocks = opened.blocks(GATE, 1000)
    next(blocks)
    fails = True
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as refused:
        next(blocks)
    problem = refused.value.problem
    assert (problem.code, problem.model, problem.tensor) == ("file-unreadable", "m", GATE)
    assert problem.file == str(opened.directory / WEIGHTS) and "its disk fails" in problem.remedy


def test_a_mapped_tensor_that_cannot_be_read_is_named(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(raw: memoryview) -> None:
        raise UnreadError

    monkeypatch.setattr(checkpoints, "present", unread)
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as refused:
        opened.tensor(GATE)
    problem = refused.value.problem
    assert (problem.code, problem.model, problem.tensor) == ("file-unreadable", "m", GATE)


# --- a real disk --------------------------------------------------------------------------------------------


def mounted(folder: Path) -> Disk:
    try:
        return Disk(folder / "image", folder / "disk")
    except OSError as error:
        pytest.skip(str(error))


class Line:
    """A pool of which model a has its weights on a disk of their own, and the root before each of its stages."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk, self.root = folder, disk, folder / "root"
        self.pool = line.make_pool(folder)
        self.weights = folder / "a" / WEIGHTS
        disk.takes(self.weights)
        self.root.mkdir()
        self.nodes = line.nodes(self.pool)
        for at, node in enumerate(self.nodes):
            line.copied(self.root, folder / f"before-{at}")
            ended = self.run(node)
            assert ended.sound, ended
        line.copied(self.root, folder / f"before-{len(self.nodes)}")

    def run(self, node: Node) -> Ended:
        return forked(self.folder, lambda tell: line.run(self.pool, self.root, node, lambda model, seconds: None))

    def before(self, at: int) -> Path:
        return self.folder / f"before-{at}"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    folder = tmp_path_factory.mktemp("failing")
    disk = mounted(folder)
    try:
        yield Line(folder, disk)
    finally:
        disk.close()


READ = ("checkpoint", "profile", "groups", "trajectory", "holdout")
"""Stages that read a model's own weights: of this pool's nothing is left that only the export would read."""


def told_as_it_is(ended: Ended, model: str, weights: Path) -> None:
    assert not ended.killed and ended.crash is None and not ended.left and ended.error is not None, ended
    assert (ended.error["code"], ended.error["model"]) == ("file-unreadable", model), ended.error
    assert ended.error["file"] == str(weights) and "its disk fails" in ended.error["remedy"]
    assert "cannot be read: Input/output error" in ended.error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", READ)
def test_a_stage_whose_disk_fails_says_so_and_is_made_again(failing: Line, stage: str) -> None:
    at = next(at for at, node in enumerate(failing.nodes) if node[0] == stage and "b" not in node[1].split("."))
    node = failing.nodes[at]
    line.copied(failing.before(at), failing.root)
    if stage in ("groups", "trajectory", "holdout"):  # what they would otherwise find there already
        for kept in ("scores", "inputs", "spectra", "store"):
            for path in sorted((failing.root / kept).rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
    before = line.tree(failing.root)
    places = read_header(failing.weights)
    first = min(place.start for place in places.values())
    lost = failing.disk.fail(failing.weights, first + 1)
    try:
        ended = failing.run(node)
        after = line.tree(failing.root)
    finally:
        failing.disk.heal()
    told_as_it_is(ended, "a", failing.weights)
    assert ended.error is not None and places[ended.error["tensor"]].end > lost
    assert before.items() <= after.items()
    assert not [path for path in after if "/." in path]
    assert line.exports_problems(failing.root) == []
    again = failing.run(node)
    assert again.sound, again
    wanted, found = line.tree(failing.before(at + 1)), line.tree(failing.root)
    parts = ("records/", "exports/")
    assert (
        line.differences(
            {path: kept for path, kept in wanted.items() if path.startswith(parts)},
            {path: kept for path, kept in found.items() if path.startswith(parts)},
        )
        == []
    )


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_an_export_of_weights_that_cannot_be_read_is_not_half_made(tmp_path: Path) -> None:
    disk = mounted(tmp_path)
    try:
        models = make_models(tmp_path / "models")
        weights = models["single"] / WEIGHTS
        disk.takes(weights)
        case = make_case(tmp_path / "case", models, {})
        wanted = contents(copy_case(case, tmp_path / "other").exported()[0])
        case.checkpoints = {name: Checkpoint.open(path, name) for name, path in models.items()}
        gc.collect()  # nobody maps the file any more
        places = read_header(weights)
        lost = disk.fail(weights, min(place.start for place in places.values()) + 1)
        ended = forked(tmp_path, lambda tell: case.export())
        told_as_it_is(ended, "single", weights)
        assert ended.error is not None and places[ended.error["tensor"]].end > lost
        assert [path for path in (case.exports / "small").rglob("*") if path.is_file()] == []
        disk.heal()
        assert contents(case.exported()[0]) == wanted
    finally:
        disk.close()


@pytest.mark.slow
def test_an_export_whose_disk_fails_is_told_and_not_loaded(tmp_path: Path) -> None:
    disk = mounted(tmp_path)
    try:
        root, manifest = make_case(tmp_path / "case", make_models(tmp_path / "models"), {}).exported()
        assert root.is_relative_to(tmp_path) and verify_disk(root, manifest).problems == ()
        private = root / "single" / "private.safetensors"
        disk.takes(private)
        disk.fail(private, min(place.start for place in read_header(private).values()) + 1)

        def work(tell: object) -> None:
            told = verify_disk(root, read_manifest(root)).problems
            assert [(p.model, p.file, p.message) for p in told] == [
                ("single", "private.safetensors", "cannot be read: Input/output error")
            ]
            with pytest.raises(CheckpointError, match="cannot be read: Input/output error") as refused:
                MappedModel.open(root / "single").check()
            assert refused.value.problem.tensor is not None
            assert refused.value.problem.file == str(private)

        ended = forked(tmp_path, work)
        assert ended.sound, ended
    finally:
        disk.close()
