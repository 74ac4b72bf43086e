"""What a person sees of a build that is under way."""

import io
import time

import pytest

from pipelines import progress
from pipelines.jobs import Run
from pipelines.progress import Progress

PROOF = Run("build_deployment", "demo", ("sharing_proof", "deployment"))


def test_a_stage_that_says_nothing_is_said_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.2)
    stream = io.StringIO()
    with Progress({}, stream).running(PROOF):
        time.sleep(0.7)
    *going_on, done = stream.getvalue().splitlines()
    assert 1 <= len(going_on) <= 3
    assert all(
        line.endswith("  sharing_proof + deployment demo: at work for 0:00") or "0:01" in line for line in going_on
    )
    assert done.endswith(" s") and "sharing_proof + deployment demo: 0.7" in done
    time.sleep(0.3)
    assert len(stream.getvalue().splitlines()) == len(going_on) + 1


def test_a_stage_that_fails_is_not_said_to_be_done() -> None:
    stream = io.StringIO()
    with pytest.raises(RuntimeError), Progress({}, stream).running(PROOF):
        raise RuntimeError
    assert stream.getvalue() == ""


def test_what_is_left_falls_as_stages_end_and_is_not_told_once_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is needed than the plan allows: what ended, and what turned out to be fresh, needs no more."""
    monkeypatch.setattr(progress, "REPEAT_SECONDS", 0.0)
    stream = io.StringIO()
    nodes = {("trajectory", "p.a"): 28, ("trajectory", "p.b"): 28, ("holdout", "p.a"): 29, ("holdout", "p.b"): 29}
    shown = Progress(nodes, stream)
    with shown.running(Run("build_trajectory", "p.a", ("trajectory",))):
        shown.evaluated("trajectory", "a", 2.0)
        shown.evaluated("trajectory", "a", 2.0)
    with shown.running(Run("build_trajectory", "p.b", ("trajectory",))):
        shown.evaluated("trajectory", "b", 2.0)
    shown.keep([("holdout", "p.a")])
    with shown.running(Run("build_holdout", "p.a", ("holdout",))):
        for _ in range(30):  # one more than was foreseen
            shown.evaluated("holdout", "a", 2.0)
    told = [line.partition(" so far")[2] for line in stream.getvalue().splitlines() if "so far" in line]
    assert told[:4] == [
        ", at most 113 more (about 3:46)",
        ", at most 112 more (about 3:44)",
        ", at most 85 more (about 2:50)",
        ", at most 28 more (about 0:56)",
    ]
    assert told[-3:] == [", at most 1 more (about 0:02)", "", ""]
