"""How far a difference between two models' answers to the same questions may be from the true one."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from sandhi_core.errors import EvaluationError

TWO_SIDED = 0.975
"""Quantile of both ends of a 95 % interval."""
ONE_SIDED = 0.95
"""Quantile of a one-sided 95 % bound."""
_Z2 = float(stats.norm.ppf(ONE_SIDED)) ** 2


class Paired(NamedTuple):
    """Mean change over questions, merged minus original, in the metric's unit; negative is worse."""

    difference: float
    low: float
    high: float
    bound: float  # one-sided 95 % lower bound


def paired_interval(original: Sequence[float], merged: Sequence[float], higher_is_better: bool) -> Paired:
    """95 % interval and one-sided 95 % lower bound of the mean paired difference.

    `original` and `merged` hold one value a question, in the same order. Right-or-wrong answers (all 0 or 1)
    get Tango's score interval, everything else the paired t interval, corrected for skewness and never narrower than
    Tango's where no pair differs: a few questions say little of losses that are rare and large.

    Raises EvaluationError where there are fewer than two questions, different numbers, or values not finite.
    """
    before, after = np.asarray(original, dtype=np.float64), np.asarray(merged, dtype=np.float64)
    if before.shape != after.shape or before.size < 2 or not np.isfinite([before, after]).all():
        raise EvaluationError(
            f"no interval of {before.size} and {after.size} answers: it takes two or more, as many, finite",
            remedy="give the task more questions; look for weights that give NaN",
        )
    if np.isin(before, (0.0, 1.0)).all() and np.isin(after, (0.0, 1.0)).all():
        better, worse = (after, before) if higher_is_better else (before, after)
        gained, lost = int(np.sum(better > worse)), int(np.sum(better < worse))
        return _tango(gained, lost, before.size)
    spread = 1.0 if _in_unit(before) and _in_unit(after) else float(np.ptp([before, after]))
    return _paired_t(after - before if higher_is_better else before - after, spread)


def _in_unit(values: npt.NDArray[np.float64]) -> bool:
    return bool(((values >= 0.0) & (values <= 1.0)).all())


def is_mean(value: float, questions: Sequence[float]) -> bool:
    """Whether a task's value is the mean of its questions' values: of anything else these say nothing certain."""
    mean = math.fsum(questions) / len(questions)
    return math.isclose(value, mean, rel_tol=1e-9, abs_tol=1e-9)


def standard_error(original: Sequence[float], merged: Sequence[float]) -> float:
    """Of the mean paired difference, in the metric's unit; nought of a single question. NaN where a value is."""
    differences = np.asarray(merged, dtype=np.float64) - np.asarray(original, dtype=np.float64)
    return float(stats.sem(differences)) if differences.size > 1 else 0.0


def least_certifiable(original: Sequence[float], merged: Sequence[float]) -> float:
    """The smallest loss, in the metric's unit, that a one-sided 95 % bound could exclude with so many questions if the
    two had the same mean: of right-or-wrong answers where no pair differs, else with the variance that was found.

    Raises EvaluationError as `paired_interval` does.
    """
    found = paired_interval(original, merged, True)
    if {*original, *merged} <= {0.0, 1.0}:
        return certifiable_budget(len(original))
    return found.difference - found.bound


def certifiable_budget(questions: int) -> float:
    """The smallest budget that so many right-or-wrong answers can certify: Tango's limit where no pair differs, which
    is z^2 / (n + z^2)."""
    return _Z2 / (questions + _Z2)


def certifying_questions(budget: float) -> int:
    """The fewest right-or-wrong answers that can certify a budget below 1."""
    return math.ceil(_Z2 * (1.0 / budget - 1.0) - 1e-9)


def _tango(gained: int, lost: int, n: int) -> Paired:
    low, bound = (tango_limit(gained, lost, n, float(stats.norm.ppf(q))) for q in (TWO_SIDED, ONE_SIDED))
    high = -tango_limit(lost, gained, n, float(stats.norm.ppf(TWO_SIDED)))
    return Paired((gained - lost) / n, low, high, bound)


def tango_limit(gained: int, lost: int, n: int, z: float) -> float:
    """Lower score limit of p(gained) - p(lost), `gained` and `lost` being the discordant pairs among `n`.

    Tango (1998), Statistics in Medicine 17:891-908: the difference d at which the score statistic
    (gained - lost - n d) / sqrt(n (2 q + d (1 - d))) equals z, where q, the maximum likelihood estimate of
    p(lost) given d, is the larger root of 2 n q^2 + b q + c = 0 (b and c as below). `z` is a standard normal
    quantile above 0.
    """
    estimate = (gained - lost) / n
    if estimate == -1.0:
        return -1.0

    def excess(d: float) -> float:
        b = -gained - lost + (2 * n - gained + lost) * d
        c = -lost * d * (1.0 - d)
        q = (math.sqrt(max(b * b - 8.0 * n * c, 0.0)) - b) / (4.0 * n)
        return gained - lost - n * d - z * math.sqrt(max(n * (2.0 * q + d * (1.0 - d)), 0.0))

    # At the estimate itself the variance can vanish, which would be a second root.
    return float(optimize.brentq(excess, -1.0, estimate - 1e-9))


def _paired_t(differences: npt.NDArray[np.float64], spread: float) -> Paired:
    """Student's paired t interval, each limit moved out by as much as skewness asks for (Johnson 1978, Journal of the
    American Statistical Association 73:536-544), and at least as wide as Tango's for no discordant pair, scaled to the
    values' range `spread`: differences that happen to be equal, or nearly so, would say that no other question
    differs."""
    n = differences.size
    mean, error = float(differences.mean()), float(stats.sem(differences))
    third = float(((differences - mean) ** 3).mean())

    def out(quantile: float, skewed: float) -> float:
        t = float(stats.t.ppf(quantile, n - 1))
        skew = max(0.0, skewed) * (1.0 + 2.0 * t * t) / (6.0 * n * n * error * error) if error else 0.0
        return max(error * t + skew, -spread * tango_limit(0, 0, n, float(stats.norm.ppf(quantile))))

    return Paired(mean, mean - out(TWO_SIDED, -third), mean + out(TWO_SIDED, third), mean - out(ONE_SIDED, -third))
