from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.grouping.form import DISTURBED, DUPLICATE, NO_PARTNER
from sandhi_core.grouping.groups import make_groups, make_plan
from sandhi_core.grouping.join import NOT_JOINED
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Fingerprint, Groups, Plan, Profile
from tests.synthetic import PROJECTIONS, fingerprint, profile

WIDE = GroupingSettings()
REFERENCE = GroupingSettings(candidates="reference")


def groups(
    fingerprints: list[Fingerprint],
    earlier: Groups | None = None,
    grouping: GroupingSettings = WIDE,
    profiles: Mapping[str, Profile] | None = None,
    gate: float = 0.05,
) -> Groups:
    known = {f.model: profile(f.model, f.layers) for f in fingerprints} | dict(profiles or {})
    by_model = {f.model: f for f in fingerprints}
    merging = MergingSettings()
    return make_groups("pool", "pool.g", by_model, known, grouping, merging, gate, earlier)


def plans(record: Groups, fingerprints: list[Fingerprint]) -> dict[str, Plan]:
    return {f.model: make_plan(record, f, profile(f.model, f.layers), "pool") for f in fingerprints}


def reasons(record: Groups, model: str) -> set[str]:
    return {e.reason for e in record.excluded if e.model == model}


def models_of(record: Groups) -> set[tuple[str, ...]]:
    return {tuple(c.model for c in g.recipe.contributors) for g in record.groups}


def test_wide_takes_every_same_layer_set_and_says_why_others_are_out() -> None:
    a, b, shallow, other = (
        fingerprint("a", 4),
        fingerprint("b", 4),
        fingerprint("shallow", 2),
        fingerprint("z", 4, width="wide"),
    )
    record = groups([a, b, shallow, other])
    assert len(record.groups) == 4 * len(PROJECTIONS)
    for group in record.groups:
        layer = group.members[0].layer
        assert [m.model for m in group.members] == (["a", "b", "shallow"] if layer < 2 else ["a", "b"])
        assert {m.layer for m in group.members} == {layer}
        assert {m.projection for m in group.members} == {group.recipe.projection}
        assert [(c.model, c.digest) for c in group.recipe.contributors] == [(m.model, m.digest) for m in group.members]
    assert [e.model for e in record.excluded] == ["z"] * 4 * len(PROJECTIONS)
    assert reasons(record, "z") == {NO_PARTNER}


def test_equal_bytes_need_no_recipe() -> None:
    same = {(1, "up"): "frozen"}
    record = groups([fingerprint("a", bytes_of=same), fingerprint("b", bytes_of=same)])
    assert [(e.layer, e.projection, e.reason) for e in record.excluded] == [(1, "up", DUPLICATE)] * 2
    assert not any(g.members[0].layer == 1 and g.recipe.projection == "up" for g in record.groups)
    mixed = groups([fingerprint("a", bytes_of=same), fingerprint("b", bytes_of=same), fingerprint("c")])
    assert not mixed.excluded


def test_reference_leaves_out_what_noise_disturbs() -> None:
    models = [fingerprint(m, stats=_stats(m)) for m in "abc"]
    disturbed = {"b": profile("b", drops={("mlp", 2): 0.2})}
    record = groups(models, grouping=REFERENCE, profiles=disturbed)
    assert record.candidates == "reference" and record.groups
    out = {(e.layer, e.projection) for e in record.excluded if e.reason == DISTURBED}
    assert out == {(2, "gate"), (2, "up"), (2, "down")}
    assert {e.model for e in record.excluded if e.reason == DISTURBED} == {"b"}


def _stats(model: str) -> dict[tuple[int, str], tuple[float, float]]:
    """Layers far apart, models close to each other: stage 1 finds every layer."""
    shift = {"a": 0.0, "b": 0.01, "c": 0.02}[model]
    return {(n, p): (n + shift, 2.0 * n + shift) for n in range(4) for p in PROJECTIONS}


def test_reference_finds_layers_that_look_alike() -> None:
    record = groups([fingerprint(m, stats=_stats(m)) for m in "abc"], grouping=REFERENCE)
    assert {(g.recipe.projection, g.members[0].layer, g.stage, len(g.members)) for g in record.groups} == {
        (p, n, 1, 3) for p in PROJECTIONS for n in range(4)
    }


@pytest.mark.parametrize("grouping", [WIDE, REFERENCE])
def test_a_model_that_joins_leaves_every_other_plan_as_it_was(grouping: GroupingSettings) -> None:
    old = [fingerprint(m, stats=_stats(m)) for m in "ab"]
    before = groups(old, grouping=grouping)
    joined = [*old, fingerprint("c", 6, stats=_stats("c"))]
    after = groups(joined, before, grouping)
    was, now = plans(before, old), plans(after, joined)
    assert {m: now[m].canonical() for m in "ab"} == {m: p.canonical() for m, p in was.items()}
    assert before.groups and models_of(after) == {("a", "b")}
    # The newcomer tries the very same tensors in the layers it has in common with them.
    recipes = {merge.recipe for step in now["c"].steps for merge in step.merges}
    assert recipes == {merge.recipe for step in was["a"].steps for merge in step.merges}
    assert {e.layer for e in after.excluded if e.model == "c"} == {4, 5}


def test_newcomers_share_among_themselves_what_the_old_groups_lack() -> None:
    old = [fingerprint("a", 2), fingerprint("b", 2)]
    new = [fingerprint("c", 3), fingerprint("d", 3)]
    before = groups(old)
    after = groups([*old, *new], before)
    assert {g.members[0].layer for g in after.groups if len(g.recipe.contributors) == 2} == {0, 1, 2}
    third = [g for g in after.groups if g.members[0].layer == 2]
    assert {tuple(m.model for m in g.members) for g in third} == {("c", "d")}
    assert plans(after, old) == plans(before, old)


def test_a_model_that_was_alone_is_grouped_with_the_first_that_fits() -> None:
    alone = fingerprint("a")
    before = groups([alone])
    assert not before.groups and reasons(before, "a") == {NO_PARTNER}
    assert models_of(groups([alone, fingerprint("b")], before)) == {("a", "b")}


def test_what_old_models_have_left_over_is_not_given_to_a_newcomer() -> None:
    deep, shallow = fingerprint("a", 3), fingerprint("b", 2)
    before = groups([deep, shallow])
    after = groups([deep, shallow, fingerprint("c", 3)], before)
    assert {(e.model, e.layer) for e in after.excluded} == {("a", 2), ("c", 2)}
    assert reasons(after, "c") == reasons(after, "a") == {NOT_JOINED}


def test_regroup_makes_the_newcomer_a_contributor() -> None:
    old = [fingerprint("a"), fingerprint("b")]
    regroup = GroupingSettings(on_new_model="regroup")
    after = groups([*old, fingerprint("c")], groups(old), regroup)
    assert models_of(after) == {("a", "b", "c")}
    assert after == groups([*old, fingerprint("c")], None, regroup)


def test_another_rule_regroups() -> None:
    models = [fingerprint(m, stats=_stats(m)) for m in "abc"]
    before = groups(models[:2])
    assert groups(models, before, REFERENCE) == groups(models, None, REFERENCE)
    early = groups(models[:2], grouping=REFERENCE)
    assert groups(models, early, REFERENCE, gate=0.1) == groups(models, None, REFERENCE, gate=0.1)
    assert models_of(groups(models, before, gate=0.1)) == {("a", "b")}


def test_changed_weights_are_pinned_anew_and_change_nothing_else() -> None:
    a, b, c = fingerprint("a"), fingerprint("b"), fingerprint("c")
    before = groups([a, b, c], groups([a, b]))
    again = fingerprint("a", version=1)
    after = groups([again, b, c], before)
    assert models_of(after) == {("a", "b")}
    digests = {s.digest for s in again.slots}
    assert {x.digest for g in after.groups for x in g.recipe.contributors if x.model == "a"} == digests
    changed = groups([a, b, fingerprint("c", version=1)], before)
    assert plans(changed, [a, b]) == plans(before, [a, b])


def test_a_removed_contributor_reforms_its_recipes_or_stays_pinned() -> None:
    a, b, c = fingerprint("a"), fingerprint("b"), fingerprint("c")
    before = groups([a, b, c])
    reformed = groups([a, b], before)
    assert models_of(reformed) == {("a", "b")} and reformed.models == ("a", "b")
    kept = groups([a, b], before, GroupingSettings(on_removed_model="keep"))
    assert models_of(kept) == {("a", "b", "c")}
    assert plans(kept, [a, b]) == plans(before, [a, b])
    assert {m.model for g in kept.groups for m in g.members} == {"a", "b"}
    # Back again, it finds its own contribution; with other bytes, the recipe has those.
    assert plans(groups([a, b, c], kept), [a, b]) == plans(before, [a, b])


@pytest.mark.parametrize("on_removed", ["reform", "keep"])
def test_a_group_of_one_is_no_group(on_removed: str) -> None:
    settings = GroupingSettings.model_validate({"on_removed_model": on_removed})
    a, b = fingerprint("a"), fingerprint("b")
    before = groups([a, b])
    left = groups([a], before, settings)
    assert not left.groups and len(left.excluded) == len(a.slots)
    assert models_of(groups([a, fingerprint("c")], before, settings)) == {("a", "c")}


def test_a_slot_that_means_something_else_leaves_its_group() -> None:
    a, b, c = fingerprint("a"), fingerprint("b"), fingerprint("c")
    before = groups([a, b, c])
    after = groups([a, b, fingerprint("c", width="wide")], before)
    assert models_of(after) == {("a", "b")}
    assert reasons(after, "c") == {NO_PARTNER}


def test_duplicates_that_part_are_grouped_and_members_that_become_equal_are_not() -> None:
    same = {(1, "up"): "frozen"}
    a, b = fingerprint("a", bytes_of=same), fingerprint("b", bytes_of=same)
    together = groups([a, b])
    parted = groups([a, fingerprint("b")], together)
    assert not parted.excluded and len(parted.groups) == len(a.slots)
    assert [e.reason for e in groups([a, b], parted).excluded] == [DUPLICATE] * 2
    joined = groups([a, b, fingerprint("c")], together)
    assert plans(joined, [a, b]) == plans(together, [a, b])


sizes = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5), min_size=1, max_size=5)


@given(sizes, sizes, st.sampled_from([WIDE, GroupingSettings(on_removed_model="keep")]))
def test_nothing_changes_when_nothing_changed(
    first: dict[str, int], second: dict[str, int], grouping: GroupingSettings
) -> None:
    start = groups([fingerprint(m, n) for m, n in first.items()])
    models = [fingerprint(m, n) for m, n in second.items()]
    once = groups(models, start, grouping)
    assert groups(models, once, grouping).canonical() == once.canonical()
    grouped = [(m.model, m.tensor) for g in once.groups for m in g.members]
    assert len(grouped) == len(set(grouped))
    assert len(grouped) + len(once.excluded) == sum(len(f.slots) for f in models)


@given(sizes, st.randoms())
def test_the_order_in_which_models_are_given_does_not_matter(sizes: dict[str, int], random: object) -> None:
    models = [fingerprint(m, n) for m, n in sizes.items()]
    shuffled = list(models)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert groups(shuffled).canonical() == groups(models).canonical()


def test_a_plan_covers_each_groups_slot_once_in_file_order_of_projections() -> None:
    models = [fingerprint("a"), fingerprint("b")]
    plan = plans(groups(models), models)["a"]
    assert plan.fingerprint == models[0].digest
    assert sorted(m.tensor for s in plan.steps for m in s.merges) == sorted(s.tensor for s in models[0].slots)
    for step in plan.steps:
        projections = [m.projection for m in step.merges]
        assert projections == (["gate", "up", "down"] if step.component == "mlp" else ["q", "k", "v", "o"])
        assert all(f".{step.layer}." in m.tensor for m in step.merges)
        assert all(m.nbytes == m.recipe.nbytes for m in step.merges)


def test_a_model_without_groups_has_an_empty_plan() -> None:
    models = [fingerprint("a"), fingerprint("b"), fingerprint("z", width="wide")]
    assert plans(groups(models), models)["z"].steps == ()
