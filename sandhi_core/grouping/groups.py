"""Which slots of a pool are proposed to share one tensor, and each model's own plan made from that."""

from collections import defaultdict
from collections.abc import Mapping

from sandhi_core.grouping.besides import Besides
from sandhi_core.grouping.form import Formed, Former, where
from sandhi_core.grouping.join import continued
from sandhi_core.grouping.methods import Measures
from sandhi_core.grouping.order import Place, reference_order, wide_order
from sandhi_core.grouping.reform import Makers, reformed
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import (
    Exclusion,
    Fingerprint,
    Group,
    Groups,
    Plan,
    PlannedMerge,
    PlannedStep,
    Profile,
    Slot,
)


def make_groups(
    pool: str,
    key: str,
    fingerprints: Mapping[str, Fingerprint],
    profiles: Mapping[str, Profile],
    grouping: GroupingSettings,
    merging: MergingSettings,
    gate: float,
    earlier: Groups | None,
    families: Mapping[str, str] | None = None,
    besides: Mapping[str, Besides] | None = None,
    measures: Measures | None = None,
    makers: Makers | None = None,
) -> Groups:
    """The groups of one compatibility group of a pool. `fingerprints` and `profiles`: by model, the same
    models.

    With `on_new_model: join`, `earlier` groups are carried over as far as their slots still exist (see
    join), unless they were formed by another rule: then, and with `regroup`, all are formed from
    scratch; where `makers` are given, their averages by those who are to make the earlier ones (see reform).
    `gate`: the largest drop under noise of a component that counts as tolerant. `families`, `besides`: see
    Former; `measures`: see Methods.
    """
    tolerant = {
        model: frozenset((s.component, s.layer) for s in profile.sensitivities if s.drop <= gate)
        for model, profile in profiles.items()
    }
    former = Former(fingerprints, tolerant, grouping, merging, families or {}, besides or {}, measures)
    rule = former.methods.rule
    joins = makers is None and grouping.on_new_model == "join"
    if earlier is not None and joins and _same_rule(earlier, grouping, gate, rule):
        formed = continued(earlier, former, keep_removed=grouping.on_removed_model == "keep")
    else:
        formed = former.form(former.slots)
        if earlier is not None and makers is not None:
            formed = Formed(reformed(formed.groups, earlier, makers), formed.reasons)
    unfit = {where(slot): reason for found in (besides or {}).values() for slot, reason in found.unfit.items()}
    middle = (max(f.layers for f in fingerprints.values()) - 1) / 2
    return Groups(
        pool=pool,
        key=key,
        candidates=grouping.candidates,
        gate=gate,
        rule=rule,
        models=tuple(sorted(fingerprints)),
        groups=tuple(sorted(formed.groups, key=lambda g: _search_order(g, middle))),
        excluded=tuple(
            Exclusion(model=model, layer=layer, projection=projection, reason=reason)
            for (model, layer, projection), reason in sorted((formed.reasons | unfit).items())
        ),
    )


def make_plan(groups: Groups, fingerprint: Fingerprint, profile: Profile, pool: str) -> Plan:
    """One model's own steps: for every component that has a group, its recipes, in the order of the search.

    With `wide` candidates it depends on the model's own profile and on the recipes of its groups alone. A slot whose
    own bytes are what its group shares needs no step.
    """
    model, middle = fingerprint.model, (fingerprint.layers - 1) / 2
    if groups.candidates == "reference":
        blocks = reference_order(groups.groups, model, middle)
    else:
        own: dict[Place, list[tuple[Group, Slot]]] = defaultdict(list)
        for group in groups.groups:
            for slot in group.members:
                if slot.model == model and slot.digest != group.recipe.taken:
                    own[slot.component, slot.layer].append((group, slot))
        nbytes = {place: sum(slot.nbytes for _, slot in found) for place, found in own.items()}
        drops: dict[Place, float] = {(s.component, s.layer): s.drop for s in profile.sensitivities}
        blocks = [own[place] for place in wide_order(nbytes, drops, groups.gate, middle)]
    at = {name: i for i, name in enumerate(fingerprint.in_order)}
    return Plan(
        pool=pool,
        model=model,
        fingerprint=fingerprint.digest,
        steps=tuple(_step(sorted(block, key=lambda found: at[found[1].tensor])) for block in blocks),
    )


def _step(block: list[tuple[Group, Slot]]) -> PlannedStep:
    first = block[0][1]
    merges = tuple(
        PlannedMerge(tensor=slot.tensor, projection=slot.projection, nbytes=slot.nbytes, recipe=group.recipe)
        for group, slot in block
    )
    return PlannedStep(component=first.component, layer=first.layer, merges=merges)


def _same_rule(earlier: Groups, grouping: GroupingSettings, gate: float, rule: str) -> bool:
    """Whether groups are still sought by the rule that formed the earlier ones. No gate bars `wide` ones."""
    if (earlier.candidates, earlier.rule) != (grouping.candidates, rule):
        return False
    return earlier.candidates == "wide" or earlier.gate == gate


def _search_order(group: Group, middle: float) -> tuple[object, ...]:
    """Larger saving first, then the middle of the model; the rest makes it total."""
    layer = group.members[0].layer
    saving = group.recipe.nbytes * (len(group.members) - 1)
    contributors = [(c.model, c.layer) for c in group.recipe.contributors]
    return group.stage, -saving, abs(layer - middle), layer, group.recipe.projection, contributors
