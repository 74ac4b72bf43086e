import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.checkpoints.safetensors_file import PAGE, map_file
from sandhi_core.checkpoints.survey_files import SUFFIXES
from sandhi_core.layout import MANIFEST
from sandhi_core.memory import Holder, Span, accounts, mappings, shared_bytes, weight_files
from sandhi_core.memory import holder as held_by
from sandhi_core.records import ProcessMemory
from tests.models import WEIGHTS, tiny_llama

SIZE = {"hidden_size": 64, "intermediate_size": 256, "dtype": torch.float32, "tokenizer": False}


# --- from mappings to accounts ------------------------------------------------------------------------------


def holder(model: str, *files: tuple[str, int, float, int]) -> Holder:
    """Files as (name, rss, pss, private dirty), in pages; each file is ten pages long."""
    spans = tuple(
        (
            ("fe:00", ord(name)),
            Span(
                0, 1, "fe:00", ord(name), name, rss * PAGE, round(pss * PAGE), (rss - dirty) * PAGE, *[dirty * PAGE] * 2
            ),
        )
        for name, rss, pss, dirty in files
    )
    return Holder(model, 7, spans, {identity: 10 * PAGE for identity, _ in spans})


def pages(processes: tuple[ProcessMemory, ...]) -> list[tuple[int, float, int]]:
    return [(p.rss // PAGE, p.pss / PAGE, p.private_dirty // PAGE) for p in processes]


def test_what_only_these_processes_map_is_taken_from_the_kernel() -> None:
    found = accounts([holder("a", ("x", 8, 4, 0), ("y", 6, 6, 1)), holder("b", ("x", 8, 4, 0))])
    assert pages(found) == [(14, 10, 1), (8, 4, 0)]
    assert [p.unmapped for p in found] == [7, 7]
    assert [(p.shared // PAGE, p.private // PAGE) for p in found] == [(13, 1), (8, 0)]


def test_an_outsider_that_maps_a_file_too_takes_nothing_away() -> None:
    # three processes map x, one of them not ours: the kernel gives each a third of nine pages
    assert pages(accounts([holder("a", ("x", 9, 3, 0)), holder("b", ("x", 9, 3, 0))])) == [(9, 4.5, 0)] * 2
    assert pages(accounts([holder("a", ("x", 10, 5, 0))])) == [(10, 10, 0)]


def test_private_copies_of_pages_are_not_scaled_away() -> None:
    # each wrote to four of its ten pages: 3 shared each, 4 own each
    assert pages(accounts([holder("a", ("x", 10, 7, 4)), holder("b", ("x", 10, 7, 4))])) == [(10, 7, 4)] * 2


def test_a_file_mapped_twice_in_one_process_counts_once() -> None:
    # two mappings of one process: ten pages resident in each, the kernel halves them
    assert pages(accounts([holder("a", ("x", 10, 5, 0), ("x", 10, 5, 0))])) == [(20, 10, 0)]


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 10))
def test_the_sum_is_what_lies_in_memory_whoever_else_looks(ours: int, others: int, resident: int) -> None:
    share = resident / (ours + others)
    held = [holder(str(i), ("x", resident, 0, 0)) for i in range(ours)]
    held = [
        Holder(h.model, 0, tuple((i, s._replace(pss=round(share * PAGE))) for i, s in h.spans), h.sizes) for h in held
    ]
    assert sum(p.pss for p in accounts(held)) == pytest.approx(resident * PAGE, abs=ours)


# --- what processes share -----------------------------------------------------------------------------------

X = ("fe:00", ord("x"))


def test_shared_is_what_each_holds_less_what_all_take() -> None:
    # nine pages of data behind a page of header, in three processes
    held = [holder(model, ("x", 10, 10 / 3, 0), ("y", 5, 5, 0)) for model in "abc"]
    assert shared_bytes(held, {X: 9 * PAGE}) == (3 * 9 - 10) * PAGE


def test_a_file_that_holds_no_shared_tensor_is_not_shared() -> None:
    assert shared_bytes([holder("a", ("x", 10, 5, 0)), holder("b", ("x", 10, 5, 0))], {}) == 0


def test_copies_share_nothing() -> None:
    y = ("fe:00", ord("y"))
    assert shared_bytes([holder("a", ("x", 10, 10, 0)), holder("b", ("y", 10, 10, 0))], {X: PAGE, y: PAGE}) == 0


def test_pages_that_were_written_to_are_not_shared() -> None:
    held = [holder(model, ("x", 10, 7, 4)) for model in "ab"]
    assert shared_bytes(held, {X: 9 * PAGE}) == (2 * 9 - 14) * PAGE


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 10), st.integers(0, 9 * PAGE))
def test_never_more_is_shared_than_is_claimed(ours: int, others: int, resident: int, nbytes: int) -> None:
    held = [holder(str(i), ("x", resident, resident / (ours + others), 0)) for i in range(ours)]
    assert shared_bytes(held, {X: nbytes}) <= nbytes * (ours - 1) + ours


# --- reading /proc ------------------------------------------------------------------------------------------


def test_a_mapped_file_is_found_with_its_resident_pages(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", **SIZE)
    (directory / "link.safetensors").symlink_to(WEIGHTS)
    files = weight_files(directory)
    size = (directory / WEIGHTS).stat().st_size
    assert list(files.sizes.values()) == [size]
    entries = map_file(directory / WEIGHTS)
    for entry in entries.values():
        bytes(entry.raw)
    (span,) = [s for s in mappings(os.getpid()) if files.get(s)]
    assert span.path == str(directory / WEIGHTS)
    assert span.end - span.start == span.rss == -(-size // PAGE) * PAGE
    assert (span.private, span.shared) == (span.rss, 0)
    assert files.get(span._replace(device="00:00", inode=1)) == files.get(span)  # by path alone
    assert files.get(span._replace(path="/elsewhere")) == files.get(span)  # by inode alone
    assert files.get(span._replace(path="/elsewhere", inode=1)) is None


def test_a_process_that_ended_and_was_not_waited_for_holds_nothing_and_is_no_holder(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", **SIZE)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        assert list(mappings(pid)) == []  # and no error
        with pytest.raises(ProcessLookupError, match="has ended"):
            held_by("m", weight_files(directory), pid, 0)
    finally:
        os.waitpid(pid, 0)


def test_weight_files_are_those_of_either_kind_of_model(tmp_path: Path) -> None:
    names = ("model.safetensors", "private.sandhi")
    for number, name in enumerate((*names, "notes.txt", "sandhi.index.json")):
        (tmp_path / name).write_bytes(bytes(number + 1))
    files = weight_files(tmp_path)
    assert set(files.paths) == {str(tmp_path / name) for name in names}
    assert sorted(files.sizes.values()) == [1, 2]


def test_an_export_is_read_once_for_all_of_its_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / MANIFEST).touch()
    directories = [tmp_path / name for name in "abc"]
    for number, directory in enumerate(directories, 1):
        directory.mkdir()
        (directory / WEIGHTS).write_bytes(bytes(number))
    alone = weight_files(directories[0])
    read: list[str] = []
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: (read.append(pattern), glob(self, pattern))[1])
    assert weight_files(*directories) == alone and sorted(alone.sizes.values()) == [1, 2, 3]
    assert len(read) == len(set(read)) == len(SUFFIXES)


def test_directories_that_are_no_export_have_files_of_their_own(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(name.encode())
    files = weight_files(tmp_path / "a", tmp_path / "b")
    assert set(files.paths) == {str(tmp_path / name / WEIGHTS) for name in "ab"}
