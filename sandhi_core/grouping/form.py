"""Groups from scratch: which slots may share one tensor.

`wide`: every set of same-layer slots that agree in their compatibility key, of models of one family (kinship.py).
`reference`: SANDHI's Ward clusters of the components that tolerate noise (ward.py).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sandhi_core.grouping.besides import Besides
from sandhi_core.grouping.kinship import STRANGERS
from sandhi_core.grouping.methods import Measures, Methods
from sandhi_core.grouping.order import Place
from sandhi_core.grouping.ward import Point, standardised, ward_groups
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Group, Slot, TensorInfo

Stage = Literal[1, 2]
Where = tuple[str, int, str]
"""(model, layer, projection): names a slot, whatever its bytes."""

NO_PARTNER = "no other model has a matrix of this shape, dtype and meaning in this layer"
NO_KIN = "the models with such a matrix in this layer were trained from other weights"
NO_BASE = "no base has a matrix of this shape, dtype and meaning in this layer"
OTHER_TOKENS = "its tokens have other numbers than those of the models with such embeddings"
NOT_CLUSTERED = "clustered with no other model's matrix"
DISTURBED = "noise in its component costs more than the gate"
DUPLICATE = "exact duplicate: the bytes are equal already, shared without a merge"


def where(slot: Slot) -> Where:
    return slot.model, slot.layer, slot.projection


@dataclass(frozen=True)
class Formed:
    """Groups, and for every slot that was considered and is in none of them, why."""

    groups: tuple[Group, ...]
    reasons: dict[Where, str]


class Former:
    """Forms groups of the slots of `fingerprints`. `tolerant`: model to the components whose noise drop is
    within the gate; only these take part in `reference` candidates. `families`: model to what `wide` ones keep apart;
    models that are not named are one family. `besides`: by model, what else may be shared than projections; embeddings
    of other vocabularies are kept apart as families are. `measures`: see Methods."""

    def __init__(
        self,
        fingerprints: Mapping[str, Fingerprint],
        tolerant: Mapping[str, frozenset[Place]],
        grouping: GroupingSettings,
        merging: MergingSettings,
        families: Mapping[str, str],
        besides: Mapping[str, Besides],
        measures: Measures | None = None,
    ) -> None:
        self.candidates = grouping.candidates
        beside = {m: besides.get(m, Besides()) for m in fingerprints}
        self.slots = [s for m, f in sorted(fingerprints.items()) for s in (*f.slots, *beside[m].slots)]
        self._tensors = {(m, t.name): t for m, f in fingerprints.items() for t in f.tensors}
        self._tolerant = tolerant
        self.methods = Methods(merging, self._info, measures)
        self._families = families
        self._vocabularies = {model: found.vocabulary for model, found in beside.items()}
        self._kin = Counter((s.layer, s.key, families.get(s.model, STRANGERS)) for s in self.slots)

    def home(self, slot: Slot) -> tuple[int, str, str]:
        """What `wide` slots must agree in to be of one group: layer, compatibility key, family."""
        return slot.layer, slot.key, self.family(slot)

    def family(self, slot: Slot) -> str:
        """What the slot's model is kin of; one and the same for all where nothing is kept apart. Of embeddings also by
        vocabulary."""
        family = self._families.get(slot.model, STRANGERS)
        return f"{family} {self._vocabularies[slot.model]}" if slot.component == "embeddings" else family

    def apart(self, slot: Slot) -> str:
        """Why a slot cannot join any of those that agree with it in layer and key."""
        kin = self._kin[slot.layer, slot.key, self._families.get(slot.model, STRANGERS)]
        return OTHER_TOKENS if slot.component == "embeddings" and kin > 1 else NO_KIN

    def form(self, slots: Sequence[Slot]) -> Formed:
        """Groups of `slots` among themselves. A set whose bytes are all equal needs no recipe."""
        eligible = [s for s in slots if self.eligible(s)]
        sets = self._wide(eligible) if self.candidates == "wide" else self._reference(eligible)
        met = Counter((s.layer, s.key) for s in eligible)
        reasons = {where(s): DISTURBED for s in slots} | {
            where(s): self._alone(s, met[s.layer, s.key]) for s in eligible
        }
        groups = []
        for stage, members in sets:
            if len({s.digest for s in members}) == 1:
                reasons |= {where(s): DUPLICATE for s in members}
            elif (choice := self.methods.chosen(members)) is None:
                reasons |= {where(s): NO_BASE for s in members}
            else:
                groups.append(Group(recipe=choice.recipe, members=members, stage=stage, compared=dict(choice.compared)))
        grouped = {where(s) for g in groups for s in g.members}
        return Formed(tuple(groups), {w: reason for w, reason in reasons.items() if w not in grouped})

    def _alone(self, slot: Slot, met: int) -> str:
        """Why a slot is in no group, of so many that agree in layer and key."""
        if self.candidates == "reference":
            return NOT_CLUSTERED
        return self.apart(slot) if met > 1 else NO_PARTNER

    def eligible(self, slot: Slot) -> bool:
        return self.candidates == "wide" or (slot.component, slot.layer) in self._tolerant[slot.model]

    def _info(self, slot: Slot) -> TensorInfo:
        return self._tensors[slot.model, slot.tensor]

    def _wide(self, slots: Iterable[Slot]) -> Iterable[tuple[Stage, tuple[Slot, ...]]]:
        alike: dict[tuple[int, str, str], list[Slot]] = defaultdict(list)
        for slot in slots:
            alike[self.home(slot)].append(slot)
        return [(1, in_order(members)) for members in alike.values() if len(members) > 1]

    def _reference(self, slots: Sequence[Slot]) -> Iterable[tuple[Stage, tuple[Slot, ...]]]:
        infos = [self._info(s) for s in slots]
        points = standardised([Point(s.model, s.layer, i.mean, i.std) for s, i in zip(slots, infos, strict=True)])
        alike: dict[str, list[int]] = defaultdict(list)
        for at, slot in enumerate(slots):
            alike[slot.key].append(at)
        for rows in alike.values():
            clustered = ward_groups([points[at] for at in rows])
            yield from ((1, in_order(slots[rows[i]] for i in group)) for group in clustered.same_layer)
            yield from ((2, in_order(slots[rows[i]] for i in group)) for group in clustered.across)


def in_order(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """The order of members and contributors."""
    return tuple(sorted(slots, key=lambda s: (s.model, s.layer)))
