"""What a model alone holds is read ahead: all of it, nothing else, and whatever happens meanwhile."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.errors import CheckpointError
from sandhi_core.serving import prefetch
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.prefetch import Span, prefetching, private_spans
from tests.aliased import make_aliased
from tests.exported import MODELS, RANKS, VECTORS, make_case, make_models


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where each read began and how long it was."""
    found: list[tuple[int, int]] = []
    real = os.preadv

    def noted(descriptor: int, buffers: list[bytearray], start: int) -> int:
        found.append((start, real(descriptor, buffers, start)))
        return found[-1][1]

    monkeypatch.setattr(os, "preadv", noted)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_spans_are_what_no_other_model_holds(tmp_path: Path, name: str) -> None:
    root, manifest = make_case(tmp_path, make_models(tmp_path / "models"), RANKS, VECTORS).exported()
    spans = private_spans(MappedModel.open(root / name))
    private = [t for t in manifest.models[name].tensors.values() if t.sharing == "private"]
    assert sum(span.end - span.start for span in spans) == sum(t.nbytes for t in private)
    assert {span.path for span in spans} == {root / name / t.file for t in private}
    assert len(spans) == len({span.path for span in spans})  # each file's data whole, in one piece
    assert all(span.end == span.path.stat().st_size for span in spans)


def test_what_is_read_in_another_model_is_none_of_them(tmp_path: Path) -> None:
    root, _ = make_aliased(tmp_path).exported()
    mapped = MappedModel.open(root / "bare")
    spans = private_spans(mapped)
    held = sum(t.nbytes for n, t in mapped.tensors.items() if n not in mapped.shared())
    assert sum(span.end - span.start for span in spans) == held
    assert {span.path.parent.name for span in spans} == {"bare"}


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), max_size=5), st.integers(1, 30))
def test_every_byte_of_every_span_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(bytes(range(200)))
    with pytest.MonkeyPatch.context() as patch:
        found: list[int] = []
        real = os.preadv
        patch.setattr(prefetch, "_CHUNK", chunk)
        patch.setattr(os, "preadv", lambda f, b, at: found.extend(range(at, at + (n := real(f, b, at)))) or n)
        with prefetching("m", [Span(path, start, start + size) for start, size in places]):
            pass
    assert sorted(found) == sorted(at for start, size in places for at in range(start, start + size))


def test_what_goes_wrong_meanwhile_ends_the_reading(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as f:
        f.truncate(1 << 33)
    with pytest.raises(KeyboardInterrupt), prefetching("m", [Span(path, 0, 1 << 33)]):
        raise KeyboardInterrupt
    assert sum(nbytes for _, nbytes in asked) < 1 << 32


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    spans = [Span(tmp_path / "gone", 0, 10)]
    with (
        pytest.raises(CheckpointError, match=r"model m file .*gone: cannot be read: No such file"),
        prefetching("m", spans),
    ):
        pass


def test_a_disk_that_fails_is_an_error_of_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(10))

    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(CheckpointError, match=r"file .*file: cannot be read: Input/output error"):  # noqa: SIM117
        with prefetching("m", [Span(tmp_path / "file", 0, 10)]):
            pass
