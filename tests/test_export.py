import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from sandhi_core.assignment import factor_names, factors_among
from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.safetensors_file import dtype_name
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError, StoreError
from sandhi_core.layout import index_name, sizes_match
from sandhi_core.records import Manifest
from sandhi_core.rungs.residual import DTYPE
from sandhi_core.savings import savings
from tests.exported import DOWN, EMBED, GATE, MODELS, NORM, RANKS, UP, Case, copy_case, make_case, make_models, stock


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def case(directories: dict[str, Path], tmp_path: Path) -> Case:
    return make_case(tmp_path, directories)


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def shard(root: Path, manifest: Manifest, model: str, tensor: str) -> Path:
    return root / model / manifest.models[model].tensors[tensor].file


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_gives_the_swapped_models_logits(case: Case, name: str) -> None:
    root, _ = case.exported()
    tokens = torch.arange(40)[None] % 64
    with torch.no_grad():
        exported = stock(root / name)(tokens).logits
        assert torch.equal(exported, case.swapped(name)(tokens).logits)
        assert not torch.equal(exported, stock(case.checkpoints[name].directory)(tokens).logits)


def test_what_is_shared_is_one_file(case: Case) -> None:
    root, manifest = case.exported()

    def inodes(tensor: str, *models: str) -> int:
        return len({shard(root, manifest, m, tensor).stat().st_ino for m in models})

    assert inodes(GATE, "sharded", "single") == 1
    assert inodes(UP, *MODELS) == 1
    assert inodes(EMBED, "sharded", "single") == 1
    assert inodes(EMBED, *MODELS) == 2
    entry = case.store.path(case.tensors["tied"][UP], UP)
    assert entry.stat().st_ino == shard(root, manifest, "tied", UP).stat().st_ino
    assert {m.linked for m in manifest.models.values()} == {"hardlink"}


def test_every_tensor_has_its_place(case: Case) -> None:
    _, manifest = case.exported()
    kinds = {(m, t): e.sharing for m, model in manifest.models.items() for t, e in model.tensors.items()}
    shared = {key: kind for key, kind in kinds.items() if kind != "private"}
    assert shared == {
        ("sharded", GATE): "merged",
        ("single", GATE): "merged",
        ("sharded", UP): "merged",
        ("single", UP): "merged",
        ("tied", UP): "merged",
        ("sharded", EMBED): "duplicate",
        ("single", EMBED): "duplicate",
    }
    assert kinds["tied", DOWN] == "private"  # merged, but nobody else holds it here
    assert all(kinds[m, NORM] == "private" for m in MODELS)  # the same in all, but less than a page
    for name, model in manifest.models.items():
        own = {t.name: t.digest for t in case.fingerprints[name].tensors}
        assert {n: t.digest for n, t in model.tensors.items()} == own | case.tensors[name]


def test_the_files_save_what_is_claimed(case: Case) -> None:
    root, manifest = case.exported()
    check = verify_disk(root, manifest)
    claimed = savings(case.assignments, case.fingerprints)
    assert check.problems == ()
    assert check.tensors_checked == sum(len(f.tensors) for f in case.fingerprints.values())
    assert check.tensor_bytes == claimed.checkpoint_bytes
    assert check.shared_bytes == claimed.net == 48 * 32 * 4 + 2 * 48 * 32 * 4 + 64 * 32 * 4


def test_files_beside_the_weights_are_copied_byte_for_byte(case: Case) -> None:
    root, _ = case.exported()
    for name, checkpoint in case.checkpoints.items():
        assert "config.json" in checkpoint.beside()
        for file in checkpoint.beside():
            copy = root / name / file
            assert copy.read_bytes() == (checkpoint.directory / file).read_bytes()
            assert not copy.is_symlink()
    assert (root / "single/extra/linked.txt").read_bytes() == b"linked, as in the hub's cache"


def test_an_export_is_a_checkpoint_like_any_other(case: Case) -> None:
    root, manifest = case.exported()
    for name, model in manifest.models.items():
        again = Checkpoint.open(root / name, name)
        assert again.beside() == case.checkpoints[name].beside() == tuple(sorted(model.files))
        assert again.names == case.checkpoints[name].names
        for tensor, exported in model.tensors.items():
            header = again.header(tensor)
            assert (header.dtype, header.shape, header.file) == (
                exported.dtype,
                exported.shape,
                exported.file,
            )
            assert tensor_digest(header.dtype, header.shape, again.raw(tensor)) == exported.digest


def test_everything_is_read_only(case: Case) -> None:
    root, _ = case.exported()
    files = [p for p in root.rglob("*") if p.is_file()]
    assert files and all(p.stat().st_mode & 0o777 == 0o444 for p in files)


def test_the_same_inputs_give_the_same_bytes(case: Case, tmp_path: Path) -> None:
    first, _ = case.exported()
    other = copy_case(case, tmp_path / "other")
    second, _ = other.exported()
    assert first.name == second.name
    assert contents(first) == contents(second)


@pytest.mark.parametrize("threads", [1, 5])
def test_the_bytes_do_not_depend_on_the_number_of_threads(case: Case, tmp_path: Path, threads: int) -> None:
    first, before = contents(case.exported()[0]), torch.get_num_threads()
    other = copy_case(case, tmp_path / "other")
    try:
        torch.set_num_threads(threads)
        assert contents(other.exported()[0]) == first
    finally:
        torch.set_num_threads(before)
    assert contents(other.store.root) == contents(case.store.root)


def test_an_intact_export_is_kept(case: Case) -> None:
    root, _ = case.exported()
    before = {p: p.stat().st_ino for p in root.rglob("*")}
    assert case.exported()[0] == root
    assert {p: p.stat().st_ino for p in root.rglob("*")} == before
    assert [p.name for p in root.parent.iterdir()] == [root.name]


def test_a_damaged_export_is_made_again(case: Case) -> None:
    root, _ = case.exported()
    before = contents(root)
    (root / "single" / "config.json").unlink()
    (root / "tied" / "more").write_text("?")
    assert case.exported()[0] == root
    assert contents(root) == before
    assert [p.name for p in root.parent.iterdir()] == [root.name]


def test_a_model_that_joins_changes_no_other_files(case: Case, tmp_path: Path) -> None:
    joined, _ = case.exported()
    few = {n: v for n, v in case.tensors.items() if n != "tied"}
    earlier = Case(
        case.root,
        case.pool,
        {n: case.checkpoints[n] for n in few},
        {n: case.fingerprints[n] for n in few},
        few,
        case.merged,
    )
    before, manifest = earlier.exported()
    assert before != joined
    for model in few:
        for tensor in (GATE, UP, EMBED):
            file = manifest.models[model].tensors[tensor].file
            assert (before / model / file).samefile(joined / model / file)


# --- other file systems -------------------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_a_store_on_another_device_is_copied_once_and_then_linked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def on_one_device(source: str | Path, target: str | Path, **options: bool) -> None:
        if "store" in Path(source).parts:
            refuse()
        link(source, target, **options)

    monkeypatch.setattr(os, "link", on_one_device)
    root, manifest = case.exported()
    assert {m.linked for m in manifest.models.values()} == {"copy"}
    check = verify_disk(root, manifest)
    assert check.problems == ()
    assert check.shared_bytes == savings(case.assignments, case.fingerprints).net
    assert not case.store.path(case.tensors["tied"][UP], UP).samefile(shard(root, manifest, "tied", UP))
    assert shard(root, manifest, "tied", UP).stat().st_mode & 0o777 == 0o444


def test_without_any_links_every_model_has_its_copy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    root, manifest = case.exported()
    check = verify_disk(root, manifest)
    assert check.problems == ()
    assert check.shared_bytes == 0


def test_a_clone_is_preferred_to_a_copy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    clones = []

    def clone(target: int, request: int, source: int) -> int:
        assert request == 0x40049409
        clones.append(target)
        os.write(target, os.pread(source, 1 << 20, 0))
        return 0

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "ioctl", clone)
    root, manifest = case.exported()
    assert {m.linked for m in manifest.models.values()} == {"reflink"}
    assert len(clones) == 1 + 7  # the probe, then every shared shard, since not even within the export links work
    check = verify_disk(root, manifest)
    assert check.shared_bytes == 0  # clones share blocks, but are not one file, and no pages of memory
    assert {(p.code, p.model) for p in check.problems} == {("export-links", "single"), ("export-links", "tied")}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system here")
def test_a_real_second_device(case: Case, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        assert Path(elsewhere).stat().st_dev != tmp_path.stat().st_dev
        link = Case(tmp_path, case.pool, case.checkpoints, case.fingerprints, case.tensors, case.merged)
        (Path(elsewhere) / "exports").mkdir()
        (tmp_path / "exports").symlink_to(Path(elsewhere) / "exports")
        root, manifest = link.exported()
        assert {m.linked for m in manifest.models.values()} == {"copy"}
        assert verify_disk(root, manifest).shared_bytes == savings(case.assignments, case.fingerprints).net


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_file_that_changed_is_named_and_nothing_is_published(case: Case, tmp_path: Path) -> None:
    single = case.fingerprints["single"]
    case.fingerprints["single"] = single.model_copy(update={"files": single.files | {"notes.txt": "0" * 64}})
    with pytest.raises(CheckpointError, match=r"model single file notes.txt: changed since"):
        case.export()
    assert list((tmp_path / "exports" / "small").iterdir()) == []


@pytest.mark.parametrize("tensor", [NORM, EMBED])
def test_a_tensor_that_changed_is_named(case: Case, tensor: str) -> None:
    for name in ("sharded", "single"):
        fingerprint = case.fingerprints[name]
        changed = tuple(
            t.model_copy(update={"digest": "0" * 64}) if t.name == tensor else t for t in fingerprint.tensors
        )
        case.fingerprints[name] = fingerprint.model_copy(update={"tensors": changed})
    with pytest.raises(CheckpointError, match=f"tensor {tensor}: changed since"):
        case.export()
    assert list((case.exports / "small").iterdir()) == []


def test_a_merged_tensor_must_be_in_the_store(case: Case) -> None:
    case.tensors["tied"][DOWN] = "1" * 64
    with pytest.raises(StoreError, match="no such tensor in the store"):
        case.export()
    assert list((case.exports / "small").iterdir()) == []


def test_a_link_out_of_the_exports_is_refused(case: Case, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".keep").write_text("mine")
    case.exports.mkdir()
    (case.exports / "small").symlink_to(outside)
    with pytest.raises(StoreError, match="leads out of the exports directory"):
        case.export()
    assert [p.name for p in outside.iterdir()] == [".keep"]


def test_a_full_disk_is_one_clear_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = case.exported()
    before = contents(root)
    case.tensors["single"].pop(GATE)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        case.export()
    assert contents(root) == before
    assert [p.name for p in root.parent.iterdir()] == [root.name]


def test_a_disk_that_takes_no_change_any_more_is_the_same_error(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be cleared then is cleared by the next export."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        patch.setattr(shutil, "rmtree", refused)
        with pytest.raises(StoreError, match="Read-only file system"):
            case.export()
    root, _ = case.exported()
    assert [p.name for p in root.parent.iterdir()] == [root.name]


def test_residuals_that_are_not_in_the_store_are_named(directories: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(tmp_path, directories, RANKS)
    (entry,) = (case.root / "store" / case.adjustments["tied"][DOWN].up).iterdir()
    entry.unlink()
    with pytest.raises(StoreError, match="no such tensor in the store"):
        case.export()
    assert list((case.exports / "small").iterdir()) == []


def test_factors_are_private_whoever_else_adds_the_same(directories: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(tmp_path, directories, {(model, UP): 64 for model in MODELS})
    root, manifest = case.exported()
    down, up = factor_names(UP)
    for name, model in manifest.models.items():
        added = case.adjustments[name][UP]
        assert {n for n, t in model.tensors.items() if n not in case.checkpoints[name].names} == {down, up}
        places = {(model.tensors[n].sharing, model.tensors[n].file) for n in (down, up)}
        assert places == {("private", "adapter_model.sandhi")}
        assert (model.tensors[down].digest, model.tensors[down].shape) == (added.down, (64, 32))
        assert (model.tensors[up].digest, model.tensors[up].shape) == (added.up, (48, 64))
        assert model.tensors[down].dtype == model.tensors[up].dtype == dtype_name(DTYPE)
        assert model.tensors[down].nbytes + model.tensors[up].nbytes == added.nbytes
        assert index_name(model) == ADJUSTED_INDEX
    assert sizes_match(root, manifest)
    (root / "tied" / ADJUSTED_INDEX).unlink()
    assert not sizes_match(root, manifest)


def test_an_export_with_residuals_has_the_same_bytes_again(directories: dict[str, Path], tmp_path: Path) -> None:
    case = make_case(tmp_path / "one", directories, RANKS)
    (tmp_path / "two").mkdir()
    first, second = case.exported()[0], copy_case(case, tmp_path / "two").exported()[0]
    assert first.name == second.name and contents(first) == contents(second)


def test_only_factors_with_a_weight_are_factors() -> None:
    down, up = factor_names("a.b.weight")
    assert factors_among(["a.b.weight", down, up]) == dict.fromkeys((down, up), "a.b.weight")
    assert factors_among(["a.b.weight", up, "a.b.bias", "c.lora_A.weight"]) == {up: "a.b.weight"}
    assert factors_among([down, up]) == {}
