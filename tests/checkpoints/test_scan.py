import hashlib
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandhi_core.checkpoints import scan
from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.scan import fingerprint, row_statistics, row_statistics_of
from sandhi_core.errors import CheckpointError, StoreError
from sandhi_core.records import Fingerprint
from tests.conftest import CHECKOUT
from tests.models import BUILDERS, INDEX, WEIGHTS, edit_tensors, shard, tiny_llama, tiny_qwen3_moe


def scanned(directory: Path, scans: Path) -> Fingerprint:
    return fingerprint(Checkpoint.open(directory, "m"), scans)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors whose bytes are read, as they are."""
    seen: list[str] = []
    plain = scan._scan

    def counted(entry: scan.HeaderEntry, raw: memoryview) -> object:
        seen.append(entry.name)
        return plain(entry, raw)

    monkeypatch.setattr(scan, "_scan", counted)
    return seen


@pytest.mark.parametrize("model_type", sorted(BUILDERS))
def test_every_tensor_and_file_is_recorded(tmp_path: Path, model_type: str) -> None:
    directory = BUILDERS[model_type](tmp_path / "m")
    record = scanned(directory, tmp_path / "scans")
    tensors = load_file(directory / WEIGHTS)
    assert [t.name for t in record.tensors] == sorted(tensors)
    for info in record.tensors:
        tensor = tensors[info.name]
        raw = tensor.view(torch.uint8).numpy().tobytes()
        assert info.digest == tensor_digest("BF16", tuple(tensor.shape), raw)
        assert (info.file, info.dtype, info.shape) == (WEIGHTS, "BF16", tuple(tensor.shape))
        assert info.nbytes == len(raw)
        assert info.mean == pytest.approx(tensor.double().mean().item(), abs=1e-12)
        assert info.std == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-12)
        rows = tensor if tensor.ndim == 2 else tensor[:0, None]
        assert info.constant_rows == int((rows == rows[:, :1]).all(1).sum())
    assert record.model_type == model_type
    assert (record.model, record.layers, record.dtype) == ("m", 2, "BF16")
    beside = [p for p in directory.iterdir() if p.name != WEIGHTS]
    assert record.files == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in beside}
    assert Fingerprint.parse(record.canonical()) == record


def test_threads_and_order_of_reading_change_nothing(tmp_path: Path) -> None:
    directory, threads = tiny_qwen3_moe(tmp_path / "m"), torch.get_num_threads()
    found = []
    for count in (1, 4):
        torch.set_num_threads(count)
        found.append(scanned(directory, tmp_path / f"scans {count}").canonical())
    torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_row_statistics_of_every_matrix(tmp_path: Path) -> None:
    directory = tiny_qwen3_moe(tmp_path / "m")
    edit_tensors(directory, lambda t: t["model.layers.0.mlp.gate_proj.weight"][3:5].fill_(0.25))
    record = scanned(directory, tmp_path / "scans")
    matrices = {n: t for n, t in load_file(directory / WEIGHTS).items() if t.ndim == 2}
    for name, tensor in matrices.items():
        found, expected = row_statistics(tmp_path / "scans", record, name), row_statistics_of(tensor)
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.std, expected.std)
    side = tmp_path / "scans" / "rows" / f"{record.rows}.safetensors"
    assert hashlib.sha256(side.read_bytes()).hexdigest() == record.rows
    assert set(load_file(side)) == {f"{name}.{part}" for name in matrices for part in ("mean", "std")}
    assert record.tensor("model.layers.0.mlp.gate_proj.weight").constant_rows == 2


def test_blocks_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_llama(tmp_path / "m")
    whole = scanned(directory, tmp_path / "one")
    monkeypatch.setattr("sandhi_core.moments._BLOCK", 100)
    assert scanned(directory, tmp_path / "two") == whole


def test_a_fingerprint_holds_no_path_and_no_time(tmp_path: Path) -> None:
    one, other = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "other")
    os.utime(other / WEIGHTS, ns=(1, 1))
    assert scanned(one, tmp_path / "s").digest == scanned(other, tmp_path / "t").digest


def test_shards_change_files_only(tmp_path: Path) -> None:
    single, sharded = tiny_llama(tmp_path / "one"), shard(tiny_llama(tmp_path / "other"), 3)
    one, other = scanned(single, tmp_path / "scans"), scanned(sharded, tmp_path / "scans")
    assert len({t.file for t in other.tensors}) == 3
    unplaced = [t.model_copy(update={"file": WEIGHTS}) for t in other.tensors]
    assert one == other.model_copy(update={"tensors": tuple(unplaced)})
    assert INDEX not in other.files


def test_what_was_read_once_is_not_read_again(tmp_path: Path, reads: list[str]) -> None:
    directory = shard(tiny_llama(tmp_path / "m"))
    first = scanned(directory, tmp_path / "scans")
    assert sorted(reads) == [t.name for t in first.tensors]
    reads.clear()
    assert scanned(directory, tmp_path / "scans") == first
    assert reads == []


def test_only_the_file_that_changed_is_read_again(tmp_path: Path, reads: list[str]) -> None:
    directory = shard(tiny_llama(tmp_path / "m"))
    first = scanned(directory, tmp_path / "scans")
    file = directory / "model-00002-of-00002.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    reads.clear()
    second = scanned(directory, tmp_path / "scans")
    assert sorted(reads) == sorted(tensors)
    changed = [a.name for a, b in zip(first.tensors, second.tensors, strict=True) if a != b]
    assert changed == ["model.norm.weight"]


@pytest.mark.parametrize(
    "damage", ["rows gone", "rows damaged", "scan damaged", "scan of other kind", "digit", "foreign"]
)
def test_damaged_notes_are_made_again(tmp_path: Path, reads: list[str], damage: str) -> None:
    directory = tiny_llama(tmp_path / "m")
    first = scanned(directory, tmp_path / "scans")
    rows = tmp_path / "scans" / "rows" / f"{first.rows}.safetensors"
    (note,) = (tmp_path / "scans" / "files").iterdir()
    if damage == "rows gone":
        rows.unlink()
    elif damage == "rows damaged":
        data = bytearray(rows.read_bytes())
        data[-1] ^= 1
        rows.unlink()
        rows.write_bytes(data)
    elif damage == "digit":
        digest = first.tensors[0].digest
        note.write_text(note.read_text().replace(digest, f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"))
    elif damage == "foreign":
        scanned(tiny_llama(tmp_path / "other", seed=1), tmp_path / "scans")
        (other,) = set((tmp_path / "scans" / "files").iterdir()) - {note}
        note.write_bytes(other.read_bytes())
    else:
        note.write_text('{"tensors": [' if damage == "scan damaged" else '{"rows": "", "tensors": [], "x": 1}')
    reads.clear()
    assert scanned(directory, tmp_path / "scans") == first
    assert len(reads) == len(first.tensors)
    assert hashlib.sha256(rows.read_bytes()).hexdigest() == first.rows


def test_row_statistics_that_are_gone_say_so(tmp_path: Path) -> None:
    record = scanned(tiny_llama(tmp_path / "m"), tmp_path / "scans")
    (tmp_path / "scans" / "rows" / f"{record.rows}.safetensors").unlink()
    with pytest.raises(StoreError, match=r"model m .*read again"):
        row_statistics(tmp_path / "scans", record, "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"])
def test_what_is_not_finite_is_named_with_its_row(tmp_path: Path, name: str, value: float) -> None:
    directory = tiny_llama(tmp_path / "m")
    edit_tensors(directory, lambda t: t[name][30:32, 5].fill_(value))
    for _ in range(2):  # nothing of it is kept as if it were sound
        with pytest.raises(CheckpointError, match=rf"tensor {name}: holds NaN or infinity, first in row 30 "):
            scanned(directory, tmp_path / "scans")
    assert not (tmp_path / "scans" / "files").exists()


def test_every_tensor_that_is_not_finite_is_a_problem(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m")
    bad = ["lm_head.weight", "model.layers.0.input_layernorm.weight", "model.norm.weight"]
    for name in bad:
        edit_tensors(directory, lambda t, name=name: t[name].view(-1)[-1].fill_(float("nan")))
    record, problems = scan.examine(Checkpoint.open(directory, "m"), tmp_path / "scans")
    assert record is None
    assert [p.tensor for p in problems] == bad


def test_scans_that_cannot_be_written_say_so(tmp_path: Path) -> None:
    (tmp_path / "scans").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        scanned(tiny_llama(tmp_path / "m"), tmp_path / "scans")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Checkpoint.open(tiny_llama(tmp_path / "m"), "m")
    plain = scan._scan

    def meddling(entry: scan.HeaderEntry, raw: memoryview) -> object:
        os.utime(opened.directory / WEIGHTS)
        return plain(entry, raw)

    monkeypatch.setattr(scan, "_scan", meddling)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        fingerprint(opened, tmp_path / "scans")


def test_a_pass_holds_no_tensor_in_memory(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", vocab_size=65536, hidden_size=256)  # two tables of 32 MiB
    opened = Checkpoint.open(directory, "m")
    tracemalloc.start()
    try:
        record = fingerprint(opened, tmp_path / "scans")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert record.nbytes > 64 * 2**20
    assert peak < 16 * 2**20


GROWTH = """
    import sys
    from pathlib import Path
    from sandhi_core.checkpoints.checkpoint import Checkpoint
    from sandhi_core.checkpoints.scan import fingerprint
    def held():
        (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) // 1024
    opened = Checkpoint.open(Path(sys.argv[1]), "m")
    before = held()
    fingerprint(opened, Path(sys.argv[2]))
    print(held() - before)
"""


def test_a_pass_over_many_tensors_leaves_no_memory_behind(tmp_path: Path) -> None:
    """Buffers between which something is kept are lost for good: two MiB a tensor."""
    directory = tiny_llama(tmp_path / "m", hidden_size=512, intermediate_size=512, num_hidden_layers=16)
    command = [sys.executable, "-c", textwrap.dedent(GROWTH), str(directory), str(tmp_path / "scans")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80  # MiB; 112 matrices of half a MiB each
