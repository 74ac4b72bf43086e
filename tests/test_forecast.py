"""What a pool that compares methods is told beforehand."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandhi_core.costs import GRADIENT_PASSES, INPUT_PASSES, Cost, Costs, moments, spectra, tensors_tried, total
from sandhi_core.forecast import Forecast, costs, forecast
from sandhi_core.graph import STAGES, Catalogue, Node
from sandhi_core.pools.pool import Pool
from sandhi_core.preflight.pool import check_pool
from sandhi_core.records import Fingerprint
from sandhi_core.rungs.ladder import MOST_SCORES
from tests.synthetic import PROJECTIONS, fingerprint
from tests.test_graph import make_pool

LADDER = {"strategy": "ladder"}
PRINTS = {m: fingerprint(m) for m in "abc"}
SETS = 4 * len(PROJECTIONS)


def foreseen(merging: dict[str, Any], *stages: str, **sections: Any) -> Forecast:
    pool = _pool(merging, **sections)
    catalogue = Catalogue({"p": pool}, dict.fromkeys("abc", "g"))
    return told(catalogue, pool, PRINTS, [node for node in catalogue.graph() if node[0] in stages])


def told(catalogue: Catalogue, pool: Pool, prints: Mapping[str, Fingerprint], stale: Collection[Node]) -> Forecast:
    return forecast(catalogue, pool, prints, costs(catalogue, pool, prints, stale).values())


def _pool(merging: dict[str, Any], **sections: Any) -> Pool:
    return make_pool("p", "abc", merging=merging, **sections)


def test_comparing_decomposes_every_slot_by_every_method_and_a_ladder_only_then_not_again() -> None:
    two = {"methods": ["mean", "member"]}
    assert foreseen({}, "groups", "trajectory").decompositions == 0
    assert foreseen({}, "groups", "trajectory", search=LADDER).decompositions == 3 * SETS
    assert foreseen(two, "groups", "trajectory", search=LADDER).decompositions == 2 * 3 * SETS
    assert foreseen(two, "trajectory", search=LADDER).decompositions == 3 * SETS
    assert foreseen({"methods": ["regmean"]}, "groups").decompositions == 0


def test_moments_and_spectra_are_counted_where_groups_need_them() -> None:
    plain, weighed = foreseen({}, "groups"), foreseen({"methods": ["regmean"]}, "groups")
    assert weighed.bytes_written - plain.bytes_written == sum(map(moments, PRINTS.values()))
    assert weighed.evaluations - plain.evaluations == INPUT_PASSES * len(PRINTS)
    assert weighed.bytes_read - plain.bytes_read == sum(f.nbytes for f in PRINTS.values())


def test_scaled_rows_are_decomposed_and_kept_by_the_ladder_alone() -> None:
    rows, two = {"affine": "rows"}, {"methods": ["mean", "member"]}
    plain, scaled = foreseen({}, "trajectory", search=LADDER), foreseen(rows, "trajectory", search=LADDER)
    assert scaled.decompositions == 2 * plain.decompositions == 2 * 3 * SETS
    slots = sum(slot.nbytes for f in PRINTS.values() for slot in f.slots)
    assert scaled.bytes_written - plain.bytes_written == slots
    assert foreseen(two | rows, "groups", search=LADDER).decompositions == 2 * 3 * SETS
    assert foreseen(two | rows, "groups", "trajectory", search=LADDER).decompositions == 3 * 3 * SETS


def test_what_lies_beside_is_read_by_groups_and_seen_in_use_by_ladders_whatever_the_methods() -> None:
    for merging in ({}, {"methods": ["mean", "member"]}):
        both = [
            foreseen(merging, "groups", "trajectory", search=LADDER, grouping={"besides": kinds})
            for kinds in ([], ["norms"])
        ]
        assert both[1].evaluations - both[0].evaluations == 2 * len(PRINTS)
        beside = [f.nbytes - sum(slot.nbytes for slot in f.slots) for f in PRINTS.values()]
        assert both[1].bytes_read - both[0].bytes_read == sum(beside)
        assert both[1].bytes_written - both[0].bytes_written == max(beside)
        assert both[1].decompositions == both[0].decompositions


@pytest.mark.parametrize("search", [{"strategy": "walk"}, LADDER])
def test_comparing_also_weighs_by_what_answers_depend_on_whatever_the_strategy(search: dict[str, Any]) -> None:
    compared = foreseen({"methods": ["mean", "member"]}, "groups", search=search)
    assert compared.evaluations == (INPUT_PASSES + GRADIENT_PASSES) * len(PRINTS)
    assert foreseen({"methods": ["regmean"]}, "groups", search=search).evaluations == INPUT_PASSES * len(PRINTS)
    plain = foreseen({"methods": ["mean", "member"]}, "groups", search={**search, "errors": "outputs"})
    assert plain.evaluations == INPUT_PASSES * len(PRINTS)


def test_moments_and_spectra_are_kept_once_by_whichever_stage_makes_them() -> None:
    everything = sum(moments(f) + spectra(f) for f in PRINTS.values())
    exports = foreseen({}, "groups").bytes_written
    assert foreseen({}, "groups", "trajectory", search=LADDER).bytes_written == exports + everything
    for methods in (["regmean"], ["mean", "member"]):
        found = foreseen({"methods": methods}, "groups", "trajectory", search=LADDER)
        assert found.bytes_written == len(methods) * exports + everything


def test_a_group_that_is_formed_anew_makes_nothing_for_another() -> None:
    """Two compatibility groups: the ladders of one decompose by themselves when only the other's groups are stale."""
    prints = {m: fingerprint(m, width="narrow" if m in "ab" else "wide") for m in "abcd"}
    pool = make_pool("p", "abcd", merging={"methods": ["mean", "member"]}, search=LADDER)
    catalogue = Catalogue({"p": pool}, {"a": "g", "b": "g", "c": "h", "d": "h"})
    ladders = [("trajectory", f"p.{m}") for m in "abcd"]
    alone, g = told(catalogue, pool, prints, ladders), told(catalogue, pool, prints, [("groups", "p.g")])
    both = told(catalogue, pool, prints, [("groups", "p.g"), *ladders])
    assert alone.decompositions == 4 * SETS and g.decompositions == 2 * 2 * SETS
    assert both.decompositions == g.decompositions + 2 * SETS
    kept = sum(moments(prints[m]) + spectra(prints[m]) for m in "ab")
    assert both.bytes_written == g.bytes_written + alone.bytes_written - kept


def test_a_group_of_another_pool_counts_for_nothing() -> None:
    pools = {n: make_pool(n, "ab", merging={"methods": ["mean", "member"]}, search=LADDER) for n in "pq"}
    catalogue = Catalogue(pools, dict.fromkeys("ab", "g"))
    prints = {m: fingerprint(m) for m in "ab"}
    ladders = [("trajectory", "p.a"), ("trajectory", "p.b")]
    alone = told(catalogue, pools["p"], prints, ladders)
    assert told(catalogue, pools["p"], prints, [("groups", "q.g"), *ladders]) == alone


def test_slots_that_only_another_group_has_in_common_make_no_set() -> None:
    """Where the configurations differ, equal keys are no partners: each group is formed by itself."""
    costs = Costs(_pool({}), PRINTS)
    assert costs.of("groups", "a") == Cost() and costs.of("groups", "bc").bytes_written > 0


def test_costs_of_all_stages_are_what_a_build_from_nothing_takes() -> None:
    pool = _pool({"methods": ["mean", "member"]}, search=LADDER)
    catalogue = Catalogue({"p": pool}, dict.fromkeys("abc", "g"))
    found = told(catalogue, pool, PRINTS, list(catalogue.graph()))
    whole = total(Costs(pool, PRINTS, grouped=PRINTS).of(stage, PRINTS) for stage in STAGES)
    assert found.model_dump(include=set(asdict(whole))) == asdict(whole)
    each = costs(catalogue, pool, PRINTS, list(catalogue.graph()))
    assert each.keys() == catalogue.graph().keys() and total(each.values()) == whole
    assert each["holdout", "p.a"] == Costs(pool, PRINTS).of("holdout", "a")


@pytest.mark.parametrize(
    ("merging", "tried"),
    [
        ({}, 1),
        ({"methods": ["mean", "regmean", "member"]}, 3),
        ({"reform": True}, 1 + 3),
        ({"methods": ["regmean", "member", "mean"], "reform": True}, 3 + 2 * 3),
    ],
)
def test_shared_tensors_of_a_group_of_five(merging: dict[str, Any], tried: int) -> None:
    assert tensors_tried(5, _pool(merging)) == tried


def test_models_that_share_nothing_but_norms_climb_a_ladder_too() -> None:
    prints = {"a": fingerprint("a"), "b": fingerprint("b")}
    apart = tuple(s.model_copy(update={"key": f"{s.key}, b's own"}) for s in prints["b"].slots)
    prints["b"] = prints["b"].model_copy(update={"slots": apart})
    found = {}
    for kinds in ([], ["norms"]):
        pool = make_pool("p", "ab", search=LADDER, grouping={"besides": kinds})
        catalogue = Catalogue({"p": pool}, dict.fromkeys("ab", "g"))
        stale = [node for node in catalogue.graph() if node[0] == "holdout"]
        found[len(kinds)] = told(catalogue, pool, prints, stale).evaluations
        codes = {p.code for p in check_pool(pool, prints, None, Path("/"))}
        assert ("no-partner" in codes) == (not kinds)
    assert found == {0: 2, 1: 2 * (1 + MOST_SCORES)}
