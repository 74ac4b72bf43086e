import hashlib
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file

from sandhi_core.checkpoints.checkpoint import Checkpoint, resolve, tensor_digest
from sandhi_core.errors import CheckpointError
from sandhi_core.pools.pool import ModelEntry, TaskBudget
from tests.models import BUILDERS, INDEX, WEIGHTS, shard, tiny_llama


def entry(path: str, revision: str | None = None) -> ModelEntry:
    return ModelEntry(name="m", path=path, revision=revision, tasks=(TaskBudget(task="t", metric="acc", budget=0.1),))


def test_a_digest_covers_dtype_shape_and_bytes() -> None:
    raw = bytes(range(8))
    assert tensor_digest("BF16", (2, 2), raw) == hashlib.sha256(b"BF16:2,2\n" + raw).hexdigest()
    assert tensor_digest("BF16", (), raw[:2]) == hashlib.sha256(b"BF16:\n" + raw[:2]).hexdigest()
    others = [("F16", (2, 2)), ("BF16", (4, 1)), ("BF16", (4,))]
    assert len({tensor_digest(d, s, raw) for d, s in [("BF16", (2, 2)), *others]}) == 4


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model_type", sorted(BUILDERS))
def test_tensors_are_what_safetensors_reads(tmp_path: Path, model_type: str, shards: int) -> None:
    directory = BUILDERS[model_type](tmp_path / "m")
    expected = load_file(directory / WEIGHTS)
    if shards > 1:
        shard(directory, shards)
    opened = Checkpoint.open(directory, "m")
    assert opened.names == tuple(sorted(expected))
    for name, tensor in expected.items():
        header = opened.header(name)
        assert (header.name, header.dtype, header.shape) == (name, "BF16", tuple(tensor.shape))
        assert header.nbytes == tensor.nbytes == opened.raw(name).nbytes
        assert opened.tensor(name).dtype == tensor.dtype
        assert torch.equal(opened.tensor(name), tensor)
    assert opened.config["model_type"] == model_type


def test_a_tensor_is_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    name = opened.names[0]
    assert opened.tensor(name).data_ptr() == opened.tensor(name).data_ptr()
    with pytest.raises(TypeError):
        opened.raw(name)[0] = 1
    script = (
        "import sys, pathlib; from sandhi_core.checkpoints.checkpoint import Checkpoint\n"
        "c = Checkpoint.open(pathlib.Path(sys.argv[1]), 'm'); c.tensor(c.names[0]).zero_()"
    )
    before = (opened.directory / WEIGHTS).read_bytes()
    done = subprocess.run([sys.executable, "-c", script, str(opened.directory)], capture_output=True)
    assert done.returncode == -11
    assert (opened.directory / WEIGHTS).read_bytes() == before


def test_a_view_outlives_its_checkpoint(tmp_path: Path) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    view, copy = opened.tensor("model.norm.weight"), opened.tensor("model.norm.weight").clone()
    del opened
    assert torch.equal(view, copy)


def test_files_beside_the_weights(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "m"))
    (directory / "templates").mkdir()
    (directory / "templates" / "chat.jinja").write_text("{{ x }}")
    (directory / ".git").mkdir()
    (directory / ".git" / "HEAD").write_text("x")
    for name in ("optimizer.pt", "pytorch_model.bin", "pytorch_model.bin.index.json", "m.gguf"):
        (directory / name).write_text("x")
    assert Checkpoint.open(directory, "m").beside() == (
        "config.json",
        "generation_config.json",
        "templates/chat.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    )


def test_identity_changes_whenever_a_file_is_written(tmp_path: Path) -> None:
    directory = shard(tiny_llama(tmp_path / "m"))
    before = Checkpoint.open(directory, "m").identity()
    assert Checkpoint.open(directory, "m").identity() == before
    assert [name for name, *_ in before] == sorted(p.name for p in directory.iterdir())
    for name in ("config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json"):
        status = (directory / name).stat()
        os.utime(directory / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        after = Checkpoint.open(directory, "m").identity()
        assert [old[0] for old, new in zip(before, after, strict=True) if old != new] == [name]
        before = after


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_changes_between_header_and_data_is_refused(tmp_path: Path, replace: bool) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m", seed=0), "m")
    if replace:
        (tiny_llama(tmp_path / "other", seed=1) / WEIGHTS).replace(opened.directory / WEIGHTS)
    else:
        (opened.directory / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"(changed|any more)") as caught:
        opened.tensor(opened.names[0])
    assert (caught.value.problem.model, caught.value.problem.file) == ("m", str(opened.directory / WEIGHTS))


def test_a_directory_resolves_to_itself(tmp_path: Path) -> None:
    assert resolve(entry(str(tmp_path))) == tmp_path


def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model in one revision, called main, laid out as the hub's client does."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in sorted(tiny_llama(tmp_path / "m").iterdir()):
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_hub_id_resolves_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_cache(tmp_path, monkeypatch)
    for revision in (None, "main", snapshot.name):
        assert resolve(entry("some/model", revision)) == snapshot
    opened = Checkpoint.open(snapshot, "m")
    assert opened.tensor("model.norm.weight").shape == (32,)
    assert "tokenizer.json" in opened.beside()


@pytest.mark.parametrize(("path", "revision"), [("some/other", None), ("some/model", "v2"), ("a/b/c", None)])
def test_what_is_not_cached_is_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, revision: str | None
) -> None:
    hub_cache(tmp_path, monkeypatch)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    with pytest.raises(CheckpointError, match="neither a directory nor in the local hub cache") as caught:
        resolve(entry(path, revision))
    assert caught.value.problem.code == "hub-not-cached"
    assert f"hf download {path}" in caught.value.problem.remedy
