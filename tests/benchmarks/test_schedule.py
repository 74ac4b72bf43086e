"""The simulation keeps to what any schedule must keep to, and what is kept beside it is what it says."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.schedule import OTHERS, SCORES, Timeline, at_once, catalogue, frontiers, in_waves, longest, simulations, text
from sandhi_core.graph import Node

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = catalogue(5, 2)
GRAPH = SMALL.graph()


@st.composite
def seconds(draw: st.DrawFn) -> dict[Node, float]:
    return {node: float(draw(st.integers(1, 50))) for node in GRAPH}


def at_most(timeline: Timeline, spent: dict[Node, float], scoring: bool) -> int:
    """The most nodes that ran at one moment."""
    moments: Counter[float] = Counter()
    for node, end in timeline.ends.items():
        if (node[0] in SCORES) == scoring:
            moments[end - spent[node]] += 1
            moments[end] -= 1
    running, most = 0, 0
    for _, change in sorted(moments.items()):
        running += change
        most = max(most, running)
    return most


@given(seconds(), st.integers(1, 6))
def test_every_schedule_can_be_carried_out(spent: dict[Node, float], devices: int) -> None:
    chain = sum(spent[node] for node in longest(GRAPH, spent))
    scoring = sum(s for node, s in spent.items() if node[0] in SCORES)
    others = sum(spent.values()) - scoring
    waves = frontiers(GRAPH)
    for timeline in (at_once(GRAPH, spent, devices), in_waves(GRAPH, waves, spent, devices)):
        assert timeline.ends.keys() == GRAPH.keys()
        for node, upstream in GRAPH.items():
            assert all(timeline.ends[u] <= timeline.ends[node] - spent[node] for u in upstream)
        assert at_most(timeline, spent, True) <= devices and at_most(timeline, spent, False) <= OTHERS
        assert timeline.seconds >= max(chain, scoring / devices)
    # Graham's bound: whenever the last chain waits, every place of its kind is taken
    assert at_once(GRAPH, spent, devices).seconds <= chain + scoring / devices + others / OTHERS


def test_waves_are_those_of_the_stages() -> None:
    """A pool that is built for the first time has a wave for every stage, but that proof and deployment are one run."""
    waves = frontiers(GRAPH)
    assert [sorted({stage for stage, _ in wave}) for wave in waves][-1] == ["deployment", "sharing_proof"]
    assert len(waves) == 10
    assert sorted(node for wave in waves for node in wave) == sorted(GRAPH)


def test_the_kept_simulation_is_what_the_kept_steps_give() -> None:
    kept = sorted(BENCHMARKS.glob("steps-*.json"))
    assert len(kept) == 2
    assert text(simulations(kept, 100)) == (BENCHMARKS / "schedule.txt").read_text()
