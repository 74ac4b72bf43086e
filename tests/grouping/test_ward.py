import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.grouping.ward import Point, standardised, ward_groups


def points(*rows: tuple[str, int, float, float]) -> list[Point]:
    return [Point(*row) for row in rows]


def test_same_layer_members_of_a_cluster_come_first_and_a_leftover_goes_to_stage_two() -> None:
    # Two tight clusters: around (0, 0) with layer 0 of a, b and layer 1 of c; around (9, 9) the rest.
    rows = points(
        ("a", 0, 0.0, 0.0),
        ("a", 1, 9.0, 9.0),
        ("b", 0, 0.1, 0.0),
        ("b", 1, 9.1, 9.0),
        ("c", 0, 9.0, 9.1),
        ("c", 1, 0.0, 0.1),
    )
    found = ward_groups(rows)
    assert set(found.same_layer) == {(0, 2), (1, 3)}
    # c's rows were placed with those sets, so stage 2 clusters all of them again, a row a model.
    assert sorted(found.across) == [(0, 2, 5), (1, 3, 4)]


def test_sets_settled_by_stage_one_do_not_come_again() -> None:
    rows = points(("a", 0, 0.0, 0.0), ("b", 0, 0.1, 0.0), ("a", 1, 9.0, 9.0), ("b", 1, 9.1, 9.0))
    found = ward_groups(rows)
    assert set(found.same_layer) == {(0, 1), (2, 3)}
    assert found.across == ()


def test_stage_two_takes_the_row_nearest_to_the_centroid() -> None:
    # One cluster (two models, three rows: k rounds to 2), no layer in common.
    rows = points(("a", 0, 0.0, 0.0), ("a", 1, 5.0, 5.0), ("b", 2, 0.2, 0.0))
    assert ward_groups(rows).across == ((0, 2),)


def test_one_row_a_model_is_left_to_stage_two() -> None:
    rows = points(("a", 3, 0.0, 0.0), ("b", 3, 1.0, 0.0))
    found = ward_groups(rows)
    assert found.same_layer == () and found.across == ((0, 1),)


ONE = ("a", 0, 0.0, 1.0)


@pytest.mark.parametrize("rows", [[], points(ONE), points(ONE, ("a", 1, 0.0, 1.0))])
def test_one_model_shares_with_nobody(rows: list[Point]) -> None:
    found = ward_groups(rows)
    assert found.same_layer == () and found.across == ()


def test_standardised_has_no_scale_and_no_offset() -> None:
    own = (("a", 0, 1e-6, 0.02), ("a", 1, 3e-6, 0.02), ("a", 2, 5e-6, 0.02))
    other = (("b", 0, 2.0, 7.0), ("b", 1, 6.0, 8.0), ("b", 2, 10.0, 9.0), ("c", 0, 4.0, 4.0))
    z = standardised(points(own[0], *other, *own[1:]))
    assert [p.mean for p in z] == pytest.approx([-1.0, -1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    assert [p.std for p in z] == pytest.approx([0.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert [(p.model, p.layer) for p in z][:2] == [("a", 0), ("b", 0)]


finite = st.floats(-10, 10, allow_nan=False)


table = st.tuples(st.sampled_from("abcd"), st.integers(0, 5), finite, finite)


@given(st.lists(table, min_size=1, max_size=30, unique_by=lambda row: row[:2]))
def test_groups_hold_a_row_a_model_and_two_models_or_more(rows: list[tuple[str, int, float, float]]) -> None:
    found = ward_groups(standardised([Point(*r) for r in rows]))
    for group in (*found.same_layer, *found.across):
        assert len(group) == len({rows[i][0] for i in group}) >= 2
    for group in found.same_layer:
        assert len({rows[i][1] for i in group}) == 1
    for stage in (found.same_layer, found.across):
        flat = [i for group in stage for i in group]
        assert len(flat) == len(set(flat))


def test_numbers_do_not_depend_on_a_common_scale() -> None:
    generator = random.Random(5)
    rows = [Point(m, n, generator.gauss(0, 1), generator.gauss(0, 1)) for m in "abc" for n in range(8)]
    scaled = [p._replace(mean=p.mean * 1024, std=p.std * 1024) for p in rows]
    assert ward_groups(scaled) == ward_groups(rows)
    assert all(math.isfinite(p.mean) for p in standardised(rows))
