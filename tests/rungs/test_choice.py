"""Which of several tensors a group shares, from spectra that are made up and from matrices of known kind."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandhi_core.merging import merge
from sandhi_core.records import Contributor, Method, Recipe, Slot
from sandhi_core.rungs.allotment import PRICES, Candidate, bid, by_price, nbytes
from sandhi_core.rungs.choice import Evidence, choose, costs, useful
from sandhi_core.rungs.grams import Gram, GramSum
from sandhi_core.rungs.residual import spectrum, weighting

ROWS, WIDTH = 24, 16


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slot(model: str) -> Slot:
    return Slot(
        model=model,
        layer=0,
        projection="up",
        component="mlp",
        tensor="up",
        digest=model,
        nbytes=4 * ROWS * WIDTH,
        key="",
    )


def recipe(method: Method, models: Sequence[str], payers: Sequence[str] = ()) -> Recipe:
    return Recipe(
        projection="up",
        shape=(ROWS, WIDTH),
        dtype="F32",
        method=method,
        rescale="none",
        contributors=tuple(Contributor(model=m, layer=0, tensor="up", digest=m) for m in models),
        payers=tuple(payers),
    )


class Pool:
    """Matrices by model (and `base`), each model with inputs of its own. A slot bids as Offers would have it."""

    def __init__(self, matrices: Mapping[str, Tensor], limit: int = 99, alike: bool = False) -> None:
        self.matrices = matrices
        self.models = sorted(set(matrices) - {"base"})
        self.grams = {m: self._gram(0 if alike else n) for n, m in enumerate(self.models)}
        self.limit = limit
        self.rejected: list[tuple[str, Method]] = []

    @staticmethod
    def _gram(seed: int) -> Gram:
        found = GramSum(WIDTH)
        found.add(drawn(400, WIDTH, seed=900 + seed) * (1.0 + 8.0 * drawn(WIDTH, seed=700 + seed).abs()))
        return found.mean()

    def candidate(self, one: Slot, of: Recipe) -> Candidate:
        models = [c.model for c in of.contributors]
        grams = [self.grams[m] for m in models] if of.method == "regmean" else None
        shared = merge(of, [self.matrices[m] for m in models], None, grams)
        squares = spectrum(self.matrices[one.model], shared, weighting(self.grams[one.model])).squares.numpy()
        payers = of.payers or models
        part = (len(payers) - 1) / len(payers) if one.model in payers else 1.0
        return Candidate(squares, (ROWS, WIDTH), one.nbytes * part, self.limit)

    def average(self, method: Method, left: Sequence[Slot]) -> Recipe:
        return recipe(method, [s.model for s in left])

    def chosen(self, *methods: Method, reform: bool = False) -> tuple[Recipe, Mapping[Method, float]]:
        proposed: dict[Method, Recipe] = {
            "mean": recipe("mean", self.models),
            "regmean": recipe("regmean", self.models),
            "member": recipe("member", self.models[:1]),
            "base": recipe("base", ["base"], self.models),
        }
        evidence = Evidence(self.candidate, lambda s, r: self.rejected.append((s.model, r.method)))
        members = [slot(m) for m in self.models]
        found = choose(members, {m: proposed[m] for m in methods}, evidence, self.average if reform else None)
        return found.recipe, found.compared


def fine_tunes(rank: int | None, count: int = 3, moved: float = 0.1, seed: int = 0) -> dict[str, Tensor]:
    """A base, and `count` models that differ from it by that rank (None: every element by itself)."""
    base = drawn(ROWS, WIDTH, seed=seed)
    found = {"base": base}
    for n in range(count):
        step = drawn(ROWS, WIDTH, seed=seed + 10 * n + 1)
        if rank is not None:
            step = drawn(ROWS, rank, seed=seed + 10 * n + 1) @ drawn(rank, WIDTH, seed=seed + 10 * n + 2)
        found["abcdefgh"[n]] = base + moved * step
    return found


@settings(max_examples=15)
@given(rank=st.integers(1, 3), seed=st.integers(0, 1000))
def test_differences_of_low_rank_from_a_base_are_told_from_it(rank: int, seed: int) -> None:
    taken, compared = Pool(fine_tunes(rank, seed=seed)).chosen("mean", "regmean", "member", "base")
    assert taken.method == "base" and compared["base"] < min(v for m, v in compared.items() if m != "base")


def test_without_residuals_an_average_is_nearer_than_the_base() -> None:
    pool = Pool(fine_tunes(rank=None), limit=0)
    assert pool.chosen("base", "mean")[0].method == "mean"


def test_models_with_prompts_of_their_own_are_better_served_by_regmean() -> None:
    taken, compared = Pool(fine_tunes(rank=None), limit=0).chosen("mean", "member", "base", "regmean")
    assert taken.method == "regmean" and set(compared) == {"mean", "member", "base", "regmean"}


def test_of_equally_cheap_methods_the_first_is_taken_and_the_others_are_told() -> None:
    same = {name: drawn(ROWS, WIDTH, seed=1) for name in ("a", "b", "base")}
    for order in (("mean", "base"), ("base", "mean")):
        pool = Pool(same, alike=True)
        assert pool.chosen(*order)[0].method == order[0]
        assert pool.rejected == [("a", order[1]), ("b", order[1])]


def made_up(*squares: float, spared: float = 1024.0, limit: int = 16) -> Candidate:
    return Candidate(np.array([*squares, *[0.0] * (16 - len(squares))]), (ROWS, WIDTH), spared, limit)


TWO_DIRECTIONS = [made_up(5e-8, 5e-8, *[1e-10] * 14)] * 3
"""Far from the shared tensor, in few directions: two of them and the slots are held almost exactly."""

EVERY_DIRECTION = [made_up(*[2e-9] * 16)] * 3
"""Nearer, by a little in every direction, so that a residual pays for nothing."""


def test_where_methods_cross_that_is_taken_which_is_cheaper_while_residuals_pay() -> None:
    by_method = {"mean": EVERY_DIRECTION, "base": TWO_DIRECTIONS}
    members = [slot(m) for m in "abc"]
    at = {(m, method): c for method, cs in by_method.items() for m, c in zip("abc", cs, strict=True)}
    evidence = Evidence(lambda s, r: at[s.model, r.method])
    proposed: dict[Method, Recipe] = {"mean": recipe("mean", "abc"), "base": recipe("base", ["base"], "abc")}
    # At rank 0, and so over all prices, the mean is cheaper.
    assert EVERY_DIRECTION[0].squares.sum() < TWO_DIRECTIONS[0].squares.sum()
    assert costs(EVERY_DIRECTION)[0] < costs(TWO_DIRECTIONS)[0]
    for order in (proposed, dict(reversed(proposed.items()))):
        found = choose(members, order, evidence)
        assert found.recipe.method == "base" and found.compared["base"] < found.compared["mean"]


def test_slots_that_may_not_keep_their_own_bid_without_it() -> None:
    """One member is far from the mean: it would keep its own matrix, and as an adapter it cannot."""
    by_method = {"mean": [made_up(1.0, limit=0), *[made_up(limit=0)] * 2], "base": [made_up(0.1, limit=0)] * 3}
    at = {(m, method): c for method, cs in by_method.items() for m, c in zip("abc", cs, strict=True)}
    proposed: dict[Method, Recipe] = {"mean": recipe("mean", "abc"), "base": recipe("base", ["base"], "abc")}
    for own, method in ((True, "mean"), (False, "base")):
        evidence = Evidence(lambda s, r: at[s.model, r.method], own=own)
        assert choose([slot(m) for m in "abc"], proposed, evidence).recipe.method == method


def test_prices_are_useful_where_half_to_nine_tenths_are_spared_by_some_method() -> None:
    def part(price: float) -> float:
        shared = by_price(dict(zip("abc", TWO_DIRECTIONS, strict=True)), price)
        return sum(1024.0 - nbytes((ROWS, WIDTH), *added) for added in shared.values()) / (3 * 1024.0)

    parts = {price: part(price) for price in PRICES}
    within = tuple(price for price in PRICES if 0.5 <= parts[price] <= 0.9)
    assert useful([TWO_DIRECTIONS]) == useful([EVERY_DIRECTION, TWO_DIRECTIONS]) == within
    assert 0 < len(within) < len(PRICES) and parts[within[-1]] < parts[PRICES[-1]] == 1.0


@pytest.mark.parametrize("candidates", [EVERY_DIRECTION, [made_up(1.0, limit=0)] * 2, [made_up(spared=0.0)]])
def test_where_a_group_spares_all_or_hardly_anything_every_price_counts(candidates: list[Candidate]) -> None:
    assert useful([candidates]) == PRICES


def test_the_owner_of_what_is_shared_pays_nothing() -> None:
    pool = Pool(fine_tunes(rank=2))
    owner = pool.candidate(slot("a"), recipe("member", ["a"]))
    assert all(bid(owner, price) == (0.0, None) for price in PRICES)


def test_who_makes_most_of_the_cost_is_left_out_and_bids_for_what_is_left() -> None:
    matrices = fine_tunes(rank=None, count=4, moved=0.02)
    matrices["d"] = drawn(ROWS, WIDTH, seed=77)
    pool = Pool(matrices, limit=4, alike=True)
    plain, before = pool.chosen("mean")
    taken, compared = pool.chosen("mean", reform=True)
    assert [c.model for c in plain.contributors] == list("abcd")
    assert [c.model for c in taken.contributors] == list("abc")
    assert compared["mean"] < before["mean"]
    assert set(pool.rejected) == {(m, "mean") for m in "abcd"}


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), count=st.integers(2, 5))
def test_re_forming_never_costs_more_and_leaves_two(seed: int, count: int) -> None:
    pool = Pool(fine_tunes(rank=None, count=count, moved=0.3, seed=seed))
    _, before = pool.chosen("mean")
    taken, after = pool.chosen("mean", reform=True)
    assert after["mean"] <= before["mean"] and len(taken.contributors) >= 2


def test_a_base_or_member_has_nobody_to_leave_out() -> None:
    pool = Pool(fine_tunes(rank=1))
    assert pool.chosen("base", "mean", reform=True) == pool.chosen("base", "mean")


@given(st.lists(st.lists(st.floats(1e-9, 10), min_size=1, max_size=6), min_size=1, max_size=4))
def test_costs_are_finite_and_their_parts_add_up(squares: list[list[float]]) -> None:
    cost, parts = costs([Candidate(np.array(sorted(s, reverse=True)), (8, 6), 96.0, 3) for s in squares])
    assert np.isfinite(cost) and parts.sum() == pytest.approx(1.0)


def test_outputs_of_nought_and_equal_matrices_have_a_cost_too() -> None:
    for squares in ([np.inf, 0.0], [0.0, 0.0]):
        assert np.isfinite(costs([Candidate(np.array(squares), (8, 6), 96.0, 1)])[0])
