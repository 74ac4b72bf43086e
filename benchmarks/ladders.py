"""Ways to decide what each model of a pool shares, each as an assignment with its net bytes and its drops."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.members import Member, Members
from sandhi_core.cutoffs import within
from sandhi_core.records import Quality, Scores, Slot, digest_of
from sandhi_core.rungs.allotment import RULES, Ranks, distinct
from sandhi_core.rungs.ladder import boldest
from sandhi_core.rungs.residual import nbytes
from sandhi_core.statistics import paired_interval

LEVELS: Mapping[str, Sequence[float]] = {
    "error": [2.0 ** (n / 4) for n in range(-80, 5)],
    "price": [2.0 ** (n / 4) for n in range(-80, 45)],
}
"""Tried of each rule, from safe to bold: four to an octave."""


@dataclass(frozen=True)
class Held:
    """What one model shares: by tensor name the rank of its residual."""

    ranks: Ranks
    drops: Scores  # on the search split


@dataclass
class Outcome:
    """One row of the table."""

    name: str
    assigned: dict[str, Ranks]
    net: int
    whole: int
    drops: dict[str, float]  # on the holdout, the worst task of each model
    bounds: dict[str, float]  # one-sided 95 % upper bounds of these
    evaluations: int
    seconds: float
    within: bool
    notes: list[str] = field(default_factory=list)


class Sharing:
    """One kind of shared tensor for all sets of a pool, and what every model's ladder over it looks like."""

    def __init__(self, members: Members, method: str) -> None:
        self.members = members
        self.method = method
        self.shared = members.shared(method)
        self.candidates = members.candidates(self.shared)

    def tensors(self, model: str, ranks: Ranks) -> dict[str, tuple[str, Tensor]]:
        """What the model holds in place of its own, as it acts."""
        found = {}
        for name, rank in ranks.items():
            residual = self.candidates[model][name].spectrum.truncated(rank)
            identity = digest_of([self.method, model, name, rank])
            found[name] = identity, residual.added(self.shared[model, name])
        return found

    def settled(self, assigned: Mapping[str, Ranks]) -> dict[str, Ranks]:
        """Without the slots whose set saves nothing: one that a single model holds, or whose residuals together cost
        as much as the copies they spare. Those keep their own matrices."""
        kept: dict[str, dict[str, int]] = {model: dict(ranks) for model, ranks in assigned.items()}
        for slots in self.members.sets:
            taking = [slot for slot in slots if slot.tensor in kept.get(slot.model, {})]
            if self._saved(taking, kept) <= 0:
                for slot in taking:
                    del kept[slot.model][slot.tensor]
        return dict(kept)

    def net(self, assigned: Mapping[str, Ranks]) -> int:
        """Bytes that the pool need not hold."""
        return sum(
            self._saved([slot for slot in slots if slot.tensor in assigned.get(slot.model, {})], assigned)
            for slots in self.members.sets
        )

    def _saved(self, taking: Sequence[Slot], assigned: Mapping[str, Ranks]) -> int:
        if not taking:
            return 0
        spent = sum(nbytes(self.candidates[s.model][s.tensor].shape, assigned[s.model][s.tensor]) for s in taking)
        return (len(taking) - 1) * taking[0].nbytes - spent


def ladder(sharing: Sharing, member: Member, rule: str) -> list[Held]:
    """The assignments that were tried on the search split and kept the budgets, from safe to bold."""
    model, drops = member.entry.name, dict[float, Scores]()
    rungs = distinct(RULES[rule], sharing.candidates[model], LEVELS[rule])

    def stands(rung: tuple[float, Ranks]) -> bool:
        level, ranks = rung
        drops[level] = member.drops("search", sharing.tensors(model, ranks))
        return within(drops[level], member.budgets)

    return [Held(ranks, drops[level]) for level, ranks in boldest(rungs, stands)]


def certified(sharing: Sharing, member: Member, held: Sequence[Held], quality: Quality) -> Ranks:
    """The boldest of `held` that holds on the holdout too: tried from safe to bold, up to the first that does not."""
    kept: Ranks = {}
    for one in held:
        tensors = sharing.tensors(member.entry.name, one.ranks)
        worst = _worst(member, tensors)
        limit = [bound if quality == "certified" else drop for drop, bound in worst.values()]
        if any(found > member.budgets[task] + 1e-9 for task, found in zip(worst, limit, strict=True)):
            break
        kept = one.ranks
    return kept


def _worst(member: Member, tensors: Mapping[str, tuple[str, Tensor]]) -> dict[str, tuple[float, float]]:
    """Of every task the drop on the holdout, and its one-sided 95 % upper bound."""
    before, after = member.evaluate("holdout", {}), member.evaluate("holdout", tensors)
    drops = member.drops("holdout", tensors)
    found = {}
    for task, result in after.tasks.items():
        interval = paired_interval(before.tasks[task].questions, result.questions, result.higher_is_better)
        found[task] = drops[task], -interval.bound
    return found


def judged(name: str, sharing: Sharing, assigned: Callable[[], Mapping[str, Ranks]]) -> Outcome:
    """Decide for every model, settle what saves nothing, and measure the result on the holdout. Seconds include loading
    the models and building the questions; shared tensors and spectra are made before."""
    begun = time.perf_counter()
    members = sharing.members.found
    for member in members.values():
        member.anew()
    settled = sharing.settled(assigned())
    found = {m: _worst(member, sharing.tensors(m, settled[m])) for m, member in members.items()}
    return Outcome(
        name,
        settled,
        sharing.net(settled),
        sum(member.fingerprint.nbytes for member in members.values()),
        {m: max(drop for drop, _ in tasks.values()) for m, tasks in found.items()},
        {m: max(bound for _, bound in tasks.values()) for m, tasks in found.items()},
        sum(len(keys) for member in members.values() for keys in member.asked.values()),
        time.perf_counter() - begun,
        all(within({t: d for t, (d, _) in found[m].items()}, member.budgets) for m, member in members.items()),
    )


def by_ladder(sharing: Sharing, rule: str, quality: Quality) -> dict[str, Ranks]:
    """Every model as bold as its search split and then its holdout let it be."""
    members = sharing.members.found.items()
    return {name: certified(sharing, member, ladder(sharing, member, rule), quality) for name, member in members}


def by_rank(sharing: Sharing, rank: int) -> dict[str, Ranks]:
    """All slots shared, each with a residual of that rank where it is worth it: no search."""
    return {
        name: {tensor: rank for tensor, candidate in candidates.items() if candidate.worth(rank)}
        for name, candidates in sharing.candidates.items()
    }
