"""Averages are made again by those who took them; everything else of a regrouping is as from scratch."""

from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.grouping.groups import make_groups
from sandhi_core.grouping.reform import Taken, reformed
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Groups
from tests.synthetic import fingerprint, profile

POOL = {m: fingerprint(m, 2) for m in "abcd"}


def groups(pool: dict[str, Fingerprint] = POOL, earlier: Groups | None = None, taken: Taken | None = None) -> Groups:
    profiles = {m: profile(m, f.layers) for m, f in pool.items()}
    return make_groups("p", "p.g", pool, profiles, GroupingSettings(), MergingSettings(), 0.05, earlier, taken=taken)


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
    second = reformed(first.groups, first, taken)
    third = reformed(first.groups, first.model_copy(update={"groups": second}), then)
    for whole, fewer, fewest in zip(first.groups, second, third, strict=True):
        made = [set(g.recipe.contributors) for g in (whole, fewer, fewest)]
        assert made[0] >= made[1] >= made[2] and len(made[2]) > 1
        assert whole.members == fewer.members == fewest.members
