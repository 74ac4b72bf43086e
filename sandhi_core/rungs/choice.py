"""Which tensor a group shares, of several that it could, told by what its members would make of each.

For every method the tensor is made, and every member's difference from it decomposed. At a price each member then takes
its cheapest bid (allotment: share with a residual of some rank, or keep its own where it may), and the bids add up to
what the group costs under that method, in error and in priced bytes. No price is known before a model has been scored,
but most of allotment's do not matter: at bold ones everything shares at rank 0, where the nearest average wins whatever
it costs in residuals, and at safe ones hardly anything shares. A ladder stands where residuals pay for most of the
sharing. So a method is judged over the prices at which the members together spare a good part of what they could
(USEFUL), by some method's bids, and over all where there are none. The logarithms of its costs there are added: costs
span orders of magnitude, so that a sum of themselves would hear the boldest price alone, and under a logarithm a method
that is cheaper by half counts as much at one price as at another. Methods share one zero: of n matrices one copy is
held anyway, whoever pays for it. Scaled and shifted rows, which a pool may add to its bids, are not looked at: they
would take every matrix a second decomposition.

The same costs say which contributor to an average is better left out: the one that makes most of the cost. It stays a
member, and bids for a tensor that it does not contribute to.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sandhi_core.records import Method, Recipe, Slot
from sandhi_core.rungs.allotment import PRICES, Candidate, bid, nbytes

DIGITS = 6
"""Decimals of a cost: fewer than what the number of threads moves a decomposition by."""

USEFUL = (0.5, 0.9)
"""Parts of what a group could spare at most, residuals taken off: from this to that methods are compared."""

AVERAGES: tuple[Method, ...] = ("mean", "regmean")
"""Methods that change with who contributes."""


@dataclass(frozen=True)
class Evidence:
    """`candidate`: what a slot would bid for a recipe's tensor. `rejected`: told of what is not taken. `own`: whether a
    slot may keep its own matrix, which models that become adapters may not. `rule`: names what decides bids besides
    models and questions."""

    candidate: Callable[[Slot, Recipe], Candidate]
    rejected: Callable[[Slot, Recipe], None] = lambda slot, recipe: None
    own: bool = True
    rule: str = ""


@dataclass(frozen=True)
class Choice:
    """A recipe, and by method what was compared: the mean over the prices that were looked at of the natural logarithm
    of the cost (of what is taken after contributors were left out)."""

    recipe: Recipe
    compared: Mapping[Method, float]


def useful(compared: Iterable[Sequence[Candidate]], own: bool = True) -> tuple[float, ...]:
    """Of PRICES those at which a group spares a USEFUL part by some of the `compared` methods' bids; all where it never
    does. `own`: see Evidence."""
    least, most = USEFUL
    spared = [[_spared(candidates, price, own) for price in PRICES] for candidates in compared]
    found = tuple(
        p
        for p, parts in zip(PRICES, zip(*spared, strict=True), strict=True)
        if any(least <= part <= most for part in parts)
    )
    return found or PRICES


def _spared(candidates: Sequence[Candidate], price: float, own: bool) -> float:
    """Bytes that a group spares at `price`, less those of residuals, as a part of what it could spare."""
    added = [(candidate, bid(candidate, price, own)[1]) for candidate in candidates]
    spared = sum(c.spared - nbytes(c.shape, *adds) for c, adds in added if adds is not None)
    could = sum(candidate.spared for candidate in candidates)
    return spared / could if could else 0.0


def costs(
    candidates: Sequence[Candidate], prices: Sequence[float] = PRICES, own: bool = True
) -> tuple[float, npt.NDArray[np.float64]]:
    """What a group costs (see Choice), and which part of it each candidate makes, averaged over `prices`. `own`: see
    Evidence."""
    bids = np.array([[bid(candidate, price, own)[0] for price in prices] for candidate in candidates])
    total = bids.sum(0).clip(np.finfo(np.float64).tiny)
    return round(float(np.log(total).mean()), DIGITS), (bids / total).mean(1)


def choose(
    members: Sequence[Slot],
    proposed: Mapping[Method, Recipe],
    evidence: Evidence,
    averaged: Callable[[Method, Sequence[Slot]], Recipe] | None = None,
) -> Choice:
    """The cheapest of the `proposed` recipes for `members`; of equally cheap ones the first.

    `averaged` gives the recipe of an average of some members: given, contributors to one are left out as long as that
    makes the group cheaper and two are left.
    """
    tried: list[Recipe] = []

    def bidding(recipe: Recipe) -> list[Candidate]:
        tried.append(recipe)
        return [evidence.candidate(member, recipe) for member in members]

    candidates = {method: bidding(recipe) for method, recipe in proposed.items()}
    prices = useful(candidates.values(), evidence.own)
    found = {method: costs(bids, prices, evidence.own) for method, bids in candidates.items()}
    method = min(found, key=lambda m: found[m][0])
    (least, parts), recipe = found[method], proposed[method]
    while averaged is not None and recipe.method in AVERAGES and len(recipe.contributors) > 2:
        left = _without_costliest(members, recipe, parts)
        others = [averaged(m, left) for m in proposed if m in AVERAGES]
        averages = [(costs(bidding(r), prices, evidence.own), r) for r in others]
        (cost, parts), again = min(averages, key=lambda pair: pair[0][0])
        if cost >= least:
            break
        least, recipe = cost, again
    for rejected in tried:
        if rejected != recipe:
            for member in members:
                evidence.rejected(member, rejected)
    return Choice(recipe, {m: found[m][0] for m in found} | {recipe.method: least})


def _without_costliest(members: Sequence[Slot], recipe: Recipe, parts: npt.NDArray[np.float64]) -> list[Slot]:
    """The contributors to an average but the one that makes most of the cost; of equal ones the last goes."""
    places = {(c.model, c.layer) for c in recipe.contributors}
    contributing = [at for at, member in enumerate(members) if (member.model, member.layer) in places]
    out = max(contributing, key=lambda at: (round(float(parts[at]), DIGITS), at))
    return [members[at] for at in contributing if at != out]
