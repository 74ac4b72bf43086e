"""Groups of a pool that has groups already: models join them, change their bytes, or leave.

What a joining model must not do is change anyone else's recipes: then the others' plans, and all their
scores, stay valid. What a changed or removed contributor does to the recipes it is part of cannot be
avoided.
"""

from collections.abc import Mapping, Sequence

from sandhi_core.grouping_form import DUPLICATE, NO_PARTNER, Formed, Former, Where, where
from sandhi_core.records import Group, Groups, Slot

NOT_JOINED = "no existing group fits, and the partners it has are in use; regroup to include it"
LEFT_ALONE = "its partners are gone; regroup to include it"


def continued(earlier: Groups, former: Former, keep_removed: bool) -> Formed:
    """`earlier` carried over to the models of `former`.

    Newcomers (models that were not there, or that lost every group they had) become members of the
    same-layer group of their slot's key. What finds none is grouped anew, among newcomers and models that
    have no group at all. `keep_removed`: recipes of a removed contributor stay as they were pinned;
    otherwise they are formed anew from the members that are left.
    """
    now = {where(s): s for s in former.slots}
    groups = [c for g in earlier.groups if (c := _carried(g, former, now, keep_removed)) is not None]
    settled = _models(groups)
    present = {s.model for s in former.slots}
    newcomers = (present - set(earlier.models)) | ((present & _models(earlier.groups)) - settled)
    joining = [s for s in former.slots if s.model in newcomers]
    groups = _joined(groups, [s for s in joining if former.eligible(s)])
    taken = {where(s) for g in groups for s in g.members}
    loose = [s for s in former.slots if s.model not in settled and where(s) not in taken] if newcomers else []
    anew = former.form(loose)
    groups += anew.groups
    return Formed(tuple(groups), _reasons(earlier, former, groups, anew, settled))


def _carried(group: Group, former: Former, now: Mapping[Where, Slot], keep_removed: bool) -> Group | None:
    """`group` with present bytes, without the slots that are gone or now mean something else; None where
    nothing is left to share by a merge."""
    key = group.members[0].key
    alike = {at: slot for at, slot in now.items() if slot.key == key}
    members = tuple(alike[where(m)] for m in group.members if where(m) in alike)
    if len(members) < 2:
        return None
    gone = any((c.model, c.layer, group.recipe.projection) not in alike for c in group.recipe.contributors)
    recipe = former.recipe(members) if gone and not keep_removed else former.repinned(group.recipe, alike)
    if len({m.digest for m in members} | {c.digest for c in recipe.contributors}) == 1:
        return None
    return group.model_copy(update={"recipe": recipe, "members": members})


def _joined(groups: Sequence[Group], slots: Sequence[Slot]) -> list[Group]:
    """`groups` with each of `slots` a member of the first same-layer group of its key, if there is one."""
    homes: dict[tuple[int, str], int] = {}
    for at, group in enumerate(groups):
        if group.stage == 1:
            homes.setdefault((group.members[0].layer, group.members[0].key), at)
    added: dict[int, list[Slot]] = {}
    for slot in slots:
        if (slot.layer, slot.key) in homes:
            added.setdefault(homes[slot.layer, slot.key], []).append(slot)
    return [
        group.model_copy(
            update={"members": tuple(sorted((*group.members, *added.get(at, ())), key=lambda s: (s.model, s.layer)))}
        )
        for at, group in enumerate(groups)
    ]


def _reasons(
    earlier: Groups, former: Former, groups: Sequence[Group], anew: Formed, settled: set[str]
) -> dict[Where, str]:
    """Why each slot without a group has none: as found now, else as found before, else its partners left."""
    grouped = {where(s) for g in groups for s in g.members}
    before = {(e.model, e.layer, e.projection): e.reason for e in earlier.excluded}
    in_use = {(s.layer, s.key) for s in former.slots if s.model in settled}
    reasons = {}
    for slot in former.slots:
        at = where(slot)
        if at in grouped:
            continue
        reason = anew.reasons.get(at)
        if reason == NO_PARTNER and (slot.layer, slot.key) in in_use:
            reason = NOT_JOINED
        reasons[at] = reason or before.get(at, LEFT_ALONE)
    return reasons


def _models(groups: Sequence[Group]) -> set[str]:
    return {s.model for g in groups for s in g.members}
