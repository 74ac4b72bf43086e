"""Groups of a pool that has groups already: models join them, change their bytes, or leave.

What a joining model must not do is change anyone else's recipes: then the others' plans, and all their
scores, stay valid. What a changed or removed contributor does to the recipes it is part of cannot be
avoided.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from sandhi_core.grouping.besides import UNFIT
from sandhi_core.grouping.form import (
    DUPLICATE,
    NO_KIN,
    NO_PARTNER,
    OTHER_TOKENS,
    Formed,
    Former,
    Where,
    in_order,
    where,
)
from sandhi_core.records import Group, Groups, Recipe, Slot

NOT_JOINED = "no existing group fits, and the partners it has are in use; regroup to include it"
LEFT_ALONE = "its partners are gone; regroup to include it"


def continued(earlier: Groups, former: Former, keep_removed: bool) -> Formed:
    """`earlier` carried over to the models of `former`.

    Newcomers (models that were not there, or that lost every group they had) become members of the
    same-layer group of their slot's key. What finds none is grouped anew, among newcomers and models that
    have no group at all; so are slots that were exact duplicates and are not any more, and what lies beside the
    projections where the pool did not ask for it before. `keep_removed`:
    recipes of a removed contributor stay as they were pinned; otherwise they are formed anew from the
    members that are left.
    """
    now = {where(s): s for s in former.slots}
    groups = [c for g in earlier.groups if (c := _carried(g, former, now, keep_removed)) is not None]
    settled = _models(groups)
    present = {s.model for s in former.slots}
    newcomers = (present - set(earlier.models)) | ((present & _models(earlier.groups)) - settled)
    unasked = _unasked(earlier, former.slots)
    new = [s for s in former.slots if s.model in newcomers or where(s) in unasked]
    groups = _joined(groups, [s for s in new if former.eligible(s)], former)
    taken = {where(s) for g in groups for s in g.members}
    parted = _parted(earlier, [s for s in former.slots if s.model not in newcomers])
    loose = [s for s in former.slots if where(s) in parted | unasked or (newcomers and s.model not in settled)]
    anew = former.form([s for s in loose if where(s) not in taken])
    groups += anew.groups
    return Formed(tuple(groups), _reasons(earlier, former, groups, anew))


def _carried(group: Group, former: Former, now: Mapping[Where, Slot], keep_removed: bool) -> Group | None:
    """`group` with present bytes, without the slots that are gone or mean something else by now; None where
    nothing is left to share by a merge."""
    key = group.members[0].key
    sources = _sources(group.recipe)
    places = {where(m) for m in group.members}.union(sources)
    alike = _related({at: now[at] for at in places if at in now and now[at].key == key}, former)
    members = tuple(alike[where(m)] for m in group.members if where(m) in alike)
    if len(members) < 2:
        return None
    gone = any(source not in alike for source in sources)
    bytes_of = {m.digest for m in members}
    if gone and not keep_removed:
        choice = former.methods.chosen(members) if len(bytes_of) > 1 else None
        update = (
            None if choice is None else {"recipe": choice.recipe, "compared": dict(choice.compared), "left_out": ()}
        )
    else:
        recipe = former.methods.repinned(group, alike)
        held = bytes_of if recipe.method == "base" else bytes_of | {c.digest for c in recipe.contributors}
        update = {"recipe": recipe} if len(held) > 1 else None
    return None if update is None else group.model_copy(update={**update, "members": members})


def _sources(recipe: Recipe) -> list[Where]:
    """The slots of the pool that a recipe was made from; of a base's the members that it was made for."""
    if recipe.method == "base":
        return [(model, recipe.contributors[0].layer, recipe.projection) for model in recipe.payers]
    return [(c.model, c.layer, recipe.projection) for c in recipe.contributors]


def _related(slots: dict[Where, Slot], former: Former) -> dict[Where, Slot]:
    """Those of the family that most of them are of (of several the first): a checkpoint may have been replaced by one
    that was trained from other weights."""
    counts = Counter(former.family(slot) for slot in slots.values())
    common = max(sorted(counts), key=counts.__getitem__, default="")
    return {at: slot for at, slot in slots.items() if former.family(slot) == common}


def _joined(groups: Sequence[Group], slots: Sequence[Slot], former: Former) -> list[Group]:
    """`groups` with each of `slots` a member of the first same-layer group of its key (with `wide` candidates: and of
    its family), if there is one."""
    homes: dict[tuple[object, ...], int] = {}
    for at, group in enumerate(groups):
        if group.stage == 1:
            homes.setdefault(former.home(group.members[0]), at)
    added: dict[int, list[Slot]] = {}
    for slot in slots:
        if former.home(slot) in homes:
            added.setdefault(homes[former.home(slot)], []).append(slot)
    return [
        group.model_copy(update={"members": in_order((*group.members, *added.get(at, ())))})
        for at, group in enumerate(groups)
    ]


def _parted(earlier: Groups, slots: Sequence[Slot]) -> set[Where]:
    """Of the `slots` that were left out as exact duplicates, those whose bytes differ by now."""
    before = _reasons_of(earlier)
    duplicates = [s for s in slots if before.get(where(s)) == DUPLICATE]
    digests = _digests(duplicates)
    return {where(s) for s in duplicates if len(digests[s.layer, s.key]) > 1}


def _unasked(earlier: Groups, slots: Sequence[Slot]) -> set[Where]:
    """Of the `slots` beside the projections those that were not considered, neither grouped nor compared."""
    considered = {where(s) for g in earlier.groups for s in g.members}
    considered |= {at for at, reason in _reasons_of(earlier).items() if reason not in UNFIT}
    return {where(s) for s in slots if s.component in ("norms", "embeddings")} - considered


def _reasons(earlier: Groups, former: Former, groups: Sequence[Group], anew: Formed) -> dict[Where, str]:
    """Why each slot without a group has none: as found now, else as found before, else its partners left."""
    grouped = {where(s) for g in groups for s in g.members}
    before = _reasons_of(earlier)
    present = Counter((s.layer, s.key) for s in former.slots)
    homes = Counter(former.home(s) for s in former.slots)
    equal = {at for at, digests in _digests(former.slots).items() if len(digests) == 1 and present[at] > 1}
    reasons = {}
    for slot in (s for s in former.slots if where(s) not in grouped):
        reason = anew.reasons.get(where(slot)) or before.get(where(slot), LEFT_ALONE)
        if (slot.layer, slot.key) in equal:
            reason = DUPLICATE
        elif reason in (NO_PARTNER, NO_KIN, OTHER_TOKENS) and present[slot.layer, slot.key] > 1:
            reason = NOT_JOINED if homes[former.home(slot)] > 1 else former.apart(slot)
        reasons[where(slot)] = reason
    return reasons


def _reasons_of(groups: Groups) -> dict[Where, str]:
    return {(e.model, e.layer, e.projection): e.reason for e in groups.excluded}


def _digests(slots: Iterable[Slot]) -> dict[tuple[int, str], set[str]]:
    """Distinct bytes by layer and compatibility key."""
    found: dict[tuple[int, str], set[str]] = defaultdict(set)
    for slot in slots:
        found[slot.layer, slot.key].add(slot.digest)
    return found


def _models(groups: Sequence[Group]) -> set[str]:
    return {s.model for g in groups for s in g.members}
