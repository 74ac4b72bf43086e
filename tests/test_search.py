import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.assignment import assignment_at
from sandhi_core.cutoffs import EPSILON
from sandhi_core.pools.pool import SearchSettings
from sandhi_core.records import (
    Accepts,
    Contributor,
    Evaluation,
    Plan,
    PlannedMerge,
    PlannedStep,
    Recipe,
    Trajectory,
)
from sandhi_core.search import Score, search
from tests.synthetic import evaluation

GALLOP, ONE = SearchSettings(), SearchSettings(stride=1)
REFERENCE = SearchSettings(accept="reference", stride=1)


def plan(steps: int, tensors: Sequence[str] | None = None) -> Plan:
    names = tensors or [f"t{i}" for i in range(steps)]
    return Plan(
        pool="pool",
        model="m",
        fingerprint="f",
        steps=tuple(
            PlannedStep(
                component="mlp",
                layer=(i * 7) % steps,
                merges=(PlannedMerge(tensor=names[i], projection="up", nbytes=2, recipe=recipe(i)),),
            )
            for i in range(steps)
        ),
    )


def recipe(step: int) -> Recipe:
    return Recipe(
        projection="up",
        shape=(1, 1),
        dtype="BF16",
        method="mean",
        rescale="none",
        contributors=(Contributor(model="m", layer=step, tensor="t", digest=str(step)),),
    )


def shared(recipe: Recipe) -> str:
    return recipe.contributors[0].digest


class Scorer:
    """Scores a set of accepted steps by the sum of their damages below 0.9; remembers what it was asked."""

    def __init__(self, damage: Sequence[float], of: Callable[[set[int]], float] | None = None) -> None:
        self.damage = damage
        self.of = of or (lambda steps: sum(damage[i] for i in sorted(steps)))
        self.asked: list[frozenset[int]] = []

    def __call__(self, tensors: dict[str, str], accepts: Accepts | None = None) -> Evaluation | None:
        steps = frozenset(int(d) for d in tensors.values())
        self.asked.append(steps)
        return evaluation({"task": 0.9 - self.of(set(steps))})


def walk(steps: Plan, settings: SearchSettings, score: Scorer, tolerance: float = 0.05) -> Trajectory:
    return search(steps, settings, {"task": tolerance}, evaluation({"task": 0.9}), shared, score)


def decisions(trajectory: Trajectory) -> str:
    return "".join("+" if s.decision == "accepted" else "-" for s in trajectory.steps)


def test_stride_one_scores_every_step_and_keeps_what_holds() -> None:
    score = Scorer([0.01, 0.06, 0.02, 0.03, 0.02])
    found = walk(plan(5), ONE, score)
    assert decisions(found) == "+-+-+"
    assert found.evaluations == len(score.asked) == 5
    assert score.asked == [{0}, {0, 1}, {0, 2}, {0, 2, 3}, {0, 2, 4}]
    assert [round(s.scores["task"], 6) for s in found.steps if s.scores] == [0.89, 0.83, 0.87, 0.84, 0.85]
    assert assignment_at(found, 5).tensors == {"t0": "0", "t2": "2", "t4": "4"}


def test_gallop_doubles_and_bisects_to_the_step_that_fails() -> None:
    damage = [0.0] * 16
    damage[9] = 1.0
    score = Scorer(damage)
    found = walk(plan(16), GALLOP, score)
    assert decisions(found) == "+++++++++-++++++"
    tried = [sorted(steps)[-1] for steps in score.asked]
    assert tried == [0, 2, 6, 14, 10, 8, 9, 10, 12, 15]
    unscored = [s.index for s in found.steps if s.scores is None]
    assert unscored == [1, 3, 4, 5, 7, 11, 13, 14]
    assert found.evaluations == 10 < walk(plan(16), ONE, Scorer(damage)).evaluations
    rejected = found.steps[9].scores
    assert rejected is not None and rejected["task"] == pytest.approx(-0.1)


def test_a_later_write_to_the_same_tensor_wins() -> None:
    score = Scorer([0.0, 0.0])
    found = walk(plan(2, ["same", "same"]), ONE, score)
    assert assignment_at(found, 2).tensors == {"same": "1"} and assignment_at(found, 1).tensors == {"same": "0"}
    assert score.asked == [{0}, {1}]


def test_every_task_has_to_hold_in_its_own_direction() -> None:
    baseline = Evaluation(
        weights="",
        context="",
        split="search",
        tasks=evaluation({"acc": 0.9}).tasks | evaluation({"perplexity": 3.0}, higher_is_better=False).tasks,
    )
    outcomes = iter([(0.88, 2.0), (0.9, 3.3), (0.87, 3.0), (0.95, 3.2)])

    def score(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation:
        acc, perplexity = next(outcomes)
        tasks = evaluation({"acc": acc}).tasks
        return baseline.model_copy(
            update={"tasks": tasks | evaluation({"perplexity": perplexity}, higher_is_better=False).tasks}
        )

    found = search(plan(4), ONE, {"acc": 0.02, "perplexity": 0.2}, baseline, shared, score)
    assert decisions(found) == "+--+"
    assert found.questions == {"acc": 100, "perplexity": 100}
    assert found.higher_is_better == {"acc": True, "perplexity": False}


def test_nan_is_rejected_and_can_be_stored() -> None:
    score = Scorer([0.0] * 4, of=lambda steps: math.nan if 2 in steps else 0.0)
    for settings in (ONE, GALLOP, REFERENCE):
        found = walk(plan(4), settings, score)
        assert decisions(found) == "++-+"
        assert found.steps[2].scores == {}
        assert Trajectory.parse(found.canonical()) == found


def test_reference_lets_the_floor_sink_with_what_it_accepted() -> None:
    damage = [0.02] * 10
    assert decisions(walk(plan(10), ONE, Scorer(damage))) == "++--------"
    drifted = walk(plan(10), REFERENCE, Scorer(damage))
    assert decisions(drifted) == "+" * 10
    assert drifted.steps[9].scores == {"task": pytest.approx(0.7)}


def test_reference_gallop_settles_a_step_by_the_floor_in_force() -> None:
    # Two at once fail; the first alone holds and lowers the floor, so that the second holds as well.
    score = [0.01, 0.03, 0.03]
    gallop = SearchSettings(accept="reference")
    assert decisions(walk(plan(3), gallop, Scorer(score))) == "+++"
    assert decisions(walk(plan(3), REFERENCE, Scorer(score))) == "+++"


@pytest.mark.parametrize("settings", [ONE, GALLOP])
def test_an_empty_plan_asks_for_nothing(settings: SearchSettings) -> None:
    empty = Plan(pool="pool", model="m", fingerprint="f", steps=())
    score = Scorer([])
    assert walk(empty, settings, score).steps == () and not score.asked


damages = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.005, 0.01, 0.02, 0.06]), min_size=1, max_size=40)


@given(damages)
def test_gallop_decides_like_stride_one_where_damage_adds_up(damage: list[float]) -> None:
    one, gallop = (walk(plan(len(damage)), settings, Scorer(damage)) for settings in (ONE, GALLOP))
    assert decisions(gallop) == decisions(one)
    for step, same in zip(gallop.steps, one.steps, strict=True):
        assert step.scores in (None, same.scores) and step.tensors == same.tensors
        assert step.scores is not None or step.decision == "accepted"
    rejected = decisions(one).count("-")
    if not rejected:
        assert gallop.evaluations == math.ceil(math.log2(len(damage) + 1))
    # Every rejection costs a climb and a bisection, each logarithmic in what they cover.
    assert gallop.evaluations <= (rejected + 1) * (2 * math.log2(len(damage) + 1) + 1)


@given(st.integers(1, 25), st.integers(0, 2**32), st.sampled_from([ONE, GALLOP]))
def test_every_scored_prefix_is_within_tolerance_whatever_the_scores(
    steps: int, seed: int, settings: SearchSettings
) -> None:
    score = Scorer([0.0] * steps, of=lambda chosen: (hash((seed, *sorted(chosen))) % 1000) / 10_000)
    found = walk(plan(steps), settings, score)
    seen = {chosen: 0.9 - score.of(set(chosen)) for chosen in score.asked}
    for step in found.steps:
        if step.decision == "accepted" and step.scores is not None:
            chosen = frozenset(int(d) for d in assignment_at(found, step.index + 1).tensors.values())
            assert step.scores["task"] == seen[chosen] >= 0.9 - 0.05 - EPSILON
    # However the walk ends, the weights it ends with were scored (or are the original's).
    accepted = [s for s in found.steps if s.decision == "accepted"]
    assert not accepted or accepted[-1].scores is not None


@given(damages, st.integers(0, 20), st.sampled_from([ONE, GALLOP, REFERENCE]))
def test_a_killed_walk_repeats_itself_from_the_score_log(
    damage: list[float], killed_after: int, settings: SearchSettings
) -> None:
    steps, log = plan(len(damage)), dict[str, Evaluation | None]()

    def logged(score: Scorer, limit: int | None) -> Score:
        def inner(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation | None:
            key = str(sorted(tensors.items()))
            if key not in log:
                if limit is not None and len(log) >= limit:
                    raise KeyboardInterrupt
                log[key] = score(tensors)
            return log[key]

        return inner

    baseline = evaluation({"task": 0.9})
    first, second = Scorer(damage), Scorer(damage)
    whole = walk(steps, settings, Scorer(damage))
    with suppress(KeyboardInterrupt):
        search(steps, settings, {"task": 0.05}, baseline, shared, logged(first, killed_after))
    resumed = search(steps, settings, {"task": 0.05}, baseline, shared, logged(second, None))
    assert resumed.canonical() == whole.canonical()
    asked = first.asked + second.asked
    assert len(asked) == len(set(asked))


class Abandoning(Scorer):
    """Abandons what would be refused, except where `whole` says that the refusal came too late to spare anything."""

    def __init__(
        self, damage: Sequence[float], of: Callable[[set[int]], float] | None = None, whole: Sequence[bool] = (False,)
    ) -> None:
        super().__init__(damage, of)
        self.whole = whole
        self.told: list[bool] = []

    def __call__(self, tensors: dict[str, str], accepts: Accepts | None = None) -> Evaluation | None:
        found = super().__call__(tensors)
        self.told.append(accepts is not None)
        spared = not self.whole[len(self.asked) % len(self.whole)]
        return None if found and spared and accepts and not accepts(found.scores) else found


def early(settings: SearchSettings) -> SearchSettings:
    return settings.model_copy(update={"early_rejection": True})


def test_what_is_accepted_is_only_told_where_early_rejection_is_wanted() -> None:
    off, on = Abandoning([0.06, 0.0]), Abandoning([0.06, 0.0])
    assert all(s.scores is not None for s in walk(plan(2), ONE, off).steps) and off.told == [False, False]
    assert [s.scores for s in walk(plan(2), early(ONE), on).steps] == [None, {"task": 0.9}] and on.told == [True, True]


def test_an_abandoned_trial_is_a_rejection_that_is_not_asked_for_again() -> None:
    damage = [0.0] * 16
    damage[9] = 1.0
    whole, spared = Scorer(damage), Abandoning(damage)
    expected, found = walk(plan(16), GALLOP, whole), walk(plan(16), early(GALLOP), spared)
    assert decisions(found) == decisions(expected) and spared.asked == whole.asked
    assert found.steps[9].scores is None and found.evaluations == expected.evaluations
    assert Trajectory.parse(found.canonical()) == found


def test_an_abandoned_trial_is_asked_for_again_where_the_floor_sank_since() -> None:
    gallop = SearchSettings(accept="reference")
    score = Abandoning([0.01, 0.03, 0.03])
    assert decisions(walk(plan(3), early(gallop), score)) == "+++"
    assert score.asked == [{0}, {0, 1, 2}, {0, 1}, {0, 1, 2}]


@given(
    st.integers(1, 25),
    st.integers(0, 2**32),
    st.sampled_from([ONE, GALLOP, REFERENCE, SearchSettings(accept="reference")]),
    st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_early_rejection_decides_alike_whatever_the_scores(
    steps: int, seed: int, settings: SearchSettings, whole: list[bool]
) -> None:
    def of(chosen: set[int]) -> float:
        lost = hash((seed, *sorted(chosen))) % 1000
        return math.nan if lost < 20 else lost / 10_000

    expected = walk(plan(steps), settings, Scorer([], of))
    found = walk(plan(steps), early(settings), Abandoning([], of, whole))
    assert decisions(found) == decisions(expected)
    for step, same in zip(found.steps, expected.steps, strict=True):
        assert step.scores == same.scores or (step.scores is None and step.decision == "rejected")
    assert found.evaluations >= expected.evaluations
    assert found.evaluations == expected.evaluations or (settings.accept, settings.stride) == ("reference", "gallop")
