"""The round of re-forming: averages made again by those who took them.

A contributor that was offered a shared tensor and is served its own matrix spoils the average for the others. At the
next regrouping it is left out, as long as the group has the same members with the same bytes. It stays a member: the
new tensor is offered to it as to all, and all are searched again. A member that joined later and is served the shared
tensor makes it too from then on. Who is left out once stays so, hence rounds come to an end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from sandhi_core.records import Contributor, Group, Groups, Recipe

Makers = Callable[[Recipe, Sequence[Contributor]], tuple[Contributor, ...]]
"""Of a recipe that was offered, and of those who may make its tensor: who is to make it from now on."""


def as_before(recipe: Recipe, able: Sequence[Contributor]) -> tuple[Contributor, ...]:
    """Those who made it."""
    return recipe.contributors


def who_took(served: Mapping[tuple[str, str], str], made: Callable[[Recipe], str | None]) -> Makers:
    """Those who are `served` what a recipe made: both as digests, of a (model, tensor) and of a recipe. A recipe that
    nobody was offered yet is made as before."""

    def makers(recipe: Recipe, able: Sequence[Contributor]) -> tuple[Contributor, ...]:
        digest = made(recipe)
        took = tuple(c for c in able if served.get((c.model, c.tensor)) == digest)
        # One alone is no average, and none is no tensor: then what was offered is offered again.
        return took if digest is not None and len(took) > 1 else recipe.contributors

    return makers


def reformed(groups: Iterable[Group], earlier: Groups, makers: Makers) -> tuple[Group, ...]:
    """`groups` as formed from scratch, each with the `makers` of its `earlier` recipe, where it had one."""
    before = {(g.members, g.recipe.method): g for g in earlier.groups}

    def again(group: Group) -> Group:
        offered, everybody = before.get((group.members, group.recipe.method)), group.recipe.contributors
        if group.recipe.taken is not None or offered is None or not {*offered.recipe.contributors} <= {*everybody}:
            return group
        made = makers(offered.recipe, [c for c in everybody if c not in offered.left_out])
        left_out = {*offered.left_out, *offered.recipe.contributors}.difference(made)
        recipe = group.recipe.model_copy(update={"contributors": made})
        return group.model_copy(update={"recipe": recipe, "left_out": tuple(c for c in everybody if c in left_out)})

    return tuple(map(again, groups))
