"""Side files: what is read is what was kept under that name, or nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandhi_core.checkpoints.side_files import SEAL, keep, kept

TENSORS = {"squares": torch.tensor([2.0, 1.0], dtype=torch.float64), "up": torch.ones(3, 2).bfloat16()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "model" / "one.safetensors"
    keep(path, TENSORS)
    return path


def test_what_was_kept_is_found_wherever_the_root_lies(file: Path, tmp_path: Path) -> None:
    (tmp_path / "root").rename(tmp_path / "moved")
    found = kept(tmp_path / "moved" / "model" / file.name)
    assert found is not None and found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_flipped_bit_or_a_missing_end_leaves_nothing(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    spoilt = [whole[:end] for end in (0, 7, len(whole) // 2, len(whole) - 1)]
    spoilt += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for number, data in enumerate(spoilt):  # each a file of its own: nothing is read twice
        path = tmp_path / str(number) / file.parent.name / file.name
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        found = kept(path)
        header_only = found is not None and all(torch.equal(found[n], t) for n, t in TENSORS.items())
        assert found is None or header_only, number


def test_a_file_of_another_name_or_writer_is_none_of_ours(file: Path) -> None:
    for other in (file.with_name("two.safetensors"), file.parent.with_name("other") / file.name):
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(file.read_bytes())
        assert kept(other) is None
    save_file({n: t for n, t in load_file(file).items() if n != SEAL}, unsealed := file.with_name("three.safetensors"))
    assert kept(unsealed) is None


def test_what_replaces_a_damaged_file_is_found(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])
    assert kept(file) is None
    keep(file, TENSORS)
    assert kept(file) is not None
