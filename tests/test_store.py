import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandhi_core.checkpoints import safetensors_file
from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import UnreadError, map_file, raw_bytes, read_header
from sandhi_core.errors import StoreError
from sandhi_core.store import ALIGNMENT, Store

W = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_tensor_comes_back_from_a_read_only_view_of_its_file(store: Store) -> None:
    digest = store.put("a.weight", W)
    assert digest == tensor_digest("F32", (3, 4), raw_bytes(W))
    assert torch.equal(store.tensor(digest), W)
    path = store.path(digest, "a.weight")
    assert path.relative_to(store.root).parts == (digest, "a.weight.safetensors")
    assert path.stat().st_mode & 0o777 == 0o444
    assert list(path.parent.iterdir()) == [path]
    view = store.tensor(digest)
    assert f"{path}\n" in Path("/proc/self/maps").read_text()
    assert torch.equal(view, W)


def test_the_data_begins_at_a_page(store: Store) -> None:
    path = store.path(store.put("a.weight", W), "a.weight")
    assert read_header(path)["a.weight"].start == ALIGNMENT == 4096


def test_put_again_writes_nothing(store: Store) -> None:
    path = store.path(store.put("a.weight", W), "a.weight")
    before = path.stat()
    store.put("a.weight", W.clone())
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_an_entry_that_went_bad_is_replaced_by_another_file(store: Store) -> None:
    path = store.path(store.put("a.weight", W), "a.weight")
    good, inode = path.read_bytes(), path.stat().st_ino
    with path.open("r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"\xff")
    mapped = map_file(path)["a.weight"].raw  # whoever maps the bad file keeps it as it is
    store.put("a.weight", W)
    assert path.read_bytes() == good
    assert path.stat().st_ino != inode
    assert mapped[-1] == 0xFF


def test_the_same_bytes_under_another_name_are_another_file(store: Store) -> None:
    digest = store.put("a.weight", W)
    path = store.provide(digest, "b.weight")
    assert path == store.path(digest, "b.weight")
    assert list(map_file(path)) == ["b.weight"]
    assert store.provide(digest, "a.weight") == store.path(digest, "a.weight")
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.weight.safetensors", "b.weight.safetensors"]


def test_a_damaged_entry_is_made_from_an_intact_one(store: Store) -> None:
    digest = store.put("a.weight", W)
    store.provide(digest, "b.weight")
    bad = store.path(digest, "a.weight")
    bad.unlink()
    bad.write_bytes(b"half")
    assert torch.equal(store.tensor(digest), W)
    assert map_file(store.provide(digest, "a.weight"))["a.weight"].raw == raw_bytes(W)


def test_what_is_not_there_is_an_error_with_a_remedy(store: Store) -> None:
    with pytest.raises(StoreError, match=f"{'0' * 64}: no such tensor in the store .*build again"):
        store.tensor("0" * 64)
    digest = store.put("a.weight", W)
    path = store.path(digest, "a.weight")
    path.unlink()
    path.write_bytes(b"half")
    with pytest.raises(StoreError, match="every entry of this tensor is damaged"):
        store.provide(digest, "b.weight")


@pytest.mark.parametrize("name", ["", ".", "../a", "a/b", "-rf", ".hidden", "a\nb", "ä", "w" * 241])
def test_a_name_that_is_no_file_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(StoreError, match="cannot be a file name"):
        store.put(name, W)
    assert not store.root.exists()


def test_a_root_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match=r"cannot be written: .*artifact root space"):
        Store(tmp_path / "store").put("a.weight", W)


def test_a_recipe_is_remembered_while_its_tensor_is_there(store: Store) -> None:
    assert store.recipe_tensor("r") is None
    digest = store.put("a.weight", W)
    store.remember_recipe("r", digest)
    assert Store(store.root).recipe_tensor("r") == digest
    store.path(digest, "a.weight").unlink()
    assert store.recipe_tensor("r") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"tensor":3}', b"\xff"])
def test_a_damaged_note_of_a_recipe_counts_as_none(store: Store, damage: bytes) -> None:
    store.remember_recipe("r", store.put("a.weight", W))
    (store.root / "recipes" / "r.json").write_bytes(damage)
    assert store.recipe_tensor("r") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 2**31),
)
def test_any_tensor_survives(store: Store, dtype: torch.dtype, shape: list[int], seed: int) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    back = store.tensor(store.put("w", tensor))
    assert back.dtype == dtype and list(back.shape) == shape
    assert raw_bytes(back) == raw_bytes(tensor)


def test_a_view_that_is_not_contiguous_is_stored_as_it_reads(store: Store) -> None:
    assert torch.equal(store.tensor(store.put("w", W.T)), W.T)


def test_an_entry_that_cannot_be_read_a_second_time_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store.put("a.weight", W)
    looked = 0

    def failing(raw: memoryview) -> None:
        nonlocal looked
        looked += 1
        if looked > 1:
            raise UnreadError

    monkeypatch.setattr(safetensors_file, "present", failing)
    with pytest.raises(StoreError, match=r"cannot be read") as caught:
        store.provide(digest, "b.weight")
    assert digest in str(caught.value)
    assert not store.path(digest, "b.weight").exists()


def test_an_entry_for_which_there_is_no_memory_is_not_called_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.put("a.weight", W)

    def short(raw: memoryview, advice: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(safetensors_file, "_advise", short)
    with pytest.raises(MemoryError):
        store.entry(digest)
