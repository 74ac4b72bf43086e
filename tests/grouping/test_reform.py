"""Averages are made again by those who took them; everything else of a regrouping is as from scratch."""

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.grouping.groups import make_groups
from sandhi_core.grouping.reform import Makers, as_before, reformed, who_took
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Groups, Recipe
from tests.synthetic import fingerprint, profile

POOL = {m: fingerprint(m, 2) for m in "abcd"}


Taken = Collection[tuple[str, str]]
"""(model, tensor) of who is served what was offered to all."""


def groups(pool: dict[str, Fingerprint] = POOL, earlier: Groups | None = None, taken: Taken | None = None) -> Groups:
    return formed(pool, earlier, None if taken is None else makers_of(taken))


def formed(
    pool: dict[str, Fingerprint], earlier: Groups | None, by: Makers | None, rule: GroupingSettings | None = None
) -> Groups:
    profiles = {m: profile(m, f.layers) for m, f in pool.items()}
    return make_groups(
        "p", "p.g", pool, profiles, rule or GroupingSettings(), MergingSettings(), 0.05, earlier, makers=by
    )


def makers_of(taken: Taken) -> Makers:
    return who_took(dict.fromkeys(taken, "made"), lambda recipe: "made")


def everything(models: str) -> set[tuple[str, str]]:
    return {(m, slot.tensor) for m in models for slot in POOL[m].slots}


def makers(record: Groups) -> set[str]:
    return {"".join(c.model for c in group.recipe.contributors) for group in record.groups}


def test_who_did_not_take_a_tensor_makes_it_no_more_and_is_offered_it_still() -> None:
    first = groups()
    second = groups(earlier=first, taken=everything("abd"))
    assert makers(first) == {"abcd"} and makers(second) == {"abd"}
    assert [g.members for g in second.groups] == [g.members for g in first.groups]


def test_each_tensor_has_those_who_took_it() -> None:
    (one, *_) = groups().groups
    refused = {("c", m.tensor) for m in one.members if m.model == "c"}
    found = groups(earlier=groups(), taken=everything("abcd") - refused)
    assert makers(found) == {"abcd", "abd"}
    assert [g.members[0].tensor for g in found.groups if len(g.recipe.contributors) == 3] == [one.members[0].tensor]


def test_rounds_end() -> None:
    """Who was left out and takes the new tensor does not come back, so that nobody is left out in turns."""
    second = groups(earlier=groups(), taken=everything("abd"))
    assert groups(earlier=second, taken=everything("abcd")) == second
    third = groups(earlier=second, taken=everything("acd"))
    assert makers(third) == {"ad"}
    assert groups(earlier=third, taken=everything("a")) == third == groups(earlier=third, taken=())


def test_who_joined_and_takes_the_tensor_makes_it_at_the_next_regrouping_and_who_does_not_stays_a_guest() -> None:
    wider = POOL | {m: fingerprint(m, 2) for m in "ef"}
    joined = groups(wider, groups())
    assert makers(joined) == {"abcd"} and {len(g.members) for g in joined.groups} == {6}
    everybody = {(m, s.tensor) for m in "abcde" for s in wider[m].slots}
    second = groups(wider, joined, everybody)
    assert makers(second) == {"abcde"} and all(g.left_out == () for g in second.groups)
    # c is left out, and f comes in; then e goes, and c does not come back whatever it takes
    third = groups(wider, second, {(m, s.tensor) for m in "abdef" for s in wider[m].slots})
    assert makers(third) == {"abdef"} and {c.model for g in third.groups for c in g.left_out} == {"c"}
    fourth = groups(wider, third, {(m, s.tensor) for m in "abcdf" for s in wider[m].slots})
    assert makers(fourth) == {"abdf"} and {c.model for g in fourth.groups for c in g.left_out} == {"c", "e"}
    assert groups(wider, fourth, {(m, s.tensor) for m in wider for s in wider[m].slots}) == fourth


def test_records_of_groups_nobody_was_left_out_of_are_what_they_were() -> None:
    assert b"left_out" not in groups().canonical()


def test_what_changed_is_formed_by_all() -> None:
    second = groups(earlier=groups(), taken=everything("abd"))
    moved = POOL | {"c": fingerprint("c", 2, bytes_of={(0, "up"): "new"})}
    by_size = {len(g.recipe.contributors): g for g in groups(moved, second, everything("abd")).groups}
    assert by_size.keys() == {3, 4} and (by_size[4].members[0].layer, by_size[4].recipe.projection) == (0, "up")
    joined = groups(POOL | {"e": fingerprint("e", 2)}, second, everything("abd"))
    assert makers(joined) == {"abcde"}
    without = {m: POOL[m] for m in "abc"}
    assert groups(without, second, everything("ab")) == groups(without)


def test_without_a_deployment_or_earlier_groups_all_make_it() -> None:
    second = groups(earlier=groups(), taken=everything("abd"))
    assert groups(taken=everything("ab")) == groups()
    assert groups(earlier=second) == second  # no regrouping


@given(st.sets(st.sampled_from(sorted(everything("abcd")))), st.sets(st.sampled_from(sorted(everything("abcd")))))
def test_makers_only_ever_become_fewer_and_are_never_one(
    taken: set[tuple[str, str]], then: set[tuple[str, str]]
) -> None:
    first = groups()
    second = reformed(first.groups, first, makers_of(taken))
    third = reformed(first.groups, first.model_copy(update={"groups": second}), makers_of(then))
    for whole, fewer, fewest in zip(first.groups, second, third, strict=True):
        made = [set(g.recipe.contributors) for g in (whole, fewer, fewest)]
        assert made[0] >= made[1] >= made[2] and len(made[2]) > 1
        assert set(fewest.left_out) == made[0] - made[2]
        assert whole.members == fewer.members == fewest.members


def test_who_was_not_offered_the_tensor_yet_has_not_refused_it() -> None:
    """e joined and its search goes on, or its proof failed: what is served is the average without it."""
    wider = POOL | {"e": fingerprint("e", 2)}
    joined = groups(wider)
    served = dict.fromkeys(everything("abcd"), "without e")
    assert formed(wider, joined, who_took(served, lambda recipe: "with e")) == joined
    assert formed(wider, joined, who_took(served, lambda recipe: None)) == joined


def test_what_models_hold_alike_without_sharing_it_is_not_taken() -> None:
    """Two equal originals are one tensor in the export, though both refused the average."""
    served = dict.fromkeys(everything("ab"), "their own") | dict.fromkeys(everything("cd"), "made")

    def made(recipe: Recipe) -> str:
        return "made"

    assert makers(formed(POOL, groups(), who_took(served, made))) == {"cd"}


def test_a_rerun_that_is_no_regrouping_brings_nobody_back() -> None:
    scratch = GroupingSettings(on_new_model="regroup", on_regroup="accepted")
    second = formed(POOL, groups(), makers_of(everything("abd")), scratch)
    assert makers(second) == {"abd"}
    assert formed(POOL, second, as_before, scratch) == second
