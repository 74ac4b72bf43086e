import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.assignment import assignment_at
from sandhi_core.cutoffs import EPSILON, at_most, cutoff_set, deepest_within, knee
from tests.walks import cutoffs, name, plan, trajectory, walks


def test_a_cutoff_ends_where_weights_were_scored() -> None:
    found = cutoffs(trajectory("a", [0.9, None, 0.89, 0.5, 0.86], frozenset({3})))
    assert [(c.steps, c.accepted, c.freed // 12288) for c in found.cutoffs] == [
        (0, 0, 0),
        (1, 1, 1),
        (3, 3, 3),
        (5, 4, 4),
    ]
    assert [c.drops["task"] for c in found.cutoffs] == pytest.approx([0.0, 0.0, 0.01, 0.04])
    assert [c.within_budget for c in found.cutoffs] == [True, True, True, False]
    assert found.deepest == 3


def test_what_gets_no_file_of_its_own_frees_nothing() -> None:
    walk, steps = trajectory("a", [0.9, 0.9]), plan("a", 2)
    vector = steps.steps[1].merges[0].recipe.model_copy(update={"shape": (64,)})
    norm = steps.steps[1].merges[0].model_copy(update={"nbytes": 128, "recipe": vector})
    steps = steps.model_copy(update={"steps": (steps.steps[0], steps.steps[1].model_copy(update={"merges": (norm,)}))})
    assert [c.freed for c in cutoff_set(walk, steps, {"task": 0.02}).cutoffs] == [0, 12288, 12288]


def test_deepest_may_lie_beyond_a_cutoff_that_is_out_of_budget() -> None:
    found = cutoffs(trajectory("a", [0.87, 0.88, 0.85]))
    assert [c.within_budget for c in found.cutoffs] == [True, False, True, False]
    assert found.deepest == 2


def test_a_drop_of_exactly_the_budget_is_within_it() -> None:
    # 0.98 - 0.96 is 0.020000000000000018
    walk = trajectory("a", [0.96]).model_copy(update={"baseline": {"task": 0.98}})
    assert cutoffs(walk).deepest == 1
    assert 0.98 - 0.96 > 0.02


def test_less_is_better_where_the_metric_says_so() -> None:
    walk = trajectory("a", [0.91, 0.93]).model_copy(update={"higher_is_better": {"task": False}})
    found = cutoffs(walk)
    assert [c.drops["task"] for c in found.cutoffs] == pytest.approx([0.0, 0.01, 0.03])
    assert found.deepest == 1


def test_an_assignment_leaves_rejected_steps_out_and_lets_the_last_write_win() -> None:
    walk = trajectory("a", [0.9, 0.1, 0.9], frozenset({1}))
    again = walk.steps[2].model_copy(update={"tensors": {name(0): "later"}})
    walk = walk.model_copy(update={"steps": (*walk.steps[:2], again)})
    assert assignment_at(walk, 0).tensors == {}
    assert assignment_at(walk, 2).tensors == {name(0): "shared-0"}
    assert assignment_at(walk, 3).tensors == {name(0): "later"}


def test_knee_is_the_first_point_furthest_above_the_chord() -> None:
    assert knee([0.0, 8.0, 9.0, 9.5, 10.0]) == 1
    assert knee([0.0, 1.0, 2.0, 3.0]) == 0  # a straight line has no elbow: nothing is gained by paying
    assert knee([5.0, 5.0, 5.0]) == 2


def test_own_knee_stops_where_the_budget_buys_little() -> None:
    found = cutoffs(trajectory("a", [0.899, 0.899, 0.899, 0.899, 0.885]))
    assert (found.deepest, found.knee) == (5, 4)


@given(walks, st.sets(st.integers(0, 11)), st.floats(0.0001, 0.5))
def test_cutoffs_are_the_scored_prefixes(scores: list[float | None], rejected: set[int], budget: float) -> None:
    scored = {i for i, score in enumerate(scores) if score is not None}
    walk = trajectory("a", scores, frozenset(rejected & scored))
    found = cutoffs(walk, budget)
    for cutoff in found.cutoffs:
        assert cutoff.within_budget == (0.9 - cutoff.scores["task"] <= budget + EPSILON)
        assert cutoff.freed == 12288 * len(assignment_at(walk, cutoff.steps).tensors) == 12288 * cutoff.accepted
    steps = [c.steps for c in found.cutoffs]
    assert steps == sorted(set(steps)) and steps[0] == 0
    assert found.deepest == max(c.steps for c in found.cutoffs if c.within_budget)
    assert at_most(found.cutoffs, found.deepest).within_budget
    assert next(c for c in found.cutoffs if c.steps == found.knee).within_budget
    assert deepest_within(found.cutoffs, {"task": budget / 2}) <= found.deepest
