"""What a run's log says of a long step."""

import pytest

from assets import telling
from assets.telling import Telling


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def told(monkeypatch: pytest.MonkeyPatch, expected: int, seconds: list[float]) -> list[str]:
    clock, lines = Clock(), list[str]()
    monkeypatch.setattr(telling, "time", clock)
    step = Telling(expected, lines.append)
    for each in seconds:
        clock.now += each
        step.evaluated("sorter", each)
    assert step.evaluations == len(seconds)
    return lines


def test_the_first_is_told_at_once_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, 30, [2.0, 2.0, 2.0, 4.0, 2.0]) == [
        "evaluation 1 of sorter in 0:02, at most 29 more (about 0:58)",
        "evaluation 4 of sorter in 0:10, at most 26 more (about 1:05)",
    ]


@pytest.mark.parametrize("expected", [0, 1])
def test_of_what_is_not_known_or_over_nothing_is_promised(monkeypatch: pytest.MonkeyPatch, expected: int) -> None:
    assert told(monkeypatch, expected, [61.0, 3600.0]) == [
        "evaluation 1 of sorter in 1:01",
        "evaluation 2 of sorter in 1:01:01",
    ]


def test_a_day_of_evaluations_gives_some_hundred_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = told(monkeypatch, 200_000, [0.5] * 172_800)
    assert 100 < len(lines) < 400
    assert lines[-1].startswith("evaluation 17")
