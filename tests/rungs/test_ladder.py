"""The boldest rung that holds, with safer ones before it, in few scores; and the trajectory that is made of them."""

import math
from collections.abc import Mapping
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.cutoffs import cutoff_set
from sandhi_core.records import Adjustment, Evaluation, Plan, PlannedMerge, PlannedStep, Recipe, TaskResult
from sandhi_core.rungs.allotment import PRICES, Bid, Ranks
from sandhi_core.rungs.ladder import COARSE, FILLED, FINE, MARGINS, MOST_SCORES, SAFER, climb, ladder


@given(st.lists(st.integers(0, 60), min_size=len(MARGINS), max_size=len(MARGINS)).map(sorted), st.integers(0, 60))
def test_every_margin_ends_at_the_boldest_that_holds(limits: list[int], count: int) -> None:
    """`limits`: how many rungs hold with each margin, the largest margin first."""
    holding = dict(zip(MARGINS, limits, strict=True))
    scored = climb(count, lambda at: at, lambda at, margin: at < holding[margin])
    for margin, limit in holding.items():
        boldest, near = min(limit, count) - 1, COARSE if margin else 1
        held = max((at for at in scored if at <= boldest), default=-1)
        assert boldest - held < near
        assert held + near >= count or any(boldest < at <= held + near for at in scored)  # known not to hold
    assert len(scored) <= len(MARGINS) * count.bit_length() + count // FINE + 1 + SAFER


@given(st.lists(st.integers(0, 60), min_size=len(MARGINS), max_size=len(MARGINS)).map(sorted))
def test_the_holdout_starts_far_below_the_border_and_goes_in_small_strides(limits: list[int]) -> None:
    holding = dict(zip(MARGINS, limits, strict=True))
    scored = climb(60, lambda at: at, lambda at, margin: at < holding[margin])
    bold = max(limits) - 1
    safe = min((limit for limit in limits[:-1] if limit > COARSE), default=bold + 1) - 1
    held = sorted(at for at in scored if at <= bold)
    lowest = max(0, min((limit for limit in limits if limit), default=0) - COARSE)  # that may hold with some margin
    apart = max(FINE, math.ceil((bold - lowest) / FILLED))
    assert all(after - before <= apart for before, after in pairwise(at for at in held if at >= safe))
    assert all(after - before <= COARSE << SAFER - 1 for before, after in pairwise(held))
    assert not held or held[0] <= max(0, safe - 12)


@given(st.lists(st.floats(0.0, 4.0), max_size=60))
def test_whatever_holds_nothing_is_scored_twice(room: list[float]) -> None:
    """`room`: the margin that a rung still holds with, bolder ones not always less."""
    asked: list[int] = []
    scored = climb(len(room), lambda at: asked.append(at) or at, lambda at, margin: room[at] >= margin + 0.5)
    assert len(set(asked)) == len(asked) == len(scored) <= len(MARGINS) + len(room).bit_length() * 2
    held = [at for at in scored if room[at] >= 0.5]
    if room and not held:
        assert 0 in scored


limits_of_all = st.lists(st.integers(0, len(PRICES)), min_size=len(MARGINS), max_size=len(MARGINS)).map(sorted)


@given(limits_of_all)
@example([6, 6, 6, 125])  # FINE apart, some sixty would lie between margins that end so far apart
@example([0, 60, 70, 95])
def test_no_ladder_takes_more_scores_than_is_foretold(limits: list[int]) -> None:
    holding = dict(zip(MARGINS, limits, strict=True))
    assert len(climb(len(PRICES), lambda at: at, lambda at, margin: at < holding[margin])) <= MOST_SCORES


def test_margins_near_each_other_take_26_scores_at_most() -> None:
    most = 0
    for border, *gaps in product(range(len(PRICES) + 1), *[(0, 3, 8)] * 3):
        limits = [border - sum(gaps[at:]) for at in range(4)]
        holding = dict(zip(MARGINS, limits, strict=True))
        scored = climb(len(PRICES), lambda at: at, lambda at, margin, holding=holding: at < holding[margin])  # type: ignore[misc]
        most = max(most, len(scored))
    assert most <= 26


def test_one_border_takes_no_more_than_a_bisection_and_the_safer_rungs() -> None:
    scored = climb(100, lambda at: at, lambda at, margin: at < 70)
    assert max(at for at in scored if at < 70) == 69 and len(scored) <= 7 + SAFER


QUESTIONS = 400
RECIPE = Recipe(projection="q", shape=(4, 4), dtype="F32", method="mean", rescale="none", contributors=())


def plan(names: str) -> Plan:
    merges = tuple(PlannedMerge(tensor=n, projection="q", nbytes=64, recipe=RECIPE) for n in names)
    return Plan(pool="p", model="m", fingerprint="f", steps=(PlannedStep(component="attn", layer=0, merges=merges),))


def answers(wrong: int, better: int = 0) -> Evaluation:
    """Of the questions 300 were right; now `wrong` of these are wrong, and `better` of the others right."""
    values = (0.0,) * wrong + (1.0,) * (300 - wrong + better) + (0.0,) * (100 - better)
    result = TaskResult(value=sum(values) / QUESTIONS, higher_is_better=True, questions=values)
    return Evaluation(weights=f"{wrong} {better}", context="c", split="search", tasks={"t": result})


def assigned(ranks: Ranks) -> Assignment:
    def adjustment(name: str, rank: int) -> Adjustment:
        return Adjustment(kind="low_rank", nbytes=16 * rank, rank=rank, down=f"d{name}{rank}", up=f"u{name}{rank}")

    corrected = {name: adjustment(name, rank) for name, (rank, _) in ranks.items() if rank}
    return Assignment({name: f"shared {name}" for name in ranks}, corrected)


RANKS: list[Ranks] = [
    {name: Bid(rank) for name, rank in ranks.items()}
    for ranks in ({"a": 3}, {"a": 2, "b": 2}, {"a": 0, "b": 1}, {"a": 0, "b": 0})
]
RUNGS = list(zip((0.1, 0.2, 0.4, 0.8), RANKS, strict=True))


def found(wrong: Mapping[int, int], tolerance: float = 0.02) -> tuple[list[float | None], list[str]]:
    numbers = {str(assigned(ranks)): n for n, (_, ranks) in enumerate(RUNGS)}
    walk = ladder(
        plan("ab"), {"t": tolerance}, answers(0), RUNGS, assigned, lambda held: answers(wrong[numbers[str(held)]])
    )
    return [step.price for step in walk.steps], [step.decision for step in walk.steps]


def test_steps_go_from_safe_to_bold_and_each_is_a_whole_assignment() -> None:
    wrong = {0: 0, 1: 1, 2: 8, 3: 50}
    numbers = {str(assigned(ranks)): n for n, (_, ranks) in enumerate(RUNGS)}
    walk = ladder(plan("ab"), {"t": 0.02}, answers(0), RUNGS, assigned, lambda held: answers(wrong[numbers[str(held)]]))
    assert [(s.price, s.decision) for s in walk.steps] == [
        (0.1, "accepted"),  # one of the safer
        (0.2, "accepted"),  # holds with every margin
        (0.4, "accepted"),  # 8 of 400 are the tolerance itself: holds with none
        (0.8, "rejected"),
    ]
    assert assignment_at(walk, 2) == assigned(RUNGS[1][1]) and assignment_at(walk, 2).overhead == 64
    assert assignment_at(walk, 3) == assigned(RUNGS[2][1]) and assignment_at(walk, 3).overhead == 16
    assert assignment_at(walk, 4) == assignment_at(walk, 3)
    assert walk.evaluations == 4 and walk.tolerance == {"t": 0.02}
    cutoffs = cutoff_set(walk, plan("ab"), {"t": 0.02})
    assert [(c.steps, c.freed) for c in cutoffs.cutoffs] == [(0, 0), (1, 64 - 48), (2, 128 - 64), (3, 128 - 16)]
    assert cutoffs.deepest == 3


def test_the_margin_is_of_the_paired_change() -> None:
    """As many answers got better as worse: no drop, but one that varies."""
    rungs: list[tuple[float, Ranks]] = [(float(n), {"a": Bid(40 - n)}) for n in range(32)]
    quiet = ladder(plan("ab"), {"t": 0.02}, answers(0), rungs, assigned, lambda held: answers(0))
    loud = ladder(plan("ab"), {"t": 0.02}, answers(0), rungs, assigned, lambda held: answers(60, 60))
    assert [s.price for s in quiet.steps] == [0, 15, 23, 27, 29, 30, 31]  # the largest margin already ends at the top
    assert [s.price for s in loud.steps] == [3, 7, 15, 23, 27, 29, 30, 31]
    assert quiet.steps[-1].price == loud.steps[-1].price == 31.0
    assert {s.decision for s in (*quiet.steps, *loud.steps)} == {"accepted"}


@pytest.mark.parametrize("wrong", [300, 9])
def test_nothing_that_holds_leaves_the_original(wrong: int) -> None:
    prices, decisions = found(dict.fromkeys(range(4), wrong))
    assert set(decisions) == {"rejected"} and prices[0] == 0.1


def test_no_rungs_no_steps() -> None:
    walk = ladder(plan("ab"), {"t": 0.02}, answers(0), [], assigned, lambda held: answers(0))
    assert walk.steps == () and walk.evaluations == 0


def test_nan_never_holds() -> None:
    nan = float("nan")
    broken = Evaluation(
        weights="w", context="c", split="search",
        tasks={"t": TaskResult(value=nan, higher_is_better=True, questions=(nan,) * QUESTIONS)},
    )  # fmt: skip
    walk = ladder(plan("ab"), {"t": 0.02}, answers(0), RUNGS, assigned, lambda held: broken)
    assert {(s.decision, str(s.scores)) for s in walk.steps} == {("rejected", "{}")}
