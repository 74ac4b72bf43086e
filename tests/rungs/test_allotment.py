"""Ranks by one number a model, and the boldest that a model can stand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.rungs.allotment import RULES, Candidate, distinct
from sandhi_core.rungs.ladder import boldest
from sandhi_core.rungs.residual import nbytes
from tests.rungs.test_residual import case

LEVELS = [2.0**n for n in range(-30, 30)]


@pytest.fixture(scope="module")
def candidates() -> dict[str, Candidate]:
    found = {f"t{seed}": case(seed)[2] for seed in (1, 20, 40)}
    return {name: Candidate(spectrum, (7, 6), 7 * 6 * 2) for name, spectrum in found.items()}


@pytest.mark.parametrize("rule", RULES)
def test_a_bolder_level_never_costs_more(rule: str, candidates: dict[str, Candidate]) -> None:
    ladder = distinct(RULES[rule], candidates, LEVELS)
    costs = [
        sum(nbytes((7, 6), ranks[n]) if n in ranks else c.nbytes for n, c in candidates.items()) for _, ranks in ladder
    ]
    assert costs == sorted(costs, reverse=True) and len(ladder) > 3
    assert ladder[0][1] == {} and ladder[-1][1] == dict.fromkeys(candidates, 0)
    assert len({str(ranks) for _, ranks in ladder}) == len(ladder)


@pytest.mark.parametrize("rule", RULES)
def test_a_slot_whose_residual_would_cost_more_than_its_matrix_stays_private(
    rule: str, candidates: dict[str, Candidate]
) -> None:
    for _, ranks in distinct(RULES[rule], candidates, LEVELS):
        assert all(nbytes((7, 6), rank) < 7 * 6 * 2 for rank in ranks.values())


def test_an_error_is_kept_by_every_slot(candidates: dict[str, Candidate]) -> None:
    for level in LEVELS:
        for name, rank in RULES["error"](candidates, level).items():
            spectrum = candidates[name].spectrum
            assert float(spectrum.squares[rank:].sum()) <= level * spectrum.whole


def test_a_price_keeps_what_is_worth_it_and_nothing_else(candidates: dict[str, Candidate]) -> None:
    for level in LEVELS:
        for name, rank in RULES["price"](candidates, level).items():
            spectrum, least = candidates[name].spectrum, level * nbytes((7, 6), 1) / 2**20
            assert rank == 0 or spectrum.gain(rank - 1) > least
            assert spectrum.gain(rank) <= least


@given(st.integers(0, 60), st.integers(0, 60))
def test_bisection_finds_the_boldest_that_holds(count: int, holding: int) -> None:
    asked: list[int] = []

    def stands(rung: int) -> bool:
        asked.append(rung)
        return rung < holding

    held = boldest(range(count), stands)
    assert held == sorted(held)
    assert (held[-1] if held else -1) == min(holding, count) - 1
    assert len(asked) <= count.bit_length() and len(set(asked)) == len(asked)
