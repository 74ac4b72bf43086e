"""Which recipe a group gets: by the one method that the pool names, or of several by what its members make most of.

What is no projection is averaged as it is, whatever the pool's methods: rows of embeddings are tokens and norms have
none, and neither a residual nor the moments of inputs speak of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sandhi_core.checkpoints.architectures import ORDER
from sandhi_core.pools.pool import MergingSettings
from sandhi_core.records import Contributor, Fingerprint, Group, Method, Recipe, Slot, TensorInfo, digest_of
from sandhi_core.rungs.choice import Choice, Evidence, choose


@dataclass(frozen=True)
class Measures:
    """What only weights and questions tell. `bases`: checkpoints of no model, by name; `distance`: the squared distance
    of two slots' matrices; `inputs`: the name of the moments of a model's inputs; `evidence`: see choose."""

    bases: Mapping[str, Fingerprint]
    distance: Callable[[Slot, Slot], float]
    inputs: Callable[[str], str]
    evidence: Evidence


class Methods:
    """Makes recipes. `infos` gives a slot's tensor; `measures` may be left out where the one method is the mean."""

    def __init__(
        self, merging: MergingSettings, infos: Callable[[Slot], TensorInfo], measures: Measures | None = None
    ) -> None:
        self._merging = merging
        self._infos = infos
        self._given = measures

    @property
    def rule(self) -> str:
        """Names what decides the methods of groups; empty where that is the mean and nothing else."""
        merging = self._merging
        if merging.plain:
            return ""
        bases = [[s.model_dump(mode="json") for s in b.slots] for b in self._bases.values()]
        evidence = self._measures.evidence.rule if merging.compares else None
        return digest_of([merging.methods, merging.reform, evidence, bases])

    def chosen(self, members: Sequence[Slot]) -> Choice | None:
        """The recipe of `members` (sorted by model and layer), who all contribute unless evidence leaves one out; None
        where no method gives one."""
        if members[0].projection not in ORDER:
            return Choice(self._average("mean", members), {})
        proposed = {m: recipe for m in self._merging.methods if (recipe := self._proposed(m, members)) is not None}
        if not proposed:
            return None
        if not self._merging.compares:
            (recipe,) = proposed.values()
            return Choice(recipe, {})
        return choose(members, proposed, self._measures.evidence, self._average if self._merging.reform else None)

    def repinned(self, group: Group, now: Mapping[tuple[str, int, str], Slot]) -> Recipe:
        """The recipe of `group` with the contributors' present bytes (one that is gone, or is no slot of the pool,
        stays as it was pinned). A base is paid for by others only where a member by now holds its bytes, or does no
        more. `now`: by model, layer and projection."""
        recipe = group.recipe
        pinned = []
        for c in recipe.contributors:
            slot = now.get((c.model, c.layer, recipe.projection))
            pinned.append(c if slot is None else self._contributor(recipe.method, slot))
        update: dict[str, object] = {"contributors": tuple(pinned), "rescale": self._rescale(recipe.projection)}
        if recipe.method == "base":
            base = pinned[0].digest
            present = {at: m for m in group.members if (at := (m.model, m.layer, m.projection)) in now}
            after = _payers(base, [now[at] for at in present])
            if after != _payers(base, list(present.values())):
                update["payers"] = after
        return recipe.model_copy(update=update)

    @property
    def _measures(self) -> Measures:
        if self._given is None:
            raise ValueError("these methods need measures")
        return self._given

    @property
    def _bases(self) -> Mapping[str, Fingerprint]:
        return self._given.bases if self._given is not None else {}

    def _proposed(self, method: Method, members: Sequence[Slot]) -> Recipe | None:
        match method:
            case "member":
                return self._recipe(method, members, [self._nearest(members, members)])
            case "base":
                first = members[0]
                fitting = [
                    s for b in self._bases.values() for s in b.slots if (s.layer, s.key) == (first.layer, first.key)
                ]
                if not fitting:
                    return None
                base = self._nearest(fitting, members)
                payers = _payers(base.digest, members)
                return self._recipe(method, members, [base]).model_copy(update={"payers": payers})
            case _:
                return self._average(method, members)

    def _nearest(self, offered: Sequence[Slot], members: Sequence[Slot]) -> Slot:
        """The one whose squared distance to all members is least in sum; of equally near ones the first."""
        if len(offered) == 1:
            return offered[0]
        return min(offered, key=lambda one: sum(self._measures.distance(one, other) for other in members))

    def _average(self, method: Method, members: Sequence[Slot]) -> Recipe:
        return self._recipe(method, members, members)

    def _recipe(self, method: Method, members: Sequence[Slot], contributors: Sequence[Slot]) -> Recipe:
        info = self._infos(members[0])
        return Recipe(
            projection=members[0].projection,
            shape=info.shape,
            dtype=info.dtype,
            method=method,
            rescale=self._rescale(members[0].projection),
            contributors=tuple(self._contributor(method, slot) for slot in contributors),
        )

    def _rescale(self, projection: str) -> Literal["none", "common"]:
        return self._merging.rescale if projection in ORDER else "none"

    def _contributor(self, method: Method, slot: Slot) -> Contributor:
        inputs = self._measures.inputs(slot.model) if method == "regmean" else ""
        return Contributor(model=slot.model, layer=slot.layer, tensor=slot.tensor, digest=slot.digest, inputs=inputs)


def _payers(base: str, members: Sequence[Slot]) -> tuple[str, ...]:
    """Who pays for the copy of a base's tensor with the digest `base`: a model that holds these bytes holds the copy;
    else all pay for it."""
    owners = {s.model for s in members if s.digest == base}
    return tuple(sorted(owners or {s.model for s in members}))
