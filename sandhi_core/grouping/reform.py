"""The round of re-forming: averages made again by those who took them.

A contributor that was offered a shared tensor and is served its own matrix spoils the average for the others. At the
next regrouping it is left out, as long as the group has the same members with the same bytes. It stays a member: the
new tensor is offered to it as to all, and all are searched again. Who is left out once stays so, hence rounds come to
an end.
"""

from collections.abc import Collection, Iterable

from sandhi_core.records import Group, Groups, Recipe

Taken = Collection[tuple[str, str]]
"""(model, tensor) of what is served as a shared tensor."""


def reformed(groups: Iterable[Group], earlier: Groups, taken: Taken) -> tuple[Group, ...]:
    """`groups` as formed from scratch, with fewer contributors where `earlier` ones were offered and not `taken`."""
    before = {(g.members, g.recipe.method): g.recipe for g in earlier.groups}

    def recipe(group: Group) -> Recipe:
        return _left(group.recipe, before.get((group.members, group.recipe.method)), taken)

    return tuple(group.model_copy(update={"recipe": recipe(group)}) for group in groups)


def _left(recipe: Recipe, offered: Recipe | None, taken: Taken) -> Recipe:
    if recipe.taken is not None or offered is None or not set(offered.contributors) <= set(recipe.contributors):
        return recipe
    took = tuple(c for c in offered.contributors if (c.model, c.tensor) in taken)
    # One alone is no average, and none is no tensor: then what was offered is offered again.
    return recipe.model_copy(update={"contributors": took if len(took) > 1 else offered.contributors})
