"""Intervals: against published values, against simulation, and at the edges where textbook intervals fail."""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sandhi_core.errors import EvaluationError
from sandhi_core.statistics import paired_interval, tango_limit

Z90, Z95 = float(stats.norm.ppf(0.95)), float(stats.norm.ppf(0.975))


@pytest.mark.parametrize(
    ("gained", "lost", "n", "z", "low", "high"),
    [
        # Bentur et al. (2009), in Fagerland, Lydersen, Laake: Analysis of Contingency Tables, chapter 8.
        (1, 7, 21, Z95, -0.517, -0.026),
        # R: PropCIs::scoreci.mp(25, 28, 618, 0.90).
        (28, 25, 618, Z90, -0.0148, 0.0247),
        # R: PropCIs::scoreci.mp, 48 and 41 of 549 discordant, 90 %.
        (48, 41, 549, Z90, -0.0157, 0.0414),
    ],
)
def test_tangos_interval_is_the_published_one(
    gained: int, lost: int, n: int, z: float, low: float, high: float
) -> None:
    digits = 3 if n == 21 else 4
    assert round(tango_limit(gained, lost, n, z), digits) == low
    assert round(-tango_limit(lost, gained, n, z), digits) == high


@settings(deadline=None)
@given(n=st.integers(2, 2000), z=st.floats(0.5, 4.0))
def test_no_pair_that_differs_still_leaves_doubt(n: int, z: float) -> None:
    """The score equation has the closed solution z^2 / (n + z^2) there."""
    assert tango_limit(0, 0, n, z) == pytest.approx(-(z**2) / (n + z**2), rel=1e-6)


@settings(deadline=None)
@given(n=st.integers(2, 2000))
def test_all_pairs_differing_one_way(n: int) -> None:
    assert tango_limit(n, 0, n, Z95) == pytest.approx((n - Z95**2) / (n + Z95**2), abs=1e-9)
    assert tango_limit(0, n, n, Z95) == -1.0


@settings(deadline=None)
@given(st.data())
def test_tangos_limit_solves_the_score_equation(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 500))
    gained = data.draw(st.integers(0, n))
    lost = data.draw(st.integers(0, n - gained))
    low, estimate = tango_limit(gained, lost, n, Z95), (gained - lost) / n
    assert -1.0 <= low <= estimate
    if low > -1.0:
        # The likelihood given the difference, maximised on a grid instead of by the quadratic.
        grid = np.linspace(max(0.0, -low), (1.0 - low) / 2, 20_001)[1:-1]
        with np.errstate(divide="ignore"):
            likelihood = (
                (gained * np.log(grid + low) if gained else 0.0)
                + (lost * np.log(grid) if lost else 0.0)
                + ((n - gained - lost) * np.log1p(-2 * grid - low) if n > gained + lost else 0.0)
            )
        q = float(grid[int(np.argmax(likelihood))])
        score = (gained - lost - n * low) / math.sqrt(n * (2 * q + low * (1 - low)))
        assert score == pytest.approx(Z95, abs=0.02)


ANSWERS = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=2, max_size=60)
VALUES = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=60)


@settings(deadline=None)
@given(ANSWERS | VALUES)
def test_limits_are_in_order_and_mirror_each_other(pairs: list[tuple[float, float]]) -> None:
    original, merged = [a for a, _ in pairs], [b for _, b in pairs]
    up = paired_interval(original, merged, True)
    down = paired_interval(original, merged, False)
    assert up.low <= up.bound <= up.difference <= up.high
    assert up.difference == pytest.approx(math.fsum(b - a for a, b in pairs) / len(pairs), abs=1e-12)
    assert down.difference == pytest.approx(-up.difference, abs=1e-12)
    assert (down.low, down.high) == pytest.approx((-up.high, -up.low), abs=1e-9)


@settings(deadline=None)
@given(ANSWERS)
def test_right_or_wrong_answers_never_give_certainty(pairs: list[tuple[float, float]]) -> None:
    interval = paired_interval([a for a, _ in pairs], [b for _, b in pairs], True)
    assert interval.high - interval.low > 0.01
    assert -1.0 <= interval.low <= interval.high <= 1.0


def test_values_that_are_not_binary_and_not_skewed_get_scipys_paired_t() -> None:
    original, merged = [0.2, 0.5, 0.7, 0.1, 0.9] * 40, [0.1, 0.9, 0.8, 0.1, 0.5] * 40
    interval = paired_interval(original, merged, True)
    expected = stats.ttest_rel(merged, original).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))
    one_sided = stats.ttest_rel(merged, original, alternative="greater").confidence_interval(0.95)
    assert interval.bound == pytest.approx(one_sided.low)


def test_values_that_do_not_change_keep_some_doubt() -> None:
    interval = paired_interval([0.25, 0.5, 0.75] * 10, [0.25, 0.5, 0.75] * 10, True)
    width = Z95**2 / (30 + Z95**2)  # no discordant pair among 30, over values from nought to one
    assert (interval.difference, interval.low, interval.high) == pytest.approx((0.0, -width, width), rel=1e-6)


def test_a_tiny_change_for_the_worse_takes_no_doubt_away() -> None:
    values = [0.25, 0.5, 0.75] * 10
    same, worse = (paired_interval(values, [*values[:-1], 0.75 - change], True) for change in (0.0, 1e-6))
    assert worse.bound < same.bound and worse.low < same.low


def test_doubt_of_values_that_are_no_shares_scales_with_their_range() -> None:
    values = [-10.0, -5.0, 0.0] * 10
    interval = paired_interval(values, values, True)
    assert interval.high == pytest.approx(10.0 * Z95**2 / (30 + Z95**2), rel=1e-6)


@pytest.mark.parametrize(
    ("original", "merged"),
    [([], []), ([1.0], [1.0]), ([1.0, 0.0], [1.0, 0.0, 1.0]), ([1.0, 0.0], [1.0, math.nan])],
)
def test_no_interval_without_pairs(original: list[float], merged: list[float]) -> None:
    with pytest.raises(EvaluationError, match="two or more"):
        paired_interval(original, merged, True)


Sample = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


def binary(gained: float, lost: float) -> Sample:
    """Pairs of answers of which these shares are gained and lost; columns are original and merged."""
    table = np.array([(0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
    return lambda rng, n: table[rng.choice(3, size=n, p=[gained, lost, 1 - gained - lost])]


def graded(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    original = rng.beta(2, 2, n)
    return np.stack([original, original - 0.03 + 0.5 * rng.standard_normal(n)], axis=1)


def rarely_lost(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    """Graded answers that stay to the last digit, but for three in a hundred that are lost altogether."""
    original = rng.uniform(0.6, 1.0, n)
    return np.stack([original, original * (rng.random(n) >= 0.03)], axis=1)


@pytest.mark.parametrize("n", [60, 100, 300, 1000])
def test_rare_large_losses_of_graded_answers_are_not_certified_away(n: int) -> None:
    rng, runs = np.random.default_rng(7), 600
    bounds = [paired_interval(*rarely_lost(rng, n).T.tolist(), True).bound for _ in range(runs)]
    assert sum(bound <= -0.024 for bound in bounds) / runs >= 0.923


@pytest.mark.parametrize(
    ("sample", "n", "true"),
    [
        (binary(0.03, 0.05), 300, -0.02),
        (binary(0.0, 0.02), 300, -0.02),
        (binary(0.10, 0.12), 60, -0.02),
        (graded, 60, -0.03),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(sample: Sample, n: int, true: float) -> None:
    rng, runs, inside, above = np.random.default_rng(7), 600, 0, 0
    for _ in range(runs):
        pairs = sample(rng, n)
        interval = paired_interval(pairs[:, 0].tolist(), pairs[:, 1].tolist(), True)
        inside += interval.low <= true <= interval.high
        above += interval.bound <= true
    # Three standard errors of 600 runs are 0.027; discrete counts may cover more, never much less.
    assert 0.923 <= inside / runs <= 0.995
    assert above / runs >= 0.923
