"""Shared files aligned to 2 MiB: stock safetensors files all the same, and what their padding takes is no saving."""

import dataclasses
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

from sandhi_core.checkpoints.safetensors_file import map_file, raw_bytes, read_header, write_safetensors
from sandhi_core.claims import claims_of
from sandhi_core.disk import verify_disk
from sandhi_core.pools.pool import DeploySettings
from sandhi_core.records import Manifest
from sandhi_core.savings import Holding, duplicates, savings
from sandhi_core.serving.load import load
from sandhi_core.store import ALIGNMENT, Store
from tests.exported import EMBED, GATE, MODELS, UP, Case, make_case, make_models, stock

WIDE = 2 << 20
TOKENS = torch.arange(40)[None] % 64


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Matrices of an MLP of 4 MiB, all others smaller than 2 MiB."""
    models = make_models(tmp_path_factory.mktemp("models"), hidden_size=512, intermediate_size=2048)
    return make_case(tmp_path_factory.mktemp("case"), models)


@pytest.fixture(scope="module")
def wide(narrow: Case) -> Case:
    """The same pool, which asks for 2 MiB."""
    pool = narrow.pool.model_copy(update={"deploy": DeploySettings(alignment="2MiB")})
    return dataclasses.replace(narrow, pool=pool)


def test_what_the_padding_takes_is_not_claimed(narrow: Case, wide: Case) -> None:
    root, manifest = wide.exported()
    counted = savings(wide.assignments, wide.fingerprints, WIDE)
    check = verify_disk(root, manifest)
    assert check.problems == ()
    # One of two GATE, two of three UP, of 4 MiB each; the embedding that two models have is smaller than the padding.
    assert counted.net == (4 - 2 << 20) + (8 - 2 << 20)
    assert claims_of(manifest).claimed == check.shared_bytes == counted.net
    assert claims_of(manifest).duplicates == counted.duplicates == 0
    assert {n for n, t in manifest.models["single"].tensors.items() if t.sharing != "private"} == {GATE, UP}
    plain = narrow.exported()[1]
    assert claims_of(plain).claimed == savings(narrow.assignments, narrow.fingerprints).net > 12 << 20
    assert plain.models["single"].tensors[EMBED].sharing == "duplicate"


def test_it_is_what_the_files_take(wide: Case) -> None:
    root, manifest = wide.exported()
    files = {path.stat().st_ino: path.stat().st_size for path in root.glob("*/shared-*")}
    private = sum(t.nbytes for m in manifest.models.values() for t in m.tensors.values() if t.sharing == "private")
    assert len(files) == 2
    assert claims_of(manifest).checkpoint_bytes - private - sum(files.values()) == claims_of(manifest).claimed


def test_a_wide_entry_to_the_byte(tmp_path: Path) -> None:
    tensor = torch.tensor([[1.0], [2.0]])
    digest = Store(tmp_path, WIDE).put("w.weight", tensor)
    path = tmp_path / digest / "2MiB" / "w.weight.safetensors"
    header = b'{"__metadata__":{"format":"pt"},"w.weight":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}'
    data = bytes.fromhex("0000803f 00000040")
    assert path.read_bytes() == struct.pack("<Q", WIDE - 8) + header.ljust(WIDE - 8) + data
    assert torch.equal(load_file(path)["w.weight"], tensor)
    assert path.stat().st_mode & 0o777 == 0o444


def test_either_alignment_serves_the_other(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    first, second = Store(tmp_path), Store(tmp_path, WIDE)
    digest = first.put("w", tensor)
    assert torch.equal(second.tensor(digest), tensor) and second.has(digest)
    path = second.provide(digest, "w")
    assert path != first.path(digest, "w") and read_header(path)["w"].start == WIDE
    first.path(digest, "w").unlink()
    assert torch.equal(first.tensor(digest), tensor)
    assert read_header(first.provide(digest, "w"))["w"].start == ALIGNMENT


@pytest.mark.parametrize("name", MODELS)
def test_stock_tools_and_load_read_the_same(narrow: Case, wide: Case, name: str) -> None:
    root = wide.exported()[0]
    for path in (root / name).glob("shared-*"):
        ((tensor, place),) = read_header(path).items()
        assert place.start == WIDE and raw_bytes(load_file(path)[tensor]) == map_file(path)[tensor].raw
    with torch.inference_mode():
        answers = [made(TOKENS).logits for made in (load(root / name), stock(root / name), narrow.swapped(name))]
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    assert load(root / name).get_parameter(UP).data_ptr() % 4096 == 0


def test_only_a_manifest_that_differs_speaks_of_it(narrow: Case, wide: Case) -> None:
    assert b"alignment" not in narrow.exported()[1].canonical()
    manifest = wide.exported()[1]
    assert b'"alignment":2097152' in manifest.canonical() and Manifest.parse(manifest.canonical()) == manifest
    with pytest.raises(ValidationError):
        Manifest.parse(manifest.canonical().replace(b"2097152", b"8192"))


def test_a_file_that_lost_its_alignment_is_found(wide: Case) -> None:
    root, manifest = wide.exported()
    path = next((root / "tied").glob("shared-*"))
    entries = list(map_file(path).values())
    twins = [other for other in root.glob("*/shared-*") if other.samefile(path)]
    write_safetensors(path, entries, alignment=4096)
    for other in twins:
        if other != path:
            other.unlink()
            other.hardlink_to(path)
    problems = verify_disk(root, manifest).problems
    assert {(p.model, p.message) for p in problems} == {
        (name, "has its tensor at byte 4096, no multiple of 2097152") for name in MODELS
    }
    assert verify_disk(*wide.exported()).problems == ()  # the next export takes its place


def test_a_pool_file_may_ask_for_it() -> None:
    assert DeploySettings().alignment_bytes == 4096
    assert DeploySettings.model_validate({"alignment": "2MiB"}).alignment_bytes == WIDE
    with pytest.raises(ValidationError, match="Input should be '4KiB' or '2MiB'"):
        DeploySettings.model_validate({"alignment": "1MiB"})


@given(st.integers(0, 3 * WIDE), st.integers(1, 6), st.integers(0, 5), st.booleans(), st.sampled_from([0, WIDE]))
def test_nothing_is_shared_that_saves_nothing(nbytes: int, holders: int, own: int, vector: bool, padding: int) -> None:
    owners = tuple(map(str, range(min(own, holders))))
    merged = tuple(map(str, range(len(owners), holders)))
    held = Holding("w", "d", nbytes, merged, owners, vector, padding)
    assert held.freed == nbytes * (holders - 1) - padding
    assert not held.shared or held.freed > 0
    assert 0 <= held.duplicates == duplicates(nbytes, len(owners), padding) <= max(held.freed, 0)
