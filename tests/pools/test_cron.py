"""When a pool is rebuilt: read as Dagster reads it."""

from datetime import UTC, datetime, timedelta

import pytest
from dagster._utils.schedules import is_valid_cron_string, schedule_execution_time_iterator
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.pools.cron import due, plain, times


@st.composite
def fields(draw: st.DrawFn, first: int, last: int) -> str:
    def part() -> str:
        start = draw(st.integers(first, last))
        end = draw(st.integers(start, last))
        step = draw(st.integers(1, last))
        return draw(st.sampled_from(["*", f"{start}", f"{start}-{end}", f"*/{step}", f"{start}-{end}/{step}"]))

    return ",".join(part() for _ in range(draw(st.integers(1, 3))))


@st.composite
def texts(draw: st.DrawFn) -> str:
    minute, hour, month = draw(fields(0, 59)), draw(fields(0, 23)), draw(fields(1, 12))
    day, weekday = draw(st.sampled_from([("*", "*"), (draw(fields(1, 31)), "*"), ("*", draw(fields(0, 6)))]))
    return " ".join((minute, hour, day, month, weekday))


@given(texts(), st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)))
def test_it_is_due_when_dagster_ticks(text: str, begun: datetime) -> None:
    begun = begun.replace(tzinfo=UTC)
    try:
        times(text)
    except ValueError as error:
        assert "is never due" in str(error)
        return
    assert is_valid_cron_string(plain(text)) and times(plain(text)) == times(text)
    ticks = schedule_execution_time_iterator(begun.timestamp(), plain(text), "UTC", ascending=True)
    tick = next(ticks)
    assert due(text, tick)
    minute = begun.replace(second=0, microsecond=0) + timedelta(minutes=1)
    between = int((tick - minute).total_seconds() // 60)
    for skipped in {0, between // 2, between - 1} & set(range(between)):
        assert not due(text, minute + timedelta(minutes=skipped))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 3 * *", "has 4 fields, not five"),
        ("@daily", "has 1 fields"),
        ("60 3 * * *", "'60' for the minute, which goes from 0 to 59"),
        ("0 5-3 * * *", "'5-3' for the hour"),
        ("0 3 * JAN *", "'JAN' for the month"),
        ("0 3 * * 8", "'8' for the day of the week"),
        ("0 5/2 * * *", "'5/2' for the hour: a number, a range or *"),
        ("*/0 3 * * *", "a step of 0"),
        ("0 3 1 * 1", "days of the month and of the week"),
        ("0 3 31 4,6 *", "is never due"),
        ("0 3 30 2 *", "is never due"),
        ("0 ٣ * * *", "'٣' for the hour"),
    ],
)
def test_what_is_no_time_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        times(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "same"),
    [("0 3 * * *", "0 3 * * *"), ("*/15 3-3 1-31 1-12 *", "0,15,30,45 3 * * *"), ("0 0 * * 5-7", "0 0 * * 0,5,6")],
)
def test_dagster_is_given_numbers(text: str, same: str) -> None:
    assert plain(text) == same


def test_sunday_is_0_and_7() -> None:
    sunday = datetime(2026, 11, 29, 3, 0, tzinfo=UTC)
    assert due("0 3 * * 0", sunday) and due("0 3 * * 7", sunday) and not due("0 3 * * 1-6", sunday)
