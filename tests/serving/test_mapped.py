"""Exports as loaders see them: read-only views, one file to a digest, nothing that differs from the manifest."""

import gc
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sandhi_core.assignment import factor_names
from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import map_file, raw_bytes, write_safetensors
from sandhi_core.errors import CheckpointError, ProofError
from sandhi_core.layout import MANIFEST
from sandhi_core.rungs.residual import Residual
from sandhi_core.serving.mapped import MappedModel, aliases
from tests.aliased import BARE, HEAD, make_aliased
from tests.exported import DOWN, EMBED, GATE, MODELS, NORM, RANKS, UP, VECTORS, Case, make_case, make_models

PRIVATE = "private.safetensors"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    models = make_models(tmp_path_factory.mktemp("models"))
    return make_case(tmp_path_factory.mktemp("case"), models, RANKS, VECTORS)


@pytest.fixture(scope="module")
def root(case: Case) -> Path:
    return case.exported()[0]


@pytest.fixture(scope="module")
def aliased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_aliased(tmp_path_factory.mktemp("aliased")).exported()[0]


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """An export to be damaged: every file is its own."""
    return Path(shutil.copytree(root, tmp_path / "export"))


def digest_of(tensor: torch.Tensor, dtype: str = "F32") -> str:
    return tensor_digest(dtype, tuple(tensor.shape), raw_bytes(tensor))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_what_the_manifest_says(case: Case, root: Path, name: str) -> None:
    mapped = MappedModel.open(root / name)
    assert (mapped.model, mapped.directory) == (name, root / name)
    assert mapped.tensors == case.exported()[1].models[name].tensors
    for tensor, said in mapped.tensors.items():
        assert digest_of(mapped.tensor(tensor), said.dtype) == said.digest
    mapped.check("full")
    assert mapped.shared() == {n for n, t in mapped.tensors.items() if t.sharing != "private"}


def test_one_mapping_a_file_and_process_read_only_and_as_long_as_it_is_used(root: Path) -> None:
    def spans(path: Path) -> list[str]:
        inode = path.stat().st_ino
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[1] for line in lines if int(line.split()[4]) == inode]

    first = MappedModel.open(root / "single")
    file = root / "single" / first.tensors[UP].file
    tensor = first.tensor(UP)
    second = MappedModel.open(root / "tied").tensor(UP)
    assert second.data_ptr() == tensor.data_ptr()
    del first
    gc.collect()
    assert MappedModel.open(root / "sharded").tensor(UP).data_ptr() == tensor.data_ptr()
    assert spans(file) == ["r--s"]
    kept = second.clone()
    del tensor
    gc.collect()
    assert torch.equal(second, kept)
    del second
    gc.collect()
    assert spans(file) == []


def test_a_stray_write_is_a_segmentation_fault(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sandhi_core.serving.mapped import MappedModel\n"
        f"tensor = MappedModel.open(Path(sys.argv[1])).tensor({UP!r})\n"
        "print(float(tensor[0, 0]), flush=True); tensor[0, 0] = 1.0; print('written')"
    )
    run = subprocess.run([sys.executable, "-c", code, root / "tied"], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGSEGV and len(run.stdout.split()) == 1


def test_residuals_are_views_of_what_is_stored(case: Case, root: Path) -> None:
    mapped = MappedModel.open(root / "single")
    for weight in (GATE, UP):
        found, expected = mapped.residual(weight), case.residual("single", weight)
        assert isinstance(found, Residual) and found.parts.keys() == expected.parts.keys()
        assert all(torch.equal(part, expected.parts[name]) for name, part in found.parts.items())
    assert mapped.residual(DOWN) is None
    vectors = MappedModel.open(root / "tied").residual(UP)
    assert vectors is not None and vectors.rank == 0 and vectors.scale is not None


def test_every_model_of_an_export_is_opened_with_one_look_at_the_manifest(
    case: Case, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = case.exported()[1]
    monkeypatch.setattr("sandhi_core.serving.mapped.read_manifest", None)
    counted: list[int] = []
    monkeypatch.setattr("sandhi_core.serving.mapped.aliases", lambda m: counted.append(1) or aliases(m))
    found = {mapped.model: mapped for mapped in MappedModel.each(root, manifest)}
    assert list(found) == sorted(MODELS) and len(counted) == 1
    assert len({mapped.tensor(UP).data_ptr() for mapped in found.values()}) == 1
    assert found["single"].shared() is found["single"].shared()


def test_what_is_its_own_may_be_written_and_changes_no_file(root: Path) -> None:
    mapped = MappedModel.open(root / "single")
    path = root / "single" / mapped.tensors[NORM].file
    before = path.read_bytes()
    first, second = mapped.own(NORM), MappedModel.open(root / "single").own(NORM)
    first.add_(1.0)
    assert torch.equal(first, second + 1.0) and torch.equal(mapped.tensor(NORM), second)
    assert torch.equal(mapped.own(NORM), first)  # one private mapping, as long as the model is open
    assert path.read_bytes() == before


def test_what_was_held_to_its_digest_is_what_is_used(copy: Path) -> None:
    mapped = MappedModel.open(copy / "single")
    mapped.check("full")
    path = copy / "single" / mapped.tensors[NORM].file
    twin = path.with_name("twin")
    shutil.copy(path, twin)
    flip(twin)
    twin.replace(path)
    with pytest.raises(CheckpointError, match="another file has taken its place") as caught:
        mapped.own(NORM)
    assert (caught.value.problem.file, caught.value.problem.tensor) == (str(path), NORM)


# --- aliases ------------------------------------------------------------------------------------------------


def test_a_digest_is_read_in_one_file_under_whichever_name(aliased: Path) -> None:
    opened = {name: MappedModel.open(aliased / name) for name in ("bare", "other", "twice")}
    holders = [("twice", EMBED), ("twice", HEAD), ("other", EMBED), ("bare", EMBED.removeprefix("model."))]
    places = {opened[model].file(name) for model, name in holders}
    ((path, _),) = places  # that of the shared shard, which needs no alias
    assert path.parent.name == "other" and path.name.startswith("shared-")
    assert len({opened[model].tensor(name).data_ptr() for model, name in holders}) == 1
    assert opened["bare"].file(BARE) == opened["twice"].file(UP)
    assert {BARE, "embed_tokens.weight"} == opened["bare"].shared()
    assert {EMBED, HEAD, UP, GATE} == opened["twice"].shared()
    assert {EMBED, GATE} == opened["other"].shared()
    for name, mapped in opened.items():
        mapped.check("full")
        own = {n: t for file in (aliased / name).glob("*.safetensors") for n, t in load_file(file).items()}
        assert all(torch.equal(mapped.tensor(n), tensor) for n, tensor in own.items())


def test_a_model_that_was_copied_without_the_others_reads_its_own(aliased: Path, tmp_path: Path) -> None:
    for path in ("bare", MANIFEST):
        (shutil.copytree if path == "bare" else shutil.copy)(aliased / path, tmp_path / path)
    mapped = MappedModel.open(tmp_path / "bare")
    assert mapped.file(BARE)[0] == tmp_path / "bare" / PRIVATE
    mapped.check("full")


def test_what_is_smaller_than_a_page_and_what_belongs_to_residuals_has_no_alias(case: Case) -> None:
    manifest = case.exported()[1]
    norms = [t.digest for t in manifest.models["single"].tensors.values() if t.nbytes < 4096]
    assert manifest.models["single"].tensors[NORM].digest in norms
    assert not aliases(manifest).keys() & set(norms)
    twin = manifest.models["single"].tensors | {
        n: t.model_copy(update={"nbytes": 8192, "digest": "a" * 64})
        for n, t in manifest.models["single"].tensors.items()
        if n in factor_names(GATE)
    }
    models = {"single": manifest.models["single"].model_copy(update={"tensors": twin})}
    assert aliases(manifest.model_copy(update={"models": models})) == {}


# --- what is refused ----------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_flipped_bit_is_named_with_both_digests(copy: Path) -> None:
    mapped = MappedModel.open(copy / "tied")
    path = copy / "tied" / mapped.tensors[UP].file
    flip(path)
    mapped = MappedModel.open(copy / "tied")
    with pytest.raises(ProofError, match="is not what was exported") as caught:
        mapped.check("full")
    problem = caught.value.problem
    assert (problem.model, problem.file, problem.tensor) == ("tied", str(path), UP)
    assert mapped.tensors[UP].digest in problem.message and digest_of(mapped.tensor(UP)) in problem.message
    mapped.check("off")


def test_a_sample_is_the_same_every_time_and_holds_whole_tensors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = MappedModel._digest
    monkeypatch.setattr(MappedModel, "_digest", lambda self, name: asked.append(name) or real(self, name))
    for _ in range(2):
        MappedModel.open(root / "single").check("sampled")
    assert len(asked) == 2 and len(set(asked)) == 1
    MappedModel.open(root / "single").check("full")
    assert sorted(asked[2:]) == sorted(MappedModel.open(root / "single").tensors)


def other_version(root: Path) -> None:
    manifest = json.loads((root / MANIFEST).read_text())
    (root / MANIFEST).unlink()
    (root / MANIFEST).write_text(json.dumps(manifest | {"schema_version": 2, "more": {}}))


def truncated(path: Path, nbytes: int = 9) -> None:
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-nbytes])


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def reshaped(path: Path) -> None:
    entries = map_file(path)
    shape = entries[UP].shape
    write_safetensors(path, [entries[UP]._replace(shape=(shape[1], shape[0]))])


def with_more(path: Path) -> None:
    entries = map_file(path)
    write_safetensors(path, [entries[UP], entries[UP]._replace(name="more")])


def renamed(path: Path) -> None:
    write_safetensors(path, [map_file(path)[UP]._replace(name="more")])


FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str, str | None]] = {
    "missing": (Path.unlink, CheckpointError, "is missing", None),
    "a link to nothing": (nowhere, CheckpointError, "is a link to nothing", None),
    "a directory": (lambda p: (p.unlink(), p.mkdir()), CheckpointError, "cannot be read: Is a directory", None),
    "truncated": (truncated, CheckpointError, "is no intact safetensors file: the header speaks of", None),
    "empty": (
        lambda p: truncated(p, p.stat().st_size),
        CheckpointError,
        "no intact safetensors file: it is empty",
        None,
    ),
    "of another shape": (reshaped, ProofError, r"is F32 \[32, 48\] in the file, F32 \[48, 32\] in sandhi.json", UP),
    "with another tensor": (with_more, ProofError, "is no tensor that sandhi.json has here", "more"),
    "without the tensor": (renamed, ProofError, "is missing: sandhi.json has it in this file", UP),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_file_that_is_not_the_manifests_is_refused(copy: Path, kind: str) -> None:
    damage, error, message, tensor = FAULTS[kind]
    path = copy / "tied" / MappedModel.open(copy / "tied").tensors[UP].file
    damage(path)
    with pytest.raises(error, match=message) as caught:
        MappedModel.open(copy / "tied")
    problem = caught.value.problem  # type: ignore[attr-defined]
    assert (problem.model, problem.file, problem.tensor) == ("tied", str(path), tensor) and problem.remedy
    MappedModel.open(copy / "sharded")  # has files of its own here


def test_another_configuration_is_refused(copy: Path) -> None:
    """The same tensors would answer otherwise."""
    config = copy / "tied" / "config.json"
    data = json.loads(config.read_text())
    config.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        MappedModel.open(copy / "tied")
    config.write_text(json.dumps(data | {"rms_norm_eps": 0.5}))
    with pytest.raises(ProofError, match="is not what was exported: its digest is") as caught:
        MappedModel.open(copy / "tied")
    assert (caught.value.problem.model, caught.value.problem.file) == ("tied", str(config))


def test_a_manifest_of_another_version_is_refused(copy: Path) -> None:
    other_version(copy)
    with pytest.raises(ProofError, match=r"is of schema version 2, this Sandhi reads 1 .use the Sandhi that wrote it"):
        MappedModel.open(copy / "tied")


def test_a_directory_that_is_no_model_of_the_export_is_refused(copy: Path, case: Case) -> None:
    (copy / "tied").rename(copy / "tied.old")
    with pytest.raises(CheckpointError, match=r"is none of the models of .* .give one of sharded, single, tied"):
        MappedModel.open(copy / "tied.old")
    with pytest.raises(ProofError, match="cannot be read"):
        MappedModel.open(case.checkpoints["tied"].directory)


def test_a_directory_may_be_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(root / "single")
    assert MappedModel.open(tmp_path / "current").directory == root / "single"
