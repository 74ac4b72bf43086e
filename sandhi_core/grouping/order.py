"""In which order one model tries its components: what saves most and hurts least first.

Sources: SANDHI (SOSP 2026), merge order (larger saving, middle layers, neighbours apart), as its artifact
does it, for `reference`; `wide` puts the components that noise does not disturb first.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from sandhi_core.records import Component, Group, Slot

Place = tuple[Component, int]
"""(component, layer) of one model."""

KINDS: tuple[Component, ...] = ("mlp", "attn", "embeddings", "norms")
"""In the order in which equal savings are tried."""


def spaced(weights: Mapping[int, float], middle: float) -> list[int]:
    """Layers one by one: not next to one already taken where possible, then the larger weight, then nearer to
    `middle`, then the lower."""
    remaining, taken = set(weights), list[int]()
    while remaining:
        layer = min(remaining, key=lambda n: (n - 1 in taken or n + 1 in taken, -weights[n], abs(n - middle), n))
        remaining.remove(layer)
        taken.append(layer)
    return taken


def wide_order(nbytes: Mapping[Place, int], drops: Mapping[Place, float], gate: float, middle: float) -> list[Place]:
    """All places of `nbytes` (bytes that could be shared). Those whose drop under noise is within `gate`
    first: larger saving first, and of equal ones the MLPs before the attentions, each spaced out from the
    middle. Then the others, least disturbed first. Where no noise was tried (`drops` is empty) none is disturbed.

    Depends on the model's own profile and matrices alone: a model that joins changes nothing here.
    """

    def by_saving(places: Iterable[Place]) -> list[Place]:
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for component, layer in places:
            alike[-nbytes[component, layer], KINDS.index(component)].append(layer)
        return [
            (KINDS[kind], layer)
            for (_, kind), layers in sorted(alike.items())
            for layer in spaced(dict.fromkeys(layers, 0.0), middle)
        ]

    tolerant = by_saving(p for p in nbytes if drops.get(p, 0.0) <= gate)
    disturbed = by_saving(p for p in nbytes if drops.get(p, 0.0) > gate)
    return tolerant + sorted(disturbed, key=lambda p: drops[p])


def reference_order(groups: Sequence[Group], model: str, middle: float) -> list[list[tuple[Group, Slot]]]:
    """The reference's steps of one model: each its groups of one component, with the model's slot in them.

    Stage 1 goes by layers, MLPs first; a layer weighs as many models as would share each of its slots,
    summed over slots. Stage 2 follows the layers of stage 1, then adds places that stage 1 did not have,
    ordered in the same way among themselves. The order is one for all models that recipes link (a model
    that merely joined links nothing); each takes its own part. The reference's `middle` is 15.5, whatever
    the number of layers.
    """
    linked = _linked(groups, model)
    known = {pair for pair, *_ in _rows(g for g in linked if g.stage == 1)}
    ranks = [
        _rank(_rows(g for g in linked if g.stage == 1), middle),
        _rank((r for r in _rows(g for g in linked if g.stage == 2) if r[0] not in known), middle),
    ]
    ranked = []
    for group in linked:
        for slot in group.members:
            if slot.model == model:
                new = (slot.projection, slot.layer) not in known
                ranked.append((group.stage, new, ranks[new][slot.component, slot.layer], group, slot))
    ranked.sort(key=lambda r: r[:3])
    return [
        [(group, slot) for *_, group, slot in block]
        for _, block in groupby(ranked, key=lambda r: (r[0], r[4].component, r[4].layer))
    ]


def _linked(groups: Sequence[Group], model: str) -> list[Group]:
    """The groups whose contributors are linked, over any number of recipes, with those of the model's
    groups."""
    mine = [{c.model for c in g.recipe.contributors} for g in groups if model in {m.model for m in g.members}]
    models = set[str]().union(*mine)
    while True:
        linked = [g for g in groups if models & {c.model for c in g.recipe.contributors}]
        wider = models.union(*({c.model for c in g.recipe.contributors} for g in linked))
        if wider == models:
            return linked
        models = wider


def _rows(groups: Iterable[Group]) -> Iterable[tuple[tuple[str, int], Component, int]]:
    """A row a contributor: its (projection, layer), its component, and how many share the recipe."""
    for group in groups:
        contributors = group.recipe.contributors
        for c in contributors:
            yield (group.recipe.projection, c.layer), group.members[0].component, len(contributors)


def _rank(rows: Iterable[tuple[tuple[str, int], Component, int]], middle: float) -> dict[Place, int]:
    weights: dict[Component, dict[int, float]] = {kind: defaultdict(float) for kind in KINDS}
    for (_, layer), component, models in rows:
        weights[component][layer] += models
    order = [(kind, layer) for kind in KINDS for layer in spaced(weights[kind], middle)]
    return {place: at for at, place in enumerate(order)}
