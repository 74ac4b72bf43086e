"""The walk over the holdout: safe to bold, one look each, stop at the first that fails."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.assignment import Assignment
from sandhi_core.errors import StoreError
from sandhi_core.holdout import deployed_holdouts, walk_holdout
from sandhi_core.pools.pool import ModelEntry, TaskBudget
from sandhi_core.records import (
    Cutoff,
    CutoffSet,
    Evaluation,
    HoldoutScore,
    Quality,
    Step,
    TaskResult,
    Trajectory,
)
from sandhi_core.statistics import certifiable_budget
from tests.synthetic import holdout, points_at

MODEL = ModelEntry(
    name="legal",
    path="org/legal",
    tasks=(
        TaskBudget(task="law", metric="acc", budget=0.05),
        TaskBudget(task="prose", metric="perplexity", budget=0.5),
    ),
)
QUESTIONS = 100


def trajectory(decisions: str) -> Trajectory:
    """`a` is an accepted step that shares a tensor of its own, `r` a rejected one."""
    steps = tuple(
        Step(
            index=i,
            component="mlp",
            layer=i,
            decision="accepted" if decision == "a" else "rejected",
            scores={"law": 0.9, "prose": 8.0},
            tensors={f"t{i}": f"d{i}"},
        )
        for i, decision in enumerate(decisions)
    )
    return Trajectory(
        pool="p",
        model="legal",
        plan="plan",
        baseline={"law": 0.9, "prose": 8.0},
        higher_is_better={"law": True, "prose": False},
        tolerance={"law": 0.05, "prose": 0.5},
        questions={"law": QUESTIONS, "prose": QUESTIONS},
        evaluations=len(steps),
        steps=steps,
    )


def cutoff_set(within: dict[int, bool]) -> CutoffSet:
    cutoffs = tuple(
        Cutoff(
            steps=steps,
            accepted=steps,
            scores={"law": 0.9, "prose": 8.0},
            drops={"law": 0.0, "prose": 0.0},
            freed=steps,
            within_budget=ok,
        )
        for steps, ok in within.items()
    )
    deepest = max(steps for steps, ok in within.items() if ok)
    return CutoffSet(
        pool="p", model="legal", budgets={"law": 0.05, "prose": 0.5}, cutoffs=cutoffs, deepest=deepest, knee=0
    )


class Scripted:
    """Answers a number of law questions wrong, and prose worse, by how many tensors are shared."""

    def __init__(self, wrong: list[int], prose: list[float] | None = None) -> None:
        self.wrong, self.prose = wrong, prose or [8.0] * len(wrong)
        self.asked: list[frozenset[str]] = []

    def __call__(self, assignment: Assignment) -> Evaluation:
        tensors = assignment.tensors
        self.asked.append(frozenset(tensors))
        wrong, prose = self.wrong[len(tensors)], self.prose[len(tensors)]
        law = tuple(0.0 if i < wrong else 1.0 for i in range(QUESTIONS))
        words = tuple(prose + (i - (QUESTIONS - 1) / 2) / QUESTIONS * (1 + len(tensors)) for i in range(QUESTIONS))
        return Evaluation(
            weights="+".join(sorted(tensors)) or "original",
            context="c",
            split="holdout",
            tasks={
                "law": TaskResult(value=sum(law) / QUESTIONS, higher_is_better=True, questions=law),
                "prose": TaskResult(value=sum(words) / QUESTIONS, higher_is_better=False, questions=words),
            },
        )


def walk(evaluate: Scripted, decisions: str, within: dict[int, bool], quality: Quality = "point") -> HoldoutScore:
    return walk_holdout("p", MODEL, cutoff_set(within), trajectory(decisions), evaluate, quality)


def looks(score: HoldoutScore) -> list[tuple[int, bool]]:
    return [(look.steps, look.within_budget) for look in score.walked]


def test_the_walk_stops_at_the_first_that_fails_and_keeps_the_last_that_held() -> None:
    evaluate = Scripted(wrong=[10, 12, 15, 16, 10])
    score = walk(evaluate, "aaaa", dict.fromkeys(range(5), True))
    assert looks(score) == [(1, True), (2, True), (3, False)]  # a fourth look could only find luck
    assert (score.steps, score.weights) == (2, "t0+t1")
    assert evaluate.asked == [frozenset(), {"t0"}, {"t0", "t1"}, {"t0", "t1", "t2"}]
    law = score.tasks["law"]
    assert (law.original, law.merged, law.questions, law.metric, law.budget) == (0.9, 0.85, 100, "acc", 0.05)
    assert law.difference == pytest.approx(-0.05)
    assert law.within_budget  # exactly the budget, whatever binary fractions make of it
    assert law.low < law.bound < -0.05 < law.high
    assert not law.certified


def test_a_model_that_never_holds_is_the_original() -> None:
    score = walk(Scripted(wrong=[10, 16]), "a", {0: True, 1: True})
    assert looks(score) == [(1, False)]
    assert (score.steps, score.weights) == (0, "original")
    law = score.tasks["law"]
    assert (law.difference, law.low, law.high, law.bound) == (0.0, 0.0, 0.0, 0.0)
    assert law.within_budget and law.certified


def test_no_look_without_a_merged_tensor() -> None:
    evaluate = Scripted(wrong=[10])
    score = walk(evaluate, "rr", {0: True, 1: True, 2: True})
    assert (score.steps, looks(score), evaluate.asked) == (0, [], [frozenset()])


def test_rejected_steps_and_cutoffs_out_of_budget_are_not_looked_at() -> None:
    evaluate = Scripted(wrong=[10, 10, 10, 10])
    score = walk(evaluate, "arara", {0: True, 1: True, 2: True, 3: False, 4: False, 5: True})
    assert looks(score) == [(1, True), (5, True)]
    assert len(evaluate.asked) == 3


def test_every_task_must_hold_in_its_own_direction() -> None:
    score = walk(Scripted(wrong=[10, 8, 6], prose=[8.0, 8.4, 8.6]), "aa", {0: True, 1: True, 2: True})
    assert looks(score) == [(1, True), (2, False)]
    assert score.tasks["prose"].difference == pytest.approx(-0.4)  # a perplexity that rose
    assert score.tasks["law"].difference == pytest.approx(0.02)
    better = walk(Scripted(wrong=[10, 10], prose=[8.0, 4.0]), "a", {0: True, 1: True})
    assert better.steps == 1
    assert better.tasks["prose"].difference == pytest.approx(4.0)


def test_certified_needs_the_bound_at_every_look() -> None:
    within = {0: True, 1: True, 2: True}
    fine = walk(Scripted(wrong=[10, 10, 8]), "aa", within).tasks["law"]
    assert fine.bound >= -0.05 and fine.certified
    doubtful_once = walk(Scripted(wrong=[10, 14, 8]), "aa", within).tasks["law"]
    assert doubtful_once.bound == fine.bound
    assert not doubtful_once.certified


def test_going_gives_what_was_measured_at_another_cutoff() -> None:
    within = {0: True, 1: True, 2: True, 3: True}
    score = walk(Scripted(wrong=[10, 9, 14, 16]), "aaa", within)
    assert (score.steps, score.tasks["law"].certified) == (2, False)
    shallower = score.going(1)
    assert (shallower.steps, shallower.weights) == (1, "t0")
    assert shallower.tasks["law"].merged == 0.91
    assert shallower.tasks["law"].certified  # what failed afterwards takes nothing back
    assert shallower == walk(Scripted(wrong=[10, 9]), "a", {0: True, 1: True}).model_copy(
        update={"walked": score.walked}
    )
    original = score.going(0)
    assert (original.steps, original.weights, original.tasks) == (0, "original", score.original.tasks)
    assert original.tasks["law"].difference == 0.0 and original.tasks["law"].certified
    assert score.going(2) == shallower.going(2) == score
    assert all(HoldoutScore.parse(s.canonical()) == s for s in (original, shallower))


@pytest.mark.parametrize("steps", [3, 4, -1])  # failed, never looked at, no cutoff
def test_going_nowhere_that_did_not_hold(steps: int) -> None:
    score = walk(Scripted(wrong=[10, 9, 14, 16]), "aaa", dict.fromkeys(range(4), True))
    assert (sorted(score.held), score.walked[-1].steps) == ([0, 1, 2], 3)
    with pytest.raises(KeyError):
        score.going(steps)


def test_deployed_holdouts_are_those_of_the_deployed_cutoffs() -> None:
    walked = {"a": holdout("a", [1, 3]), "b": holdout("b", [2], [4])}
    found = deployed_holdouts(points_at({"a": 1, "b": 0}), walked)
    assert {m: (h.steps, h.weights) for m, h in found.items()} == {"a": (1, "a-1"), "b": (0, "b-0")}
    assert deployed_holdouts(points_at({"a": 3, "b": 2}), walked) == walked


@pytest.mark.parametrize("cutoffs", [{"a": 1, "b": 4}, {"a": 1, "b": 1}, {"a": 1}])
def test_points_of_an_earlier_walk_are_refused(cutoffs: dict[str, int]) -> None:
    walked = {"a": holdout("a", [1, 3]), "b": holdout("b", [2], [4])}
    with pytest.raises(StoreError, match=r"model b: .* not made from .*materialise operating_points of pool"):
        deployed_holdouts(points_at(cutoffs), walked)


def test_a_metric_that_is_no_mean_over_questions_is_not_certified() -> None:
    plain = Scripted(wrong=[10, 10])

    def corpus_metric(assignment: Assignment) -> Evaluation:
        evaluation = plain(assignment)
        law = evaluation.tasks["law"].model_copy(update={"value": 0.5})
        return evaluation.model_copy(update={"tasks": {**evaluation.tasks, "law": law}})

    score = walk_holdout("p", MODEL, cutoff_set({0: True, 1: True}), trajectory("a"), corpus_metric)
    assert score.steps == 1
    assert not score.tasks["law"].certified
    assert score.tasks["prose"].certified


@settings(deadline=None)
@given(
    wrong=st.lists(st.integers(0, 30), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_the_result_is_the_end_of_the_unbroken_run_within_budget(wrong: list[int], order: object) -> None:
    within = list(range(len(wrong)))
    order.shuffle(within)  # type: ignore[attr-defined]
    score = walk(Scripted(wrong=wrong), "a" * (len(wrong) - 1), dict.fromkeys(within, True))
    expected = 0
    while expected + 1 < len(wrong) and wrong[expected + 1] - wrong[0] <= 5:
        expected += 1
    assert score.steps == expected
    assert len(score.walked) == min(expected + 1, len(wrong) - 1)
    assert all(task.within_budget for task in score.tasks.values())
    assert HoldoutScore.parse(score.canonical()) == score


def test_a_certified_walk_stops_at_the_first_that_is_not_certified() -> None:
    within = dict.fromkeys(range(5), True)
    evaluate = Scripted(wrong=[10, 9, 10, 14, 8])
    score = walk(evaluate, "aaaa", within, "certified")
    assert looks(score) == [(1, True), (2, True), (3, True)]  # the third is within budget as measured, but not surely
    assert (score.steps, sorted(score.held), len(evaluate.asked)) == (2, [0, 1, 2], 4)
    assert score.quality == "certified" and all(task.certified for task in score.tasks.values())
    with pytest.raises(KeyError):
        score.going(3)
    assert walk(Scripted(wrong=[10, 9, 10, 14, 8]), "aaaa", within).steps == 4


def test_the_smallest_certifiable_budget_is_that_of_weights_that_change_nothing() -> None:
    score = walk(Scripted(wrong=[10, 10]), "a", {0: True, 1: True}, "certified")
    assert score.tasks["law"].certifiable == pytest.approx(-score.tasks["law"].bound)
    assert score.tasks["law"].certifiable == certifiable_budget(QUESTIONS)
    prose = score.tasks["prose"]
    assert prose.certifiable == pytest.approx(prose.difference - prose.bound)


class Simulated:
    """Answers as drawn from a population in which every further tensor loses what `drops` says."""

    def __init__(self, drops: list[float], questions: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.original = (rng.random(questions) < 0.8).astype(float)
        self.answers = [self.original]
        for drop in drops:  # right answers are lost and wrong ones gained so that the mean falls by `drop`
            lost, gained = (drop + 0.02) / 0.8, 0.02 / 0.2
            chance = rng.random(questions)
            self.answers.append(np.where(self.original == 1.0, chance >= lost, chance < gained).astype(float))

    def __call__(self, assignment: Assignment) -> Evaluation:
        law = tuple(self.answers[len(assignment.tensors)].tolist())
        prose = TaskResult(value=8.0, higher_is_better=False, questions=(8.0, 8.0))
        result = TaskResult(value=float(np.mean(law)), higher_is_better=True, questions=law)
        return Evaluation(weights="w", context="c", split="holdout", tasks={"law": result, "prose": prose})


@pytest.mark.parametrize("drops", [[0.05] * 4, [0.0, 0.02, 0.05, 0.05]], ids=["all at the budget", "some safe"])
def test_a_certified_walk_deploys_too_bold_a_cutoff_in_at_most_a_twentieth_of_all_pools(drops: list[float]) -> None:
    """The budget is 0.05: every cutoff that loses just that is one too many, at the edge where errors are likeliest."""
    law = MODEL.model_copy(update={"tasks": MODEL.tasks[:1]})
    safe, trials = sum(drop < 0.05 for drop in drops), 400
    wrong = right = 0
    for seed in range(trials):
        cutoffs = cutoff_set(dict.fromkeys(range(len(drops) + 1), True))
        score = walk_holdout("p", law, cutoffs, trajectory("a" * len(drops)), Simulated(drops, 400, seed), "certified")
        wrong += score.steps > safe
        right += score.steps == safe
    error = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert 0.01 < wrong / trials < 0.05 + error  # not so cautious either that it says nothing
    assert right / trials > (0.9 if safe == 0 else 0.3)
