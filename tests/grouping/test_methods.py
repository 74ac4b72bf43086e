"""Recipes of other methods than the mean: what they are made of, and what edits of a pool do to them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from sandhi_core.grouping.form import DUPLICATE, NO_BASE
from sandhi_core.grouping.groups import make_groups, make_plan
from sandhi_core.grouping.methods import Measures
from sandhi_core.pools.pool import GroupingSettings, MergingSettings
from sandhi_core.records import Contributor, Fingerprint, Groups, Recipe, Slot
from sandhi_core.rungs.allotment import Candidate
from sandhi_core.rungs.choice import Evidence
from tests.synthetic import PROJECTIONS, fingerprint, profile

BASE = "merging.bases[0]"
Cost = Callable[[Slot, Recipe], float]


def measures(
    cost: Cost = lambda slot, recipe: 1.0,
    bases: Mapping[str, Fingerprint] | None = None,
    near: str = "b",
    questions: str = "",
    rule: str = "",
) -> Measures:
    """Whoever is `near` is nearest to all; a difference's one direction costs `cost`."""

    def candidate(slot: Slot, recipe: Recipe) -> Candidate:
        return Candidate(np.array([cost(slot, recipe)]), (96, 64), float(slot.nbytes), 0)

    def distance(one: Slot, other: Slot) -> float:
        return 0.0 if near in (one.model, other.model) else 1.0

    known = {BASE: fingerprint(BASE)} if bases is None else bases
    return Measures(known, distance, lambda model: f"inputs of {model}{questions}", Evidence(candidate, rule=rule))


def groups(
    models: str,
    merging: dict[str, Any],
    given: Measures | None = None,
    earlier: Groups | None = None,
    removed: str = "reform",
    **versions: int,
) -> Groups:
    prints = {m: fingerprint(m, version=versions.get(m, 0)) for m in models}
    profiles = {m: profile(m) for m in models}
    grouping = GroupingSettings.model_validate({"on_removed_model": removed})
    settings = MergingSettings.model_validate(merging)
    return make_groups("pool", "pool.g", prints, profiles, grouping, settings, 0.05, earlier, measures=given)


def sources(record: Groups) -> set[tuple[str, ...]]:
    return {tuple(c.model for c in g.recipe.contributors) for g in record.groups}


def methods(record: Groups) -> set[str]:
    return {g.recipe.method for g in record.groups}


def test_a_mean_is_written_as_it_always_was() -> None:
    """Digests of recipes, plans and exports rest on these bytes."""
    record = groups("ab", {})
    group = json.loads(record.groups[0].canonical())
    assert set(group) == {"recipe", "members", "stage"}
    recipe = {"projection", "shape", "dtype", "method", "rescale", "contributors"}
    assert set(group["recipe"]) == recipe
    assert set(group["recipe"]["contributors"][0]) == {"model", "layer", "tensor", "digest"}
    assert "rule" not in json.loads(record.canonical())
    assert Groups.parse(record.canonical()) == record


def test_one_method_is_used_as_it_is() -> None:
    never = lambda slot, recipe: pytest.fail("compared")  # noqa: E731
    regmean = groups("abc", {"methods": ["regmean"]}, measures(never))
    assert sources(regmean) == {("a", "b", "c")}
    assert {c.inputs for g in regmean.groups for c in g.recipe.contributors} == {f"inputs of {m}" for m in "abc"}
    member = groups("abc", {"methods": ["member"]}, measures(never))
    assert sources(member) == {("b",)} and {g.recipe.payers for g in member.groups} == {()}
    base = groups("abc", {"methods": ["base"], "bases": ["x"]}, measures(never))
    assert sources(base) == {(BASE,)} and {g.recipe.payers for g in base.groups} == {("a", "b", "c")}
    for record in (regmean, member, base):
        assert len(record.groups) == 4 * len(PROJECTIONS) and all(not g.compared for g in record.groups)
        assert Groups.parse(record.canonical()) == record and record.rule


def test_each_group_chooses_by_what_its_members_would_pay() -> None:
    def cost(slot: Slot, recipe: Recipe) -> float:
        return 1e-3 if recipe.method == ("mean" if slot.layer % 2 else "base") else 1.0

    record = groups("abc", {"methods": ["mean", "base", "member"], "bases": ["x"]}, measures(cost))
    for group in record.groups:
        assert group.recipe.method == ("mean" if group.members[0].layer % 2 else "base")
        assert set(group.compared) == {"mean", "base", "member"}
        assert group.compared[group.recipe.method] == min(group.compared.values())


def test_the_nearest_of_several_bases_is_offered() -> None:
    bases = {f"merging.bases[{n}]": fingerprint(f"merging.bases[{n}]") for n in range(3)}
    record = groups(
        "ab", {"methods": ["base"], "bases": ["x", "y", "z"]}, measures(bases=bases, near="merging.bases[1]")
    )
    assert sources(record) == {("merging.bases[1]",)}


def test_a_base_of_another_shape_offers_nothing() -> None:
    wide = measures(bases={BASE: fingerprint(BASE, width="wide")})
    record = groups("ab", {"methods": ["mean", "base"], "bases": ["x"]}, wide)
    assert methods(record) == {"mean"} and {tuple(g.compared) for g in record.groups} == {("mean",)}
    alone = groups("ab", {"methods": ["base"], "bases": ["x"]}, wide)
    assert not alone.groups and {e.reason for e in alone.excluded} == {NO_BASE}
    shallow = groups("ab", {"methods": ["base"], "bases": ["x"]}, measures(bases={BASE: fingerprint(BASE, 2)}))
    assert {g.members[0].layer for g in shallow.groups} == {0, 1}


def test_whose_bytes_are_shared_has_no_step_there() -> None:
    record = groups("abc", {"methods": ["member"]}, measures())
    plans = {m: make_plan(record, fingerprint(m), profile(m), "pool") for m in "abc"}
    assert [len(p.steps) for p in plans.values()] == [8, 0, 8]


def test_a_base_that_a_model_holds_is_paid_for_by_that_model() -> None:
    frozen = {(1, "up"): "frozen"}
    base = fingerprint(BASE, bytes_of=frozen)
    prints = {m: fingerprint(m, bytes_of=frozen if m == "a" else None) for m in "abc"}
    settings = MergingSettings.model_validate({"methods": ["base"], "bases": ["x"]})
    known = {m: profile(m) for m in "abc"}
    record = make_groups(
        "p", "p.g", prints, known, GroupingSettings(), settings, 0.05, None, measures=measures(bases={BASE: base})
    )
    payers = {(g.members[0].layer, g.recipe.projection): g.recipe.payers for g in record.groups}
    assert payers.pop((1, "up")) == ("a",) and set(payers.values()) == {("a", "b", "c")}
    assert not any(
        m.tensor == "1.up" for step in make_plan(record, prints["a"], known["a"], "p").steps for m in step.merges
    )


@pytest.mark.parametrize(("before", "after"), [("a", ""), ("", "a"), ("ab", "b"), ("a", "b")])
def test_who_pays_for_a_base_follows_who_holds_it(before: str, after: str) -> None:
    """But for a model that joins: it changes nobody's recipe, now or in the next build."""
    base = fingerprint(BASE, 1, bytes_of={(0, "up"): "frozen"})
    settings = MergingSettings.model_validate({"methods": ["base"], "bases": ["x"]})

    def formed(models: str, holding: str, earlier: Groups | None = None) -> Groups:
        prints = {m: fingerprint(m, 1, bytes_of={(0, "up"): "frozen"} if m in holding else None) for m in models}
        known = {m: profile(m, 1) for m in models}
        given = measures(bases={BASE: base})
        return make_groups("p", "p.g", prints, known, GroupingSettings(), settings, 0.05, earlier, measures=given)

    def payers(record: Groups) -> tuple[str, ...]:
        return next(g.recipe.payers for g in record.groups if g.recipe.projection == "up")

    first = formed("abc", before)
    assert payers(first) == tuple(before or "abc")
    joined = formed("abcd", before + "d", first)
    assert payers(joined) == payers(formed("abcd", before + "d", joined)) == payers(first)
    assert payers(formed("abc", after, first)) == tuple(after or "abc")
    assert payers(formed("abcd", after, formed("abcd", before, first))) == tuple(after or "abcd")


EVERY: list[dict[str, Any]] = [
    {"methods": ["regmean"]},
    {"methods": ["member"]},
    {"methods": ["base"], "bases": ["x"]},
    {"methods": ["base", "mean", "member", "regmean"], "bases": ["x"]},
    {"methods": ["mean"], "reform": True},
]


@pytest.mark.parametrize("merging", EVERY)
def test_who_joins_changes_no_recipe_and_chooses_nothing(merging: dict[str, Any]) -> None:
    before = groups("abc", merging, measures())
    never = lambda slot, recipe: pytest.fail("compared again")  # noqa: E731
    after = groups("abcd", merging, measures(never), before)
    assert [g.recipe for g in after.groups] == [g.recipe for g in before.groups]
    assert [g.compared for g in after.groups] == [g.compared for g in before.groups]
    assert all([m.model for m in g.members] == list("abcd") for g in after.groups)


@pytest.mark.parametrize("removed", ["reform", "keep"])
def test_who_leaves_takes_what_was_theirs_along_unless_it_is_kept(removed: str) -> None:
    member = {"methods": ["member"]}
    before = groups("abc", member, measures())
    assert sources(groups("ac", member, measures(near="c"), before, removed)) == {
        ("c" if removed == "reform" else "b",)
    }
    assert sources(groups("ab", member, measures(near="a"), before, removed)) == {("b",)}  # its owner is still there
    base = {"methods": ["base"], "bases": ["x"]}
    left = groups("ab", base, measures(), groups("abc", base, measures()), removed)
    assert {g.recipe.payers for g in left.groups} == {("a", "b") if removed == "reform" else ("a", "b", "c")}


def test_changed_bytes_and_questions_are_pinned_anew_without_a_new_choice() -> None:
    every = {"methods": ["regmean", "mean"]}
    before = groups("abc", every, measures())
    never = lambda slot, recipe: pytest.fail("compared again")  # noqa: E731
    bytes_of = groups("abc", every, measures(never), before, a=1)
    assert methods(bytes_of) == {"regmean"}
    assert all(
        x.digest != y.digest
        for g, h in zip(before.groups, bytes_of.groups, strict=True)
        for x, y in [(g.recipe.contributors[0], h.recipe.contributors[0])]
    )
    asked = groups("abc", every, measures(never, questions="!"), before)
    assert {c.inputs for g in asked.groups for c in g.recipe.contributors} == {f"inputs of {m}!" for m in "abc"}
    base = {"methods": ["base"], "bases": ["x"]}
    formed = groups("abc", base, measures())
    assert [g.recipe for g in groups("abc", base, measures(), formed, a=1).groups] == [g.recipe for g in formed.groups]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"methods": ["regmean"]}),
        ({"methods": ["member"]}, {}),
        ({"methods": ["mean", "member"]}, {"methods": ["member", "mean"]}),
        ({"methods": ["mean", "member"]}, {"methods": ["mean"], "reform": True}),
    ],
)
def test_other_methods_form_everything_anew(before: dict[str, Any], after: dict[str, Any]) -> None:
    first = groups("abc", before, measures())
    assert groups("abc", after, measures(), first) == groups("abc", after, measures())


def test_other_evidence_forms_everything_anew_where_methods_are_compared_and_only_there() -> None:
    far: Cost = lambda slot, recipe: 1.0 if recipe.method == "mean" else 1e-3  # noqa: E731
    near: Cost = lambda slot, recipe: 1e-3 if recipe.method == "mean" else 1.0  # noqa: E731
    every = {"methods": ["mean", "member"]}
    first = groups("abc", every, measures(far, rule="answers"))
    again = groups("abcd", every, measures(near, rule="outputs"), first)
    assert methods(first) == {"member"} and methods(again) == {"mean"}
    assert again == groups("abcd", every, measures(near, rule="outputs"))
    member = {"methods": ["member"]}
    formed = groups("abc", member, measures(rule="answers"))
    assert groups("abc", member, measures(rule="outputs"), formed) == formed


def test_another_base_forms_everything_anew() -> None:
    base = {"methods": ["base"], "bases": ["x"]}
    first = groups("abc", base, measures())
    other = measures(bases={BASE: fingerprint(BASE, version=1)})
    assert groups("abcd", base, other, first) == groups("abcd", base, other) != first


def test_a_base_changes_nothing_where_bytes_are_equal_already() -> None:
    same = {(1, "up"): "frozen"}
    prints = {m: fingerprint(m, bytes_of=same) for m in "ab"}
    settings = MergingSettings.model_validate({"methods": ["base"], "bases": ["x"]})
    known = {m: profile(m) for m in "ab"}
    make = lambda earlier: make_groups(  # noqa: E731
        "p", "p.g", prints, known, GroupingSettings(), settings, 0.05, earlier, measures=measures()
    )
    record = make(None)
    assert [e.reason for e in record.excluded] == [DUPLICATE] * 2
    assert make(record) == record


def test_a_contributor_says_what_weighs_it_only_where_something_does() -> None:
    plain = Contributor(model="a", layer=0, tensor="t", digest="d")
    assert plain.model_dump() == {"model": "a", "layer": 0, "tensor": "t", "digest": "d"}
    weighed = plain.model_copy(update={"inputs": "k"})
    assert Contributor.model_validate(weighed.model_dump()) == weighed != plain
