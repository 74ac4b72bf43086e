"""Families are told from the means of rows: fine-tunes of one base together, everything else apart."""

import zlib
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.grouping.form import NO_KIN
from sandhi_core.grouping.groups import make_groups
from sandhi_core.grouping.kinship import STRANGERS, families
from sandhi_core.moments import RowStatistics
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Groups
from tests.synthetic import fingerprint, profile

ROWS = 64


def rows_of(bases: dict[str, int], moved: float) -> Callable[[Fingerprint, str], RowStatistics]:
    """Row means of models by the number of their base, each moved by so much of the base's spread."""

    def drawn(*names: object) -> torch.Tensor:
        return torch.randn(ROWS, generator=torch.Generator().manual_seed(zlib.crc32(repr(names).encode())))

    def rows(found: Fingerprint, tensor: str) -> RowStatistics:
        mean = drawn(bases[found.model], tensor) + moved * drawn(found.model, tensor, "own") + 3.0
        return RowStatistics(mean, torch.ones(ROWS))

    return rows


@pytest.mark.parametrize("moved", [0.0, 0.05, 0.5])
def test_fine_tunes_of_one_base_are_kin_and_others_are_not(moved: float) -> None:
    bases = {"a": 1, "b": 2, "c": 1, "d": 2, "e": 1, "lone": 3, "alone": 4}
    prints = {name: fingerprint(name, 4) for name in bases}
    found = families(prints, rows_of(bases, moved))
    assert found == {"a": "a", "c": "a", "e": "a", "b": "b", "d": "b", "lone": STRANGERS, "alone": STRANGERS}


def test_models_without_a_matrix_in_common_are_strangers() -> None:
    prints = {"a": fingerprint("a", 4), "b": fingerprint("b", 4, width="wide")}
    assert families(prints, rows_of({"a": 1, "b": 1}, 0.0)) == {"a": STRANGERS, "b": STRANGERS}


def test_a_shallower_kin_is_told_from_the_layers_it_has() -> None:
    prints = {"a": fingerprint("a", 6), "b": fingerprint("b", 2), "c": fingerprint("c", 6)}
    assert families(prints, rows_of({"a": 1, "b": 1, "c": 2}, 0.1)) == {"a": "a", "b": "a", "c": STRANGERS}


def test_rows_that_are_all_alike_say_nothing() -> None:
    prints = {"a": fingerprint("a", 2), "b": fingerprint("b", 2)}
    flat = RowStatistics(torch.ones(ROWS), torch.ones(ROWS))
    assert families(prints, lambda found, tensor: flat) == {"a": STRANGERS, "b": STRANGERS}


@settings(max_examples=20)
@given(st.permutations(["a", "b", "c", "d"]))
def test_the_order_of_models_does_not_matter(order: list[str]) -> None:
    bases = {"a": 1, "b": 2, "c": 1, "d": 2}
    found = families({name: fingerprint(name, 2) for name in order}, rows_of(bases, 0.1))
    assert found == {"a": "a", "c": "a", "b": "b", "d": "b"}


FAMILIES = {"a": "a", "b": "a", "x": "x", "y": "x", "lone": STRANGERS}


def grouped(*models: str, earlier: Groups | None = None) -> Groups:
    prints = {m: fingerprint(m, 2) for m in models}
    known = {m: profile(m, 2) for m in models}
    merging = MergingSettings()
    return make_groups("p", "p.g", prints, known, GroupingSettings(), merging, 0.05, earlier, FAMILIES)


def members(record: Groups) -> set[tuple[str, ...]]:
    return {tuple(slot.model for slot in group.members) for group in record.groups}


def test_wide_groups_hold_one_family_each() -> None:
    record = grouped(*FAMILIES)
    assert members(record) == {("a", "b"), ("x", "y")}
    assert {(e.model, e.reason) for e in record.excluded} == {("lone", NO_KIN)}


@pytest.mark.parametrize("order", list(permutations(["b", "y"])))
def test_a_model_joins_its_family(order: tuple[str, str]) -> None:
    first = grouped("a", order[0], "x") if order[0] == "b" else grouped("a", "x", order[0])
    joined = grouped("a", "x", *order, earlier=first)
    if order[0] == "b":
        assert members(first) == {("a", "b")}
        assert members(joined) == {("a", "b"), ("x", "y")}
    else:
        assert members(first) == {("x", "y")}
        assert members(joined) == {("a", "b"), ("x", "y")}


def test_a_stranger_that_comes_later_joins_nobody() -> None:
    joined = grouped("a", "b", "lone", earlier=grouped("a", "b"))
    assert members(joined) == {("a", "b")}
    assert {(e.model, e.reason) for e in joined.excluded} == {("lone", NO_KIN)}


def test_groups_of_an_earlier_build_keep_the_family_that_most_are_of() -> None:
    """Formed before families were told apart, or a checkpoint replaced by one of another base."""
    models = ("a", "b", "c", "x", "y")
    prints = {m: fingerprint(m, 2) for m in models}
    known = {m: profile(m, 2) for m in models}

    def made(families: dict[str, str], earlier: Groups | None) -> Groups:
        settings = GroupingSettings(), MergingSettings()
        return make_groups("p", "p.g", prints, known, *settings, 0.05, earlier, families)

    mixed = made({}, None)
    assert members(mixed) == {models}
    parted = made({"a": "a", "b": "a", "c": "a", "x": "x", "y": "x"}, mixed)
    assert members(parted) == {("a", "b", "c"), ("x", "y")}
    assert {tuple(c.model for c in g.recipe.contributors) for g in parted.groups} == members(parted)
    replaced = made({"a": "a", "b": "a", "c": STRANGERS, "x": "x", "y": "x"}, parted)
    assert members(replaced) == {("a", "b"), ("x", "y")}
