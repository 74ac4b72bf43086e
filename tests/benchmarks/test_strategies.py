"""The other numbers that could decide about a model's slots give ladders too: from safe to bold, each rung once."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.ladders import _cell
from benchmarks.strategies import BY_NOISE, WAYS, Model, by_answers, by_noise, one_error, one_rank
from sandhi_core.rungs.allotment import PRICES, Bid, Candidate, distinct, nbytes

SHAPE, MATRIX = (64, 64), 64 * 64 * 4


def falling(first: float) -> Any:
    return first * 0.5 ** np.arange(64)


def model(**drops: float) -> Model:
    """Two slots, one in each component of a layer; the second's difference is a tenth of the first's."""
    candidates = {
        "a": Candidate(falling(0.5), SHAPE, MATRIX / 2, 40),
        "b": Candidate(falling(0.05), SHAPE, MATRIX / 2, 40),
    }
    slots = [SimpleNamespace(tensor=t, component=c, layer=0) for t, c in (("a", "attn"), ("b", "mlp"))]
    noise = [SimpleNamespace(component=c, layer=0, drop=drop) for c, drop in drops.items()]
    found: Any = SimpleNamespace(
        candidates=candidates,
        importance={"a": 1.0, "b": 20.0}.__getitem__,
        fingerprint=SimpleNamespace(slots=slots),
        profile=SimpleNamespace(sensitivities=noise),
    )
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", [way for way in WAYS if way != BY_NOISE])
def test_every_way_goes_from_safe_to_bold(way: str) -> None:
    of = model()
    rungs = WAYS[way](of)
    held = [
        sum((nbytes(SHAPE, ranks[n].rank) if n in ranks else c.spared) for n, c in of.candidates.items())
        for _, ranks in rungs
    ]
    assert all(after < before for before, after in pairwise(held)) and held[-1] < MATRIX
    assert all(ranks for _, ranks in rungs)


def test_one_rank_is_the_same_everywhere_and_never_costs_more_than_it_spares() -> None:
    rungs = one_rank(model())
    assert [set(ranks.values()) for _, ranks in rungs] == [{Bid(rank)} for rank in range(31, -1, -1)]
    assert nbytes(SHAPE, 32) == MATRIX / 2


def test_one_error_gives_each_slot_the_rank_that_keeps_it() -> None:
    of = model()
    for limit, ranks in one_error(of):
        for name, bid in ranks.items():
            squares = of.candidates[name].squares
            assert squares[bid.rank :].sum() <= limit < squares[bid.rank - 1 :].sum() or bid.rank == 0


def test_weights_move_ranks_to_where_errors_count() -> None:
    assert by_noise(model(attn=0.2, mlp=0.2)) == distinct(model().candidates, PRICES)
    for rungs in (by_noise(model(attn=0.0, mlp=1.0)), by_answers(model())):
        for _, ranks in rungs:
            assert ranks.get("a", Bid(64)).rank <= ranks.get("b", Bid(64)).rank


def test_a_cell_says_how_many_share() -> None:
    assert _cell([2, 4], 5) == "3.0 (2/5)" and _cell([], 5) == "- (0/5)"
