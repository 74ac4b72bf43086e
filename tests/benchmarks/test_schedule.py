"""The simulation keeps to what any schedule must keep to, and what is kept beside it is what it says."""

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import OTHERS, SCORES, Timeline, catalogue, longest, simulations, text, timeline
from sandhi_core.graph import STAGES, Node, Stored, fingerprint, schedule

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


@settings(max_examples=50)
@given(seconds(), st.integers(1, 6), st.sampled_from([0.0, 7.0]))
def test_every_schedule_can_be_carried_out(spent: dict[Node, float], devices: int, look: float) -> None:
    chain = sum(spent[node] for node in longest(GRAPH, spent))
    scoring = sum(s for node, s in spent.items() if node[0] in SCORES)
    others = sum(spent.values()) - scoring
    found = timeline(GRAPH, spent, devices, look)
    assert found.ends.keys() == GRAPH.keys()
    for node, upstream in GRAPH.items():
        assert all(found.ends[u] <= found.ends[node] - spent[node] for u in upstream)
    assert at_most(found, spent, True) <= devices and at_most(found, spent, False) <= OTHERS
    assert found.seconds >= max(chain, scoring / devices)
    # Graham's bound: whenever the longest chain waits for no look, every place of its kind is taken
    assert found.seconds <= chain + scoring / devices + others / OTHERS + look * len(STAGES)


@settings(max_examples=50)
@given(seconds(), st.data())
def test_what_may_start_is_what_the_planner_says(spent: dict[Node, float], data: st.DataObject) -> None:
    """With a place for everybody, what is under way at any moment is the planner's frontier then."""
    ends = timeline(GRAPH, spent, len(GRAPH)).ends
    moment = data.draw(st.sampled_from(sorted({0.0, *ends.values()})[:-1]))
    stored: dict[Node, Stored] = {}
    for node in sorted((n for n, end in ends.items() if end <= moment), key=list(GRAPH).index):
        made = fingerprint(node, None, {u: stored[u].data_version for u in GRAPH[node]})
        stored[node] = Stored(made, made)
    running = {node for node, end in ends.items() if end - spent[node] <= moment < end}
    assert running == schedule(GRAPH, lambda node: None, stored.get).frontier.keys()


def test_the_kept_simulation_is_what_the_kept_steps_give() -> None:
    kept = sorted(BENCHMARKS.glob("steps-*.json"))
    assert len(kept) == 2
    assert text(simulations(kept, 100)) == (BENCHMARKS / "schedule.txt").read_text()
