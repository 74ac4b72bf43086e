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
    kept = sum(map(ladder_bytes, PRINTS.values()))
    assert weighed.bytes_written - plain.bytes_written == kept
    assert weighed.evaluations - plain.evaluations == 2 * len(PRINTS)
    assert weighed.bytes_read - plain.bytes_read == sum(f.nbytes for f in PRINTS.values())


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
