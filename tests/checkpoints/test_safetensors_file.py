import json
import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from sandhi_core.checkpoints.safetensors_file import (
    DTYPES,
    Entry,
    FormatError,
    dtype_name,
    header_bytes,
    map_file,
    raw_bytes,
    read_header,
    tensor_digest,
    tensor_over,
    write_hashed,
    write_safetensors,
)


def entry(name: str, tensor: Tensor) -> Entry:
    return Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))


def of_every_dtype(shape: tuple[int, ...] = (3, 2)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, dtype in DTYPES.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        high = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
        tensors[f"t.{name.lower()}"] = raw.view(dtype).reshape(shape)
    return tensors


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


def test_the_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = of_every_dtype() | {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", [entry(n, t) for n, t in tensors.items()])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tensors = of_every_dtype() | {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(n, t) for n, t in tensors.items()])
    entries = map_file(path)
    assert entries.keys() == tensors.keys() == load_file(path).keys()
    for name, tensor in tensors.items():
        _, dtype, shape, raw = entries[name]
        assert same_bytes(tensor_over(dtype, shape, raw), tensor)
        assert raw.readonly


@given(st.permutations(sorted(DTYPES)), st.sampled_from([8, 64, 4096]))
def test_bytes_do_not_depend_on_the_order_given(order: list[str], alignment: int) -> None:
    tensors = of_every_dtype()
    entries = sorted((entry(n, t) for n, t in tensors.items()), key=lambda e: list(DTYPES).index(e.dtype))
    head = header_bytes(entries, alignment)
    assert len(head) % alignment == 0
    assert struct.unpack("<Q", head[:8])[0] == len(head) - 8
    names = [f"t.{n.lower()}" for n in order]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.safetensors"
        write_safetensors(path, [entry(n, tensors[n]) for n in names], alignment=alignment)
        assert path.read_bytes()[: len(head)] == head


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry(n, t) for n, t in of_every_dtype((3, 1)).items()])
    for place in read_header(path).values():
        assert place.start % DTYPES[place.dtype].itemsize == 0


def test_the_file_is_read_only_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.ones(2))])
    assert path.stat().st_mode & 0o777 == 0o444
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_hashed_while_written_it_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    entries = [entry(n, t) for n, t in (of_every_dtype((3, 5)) | {"none": torch.empty(0, 4)}).items()]
    write_safetensors(tmp_path / "a", entries)
    monkeypatch.setattr("sandhi_core.checkpoints.safetensors_file._CHUNK", chunk)
    found = write_hashed(tmp_path / "b", entries)
    assert found == {e.name: tensor_digest(e.dtype, e.shape, e.raw) for e in entries}
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.ones(2))])
    before = path.read_bytes()

    class Broken:
        nbytes = 8
        obj = None

        def __getitem__(self, part: slice) -> bytes:
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        write_safetensors(path, [Entry("w", "F32", (2,), Broken())])  # type: ignore[arg-type]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    big = torch.zeros(64 << 20, dtype=torch.uint8)
    tracemalloc.start()
    write_safetensors(tmp_path / "a.safetensors", [entry("w", big)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_view_outlives_everything_else_and_is_not_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [entry("w", torch.arange(4096.0))])
    tensor = tensor_over(*map_file(path)["w"][1:])
    path.unlink()
    assert torch.equal(tensor, torch.arange(4096.0))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert any(f"{path} (deleted)" in line and "r--s" in line for line in mapped)


# --- malformed files ----------------------------------------------------------------------------------------


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(start: int, end: int, shape: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


MALFORMED = {
    "empty": (b"", "no header fits"),
    "seven bytes": (b"\0" * 7, "no header fits"),
    "longer than the file": (struct.pack("<Q", 10) + b"{}", "no header fits"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "no header fits"),
    "no json": (packed(b"{nope"), "no JSON"),
    "no utf-8": (packed(b'{"\xff": 1}'), "no JSON"),
    "nested too deep": (packed(b"[" * 100_000), "no JSON"),
    "a list": (packed([]), "no JSON object"),
    "twice": (packed(b'{"a": 1, "a": 1}'), "twice"),
    "no entry": (packed({"a": 3}), "tensor a has a header entry"),
    "unknown dtype": (packed({"a": f32(0, 4, [1]) | {"dtype": "Q4"}}, bytes(4)), "tensor a has a header"),
    "negative size": (packed({"a": f32(0, 4, [-1])}, bytes(4)), "tensor a has a header entry"),
    "a size that is true": (packed({"a": f32(0, 4, [True])}, bytes(4)), "tensor a has a header entry"),
    "size and shape differ": (packed({"a": f32(0, 8, [1])}, bytes(8)), "tensor a has a header entry"),
    "hole": (packed({"a": f32(0, 4, [1]), "b": f32(8, 12, [1])}, bytes(12)), "b begins at byte 8"),
    "overlap": (packed({"a": f32(0, 4, [1]), "b": f32(2, 6, [1])}, bytes(6)), "b begins at byte 2"),
    "truncated": (packed({"a": f32(0, 8, [2])}, bytes(7)), "the file has"),
    "too long": (packed({"a": f32(0, 4, [1])}, bytes(5)), "the file has"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_refused_with_its_reason(kind: str, tmp_path: Path) -> None:
    data, reason = MALFORMED[kind]
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(FormatError, match=reason):
        map_file(tmp_path / "a")


@given(st.binary(max_size=200), st.booleans())
def test_no_other_exception_comes_out_of_garbage(data: bytes, framed: bool) -> None:
    with tempfile.NamedTemporaryFile() as f:
        f.write(packed(data) if framed else data)
        f.flush()
        try:
            read_header(Path(f.name))
        except FormatError:
            return
        assert framed and json.loads(data) == {}


def test_an_empty_tensor_has_no_bytes() -> None:
    assert raw_bytes(torch.empty(0, 3)) == b""
