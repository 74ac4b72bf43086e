"""Ranks by one price a model: cheaper assignments as it rises, and none that is better for its bytes."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.rungs.allotment import PRICES, Bid, Candidate, Ranks, by_price, distinct, nbytes

SHAPE = (7, 6)
MATRIX = 7 * 6 * 4  # bytes

squares = st.lists(st.floats(0.0, 4.0), min_size=6, max_size=6).map(lambda v: np.array(sorted(v, reverse=True)))
candidates = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.builds(
        Candidate,
        squares,
        st.just(SHAPE),
        st.sampled_from([MATRIX / 2, float(MATRIX)]),
        st.sampled_from([0, 3, 6]),
        st.none() | squares,
    ),
    min_size=1,
)


def error(of: dict[str, Candidate], ranks: Ranks) -> float:
    return sum(left(of[name], bid) for name, bid in ranks.items())


def left(candidate: Candidate, bid: Bid) -> float:
    found = candidate.affine if bid.affine else candidate.squares
    assert found is not None
    return float(found[bid.rank :].sum())


def spent(of: dict[str, Candidate], ranks: Ranks) -> float:
    """Bytes that the pool holds more than if all slots shared without residuals."""
    return sum(nbytes(SHAPE, *ranks[n]) if n in ranks else c.spared for n, c in of.items())


@given(candidates)
def test_a_higher_price_never_costs_more_bytes_and_only_adds_slots(of: dict[str, Candidate]) -> None:
    rungs = [ranks for _, ranks in distinct(of, PRICES)]
    for safe, bold in pairwise(rungs):
        assert spent(of, bold) <= spent(of, safe) and error(of, bold) >= error(of, safe) - 1e-12
        assert safe.keys() <= bold.keys()
        assert all(nbytes(SHAPE, *bold[name]) <= nbytes(SHAPE, *bid) for name, bid in safe.items())
        assert safe != bold
    assert all(rungs)
    assert all(bid.rank <= of[name].limit for ranks in rungs for name, bid in ranks.items())


def bids(candidate: Candidate) -> list[Bid]:
    kinds = (False,) if candidate.affine is None else (False, True)
    return [Bid(rank, affine) for rank in range(candidate.limit + 1) for affine in kinds]


@given(candidates, st.sampled_from([2.0**n for n in range(-4, 20)]))
def test_no_other_assignment_is_cheaper_at_the_price(of: dict[str, Candidate], price: float) -> None:
    def cost(ranks: Ranks) -> float:
        return error(of, ranks) + price * spent(of, ranks) / 2**20

    found = cost(by_price(of, price))
    for choice in product(*([None, *bids(candidate)] for candidate in of.values())):
        other = {name: bid for name, bid in zip(of, choice, strict=True) if bid is not None}
        assert found <= cost(other) + 1e-9


def test_what_costs_more_than_it_spares_stays_private() -> None:
    expensive = Candidate(np.array([4.0, 3.0, 2.0, 1.0, 1.0, 1.0]), SHAPE, spared=float(MATRIX), limit=6)
    for _, ranks in distinct({"w": expensive}, PRICES):
        assert nbytes(SHAPE, *ranks["w"]) < MATRIX


def test_equal_matrices_are_shared_at_any_price() -> None:
    assert distinct({"w": Candidate(np.zeros(6), SHAPE, 1.0, 6)}, PRICES) == [(PRICES[0], {"w": Bid(0)})]


def test_a_slot_that_spares_nothing_is_never_shared() -> None:
    assert distinct({"w": Candidate(np.ones(6), SHAPE, 0.0, 6)}, PRICES) == []


@pytest.mark.parametrize("rank", [0, 3])
def test_a_residual_takes_two_bytes_an_element(rank: int) -> None:
    assert nbytes((100, 50), rank) == rank * 150 * 2
    assert nbytes((100, 50), rank, affine=True) == rank * 150 * 2 + 100 * 2 * 2


def test_vectors_are_bought_where_they_take_off_more_than_a_direction_of_as_many_bytes() -> None:
    plain = np.array([0.02, 0.01, 0.005, 0.005, 0.005, 0.005])
    scaled = np.array([0.005, 0.0, 0.0, 0.0, 0.0, 0.0])
    both = Candidate(plain, SHAPE, float(MATRIX), 6, scaled)
    assert [ranks["w"] for _, ranks in distinct({"w": both}, PRICES)] == [Bid(1, True), Bid(0, True), Bid(0)]
    useless = Candidate(plain, SHAPE, float(MATRIX), 6, plain)
    without = Candidate(plain, SHAPE, float(MATRIX), 6)
    assert distinct({"w": useless}, PRICES) == distinct({"w": without}, PRICES)
