import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.words import brief, count, number, percent, points, signed, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (851_968, "832 KiB"), (13_811_712, "13.17 MiB"),
     (-2048, "-2.00 KiB"), (3 * 2**40, "3.00 TiB"), (5000 * 2**40, "5000 TiB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@given(st.integers(0, 2**60))
def test_a_size_is_right_to_one_percent(nbytes: int) -> None:
    value, unit = size(nbytes).split()
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    assert abs(float(value) * factor - nbytes) <= 0.01 * nbytes


def test_scores_show_their_sign_only_where_there_is_one() -> None:
    assert [number(0.9126), number(-0.0001), number(65.0)] == ["0.913", "0.000", "65.00"]
    assert [signed(0.004), signed(-0.011), signed(0.0), signed(-0.0002)] == [
        "+0.004",
        "-0.011",
        "0.000",
        "0.000",
    ]


def test_brief_values_fit_a_cell() -> None:
    values = [0.07, -0.07, 0.0, -0.001, 0.999, 1.24, 9.96, 34.6]
    assert [brief(v) for v in values] == [".07", "-.07", "0", "0", "1.0", "1.2", "10", "35"]


def test_points_of_nothing_have_no_sign() -> None:
    assert [points(value) for value in (-0.0, -0.0004, 0.0178, -0.071)] == ["0.0", "0.0", "1.8", "-7.1"]


def test_shares_and_counts() -> None:
    assert percent(1, 8) == "12.5 %"
    assert percent(0, 0) == "0.0 %"
    assert [count(1, "step"), count(0, "step")] == ["1 step", "0 steps"]
