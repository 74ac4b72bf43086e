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
    with Progress(0, stream).running(PROOF):
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
    with pytest.raises(RuntimeError), Progress(0, stream).running(PROOF):
        raise RuntimeError
    assert stream.getvalue() == ""
