"""What a pool that compares methods is told beforehand."""

from typing import Any

import pytest

from sandhi_core.forecast import Forecast, forecast, ladder_bytes, tensors_tried
from sandhi_core.graph import Catalogue
from sandhi_core.pool import Pool
from tests.synthetic import PROJECTIONS, fingerprint
from tests.test_graph import make_pool

LADDER = {"strategy": "ladder"}
PRINTS = {m: fingerprint(m) for m in "abc"}
SETS = 4 * len(PROJECTIONS)


def foreseen(merging: dict[str, Any], *stages: str, **sections: Any) -> Forecast:
    pool = _pool(merging, **sections)
    catalogue = Catalogue({"p": pool}, dict.fromkeys("abc", "g"))
    return forecast(catalogue, pool, PRINTS, [node for node in catalogue.graph() if node[0] in stages])


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
    kept = sum(ladder_bytes(f, _pool({})) for f in PRINTS.values())
    assert weighed.bytes_written - plain.bytes_written == kept
    assert weighed.evaluations - plain.evaluations == 2 * len(PRINTS)
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
