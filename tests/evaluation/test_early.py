"""Early rejection ends a scoring only where the scores would be refused, and changes no number."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.cutoffs import drops_of, within
from sandhi_core.evaluation.early import AbandonedError, Following, Watch, best, bounded
from sandhi_core.evaluation.packing import pack, sequence_of
from sandhi_core.evaluation.tasks import Suite, load_tasks
from sandhi_core.records import Accepts, Evaluation, Scores
from tests.evaluation.local_tasks import choice_task, entry, generation_task, settings
from tests.evaluation.test_evaluator import likelihood_task

TASKS = (("letters", "acc"), ("likely", "likely"), ("copy", "exact_match"), ("more", "acc_norm"))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """Tasks of two kinds; one has a metric without a bound."""
    folder = tmp_path_factory.mktemp("tasks")
    generation_task(choice_task(choice_task(likelihood_task(folder)), "more"))
    return load_tasks(entry(folder, *TASKS), settings(folder), folder / "cache")


def rule(floor: Scores, tolerance: float, suite: Suite) -> Accepts:
    higher = {task.name: task.higher_is_better for task in suite.tasks}
    return lambda scores: within(drops_of(floor, scores, higher), dict.fromkeys(floor, tolerance))


def evaluated(suite: Suite) -> Evaluation:
    tasks = {task.name: task.result("search") for task in suite.tasks}
    return Evaluation(weights="", context="", split="search", tasks=tasks)


def respond(suite: Suite, chance: random.Random, right: float) -> dict[int, Any]:
    """A response to every request (by its identity) that makes about that share of the answers right."""
    responses: dict[int, Any] = {}
    for task in suite.tasks:
        for question in task.questions["search"]:
            good = chance.random() < right
            for number, request in enumerate(question.requests):
                if request.request_type == "generate_until":
                    responses[id(request)] = question.document["answer"] if good else "?"
                else:
                    wanted = (number == question.document["gold"]) == good
                    found = -1.0 if wanted else -9.0 - number
                    responses[id(request)] = (math.nan if chance.random() < 0.01 and bounded(task) else found, False)
    return responses


CHUNK = 3


@given(st.integers(0, 2**32), st.floats(0.5, 1.0), st.sampled_from([0.0, 0.01, 1 / 12, 0.1, 0.3]))
def test_never_abandoned_where_the_score_would_be_accepted(
    suite: Suite, seed: int, right: float, tolerance: float
) -> None:
    chance = random.Random(seed)

    def held(share: float) -> list[Any]:
        requests = [r for kind in suite.requests("search").values() for r in kind]
        responses = respond(suite, chance, share)
        for request in requests:
            request.resps[:] = [responses[id(request)]]
        return requests

    held(1.0 - chance.choice([0.0, 0.2]))
    original = evaluated(suite)
    requests = held(right)
    final = evaluated(suite)
    responses = {id(r): list(r.resps) for r in requests}
    accepts = rule(original.scores, tolerance, suite)
    suite.requests("search")
    chance.shuffle(requests)
    watch = Watch(suite, "search", original, accepts)
    try:
        for chunk in (requests[at : at + CHUNK] for at in range(0, len(requests), CHUNK)):
            for request in chunk:
                request.resps[:] = responses[id(request)]
            watch.answered(chunk)
            watch.answered(chunk)  # a kind is told of once more as a whole
    except AbandonedError as abandoned:
        assert not accepts(final.scores)
        assert not all(request.resps for request in requests)  # something was spared
        assert abandoned.at_most.keys() == {"letters", "copy", "more"}
        assert all(bound.value >= final.scores[name] for name, bound in abandoned.at_most.items())
        assert not accepts(best(suite, {name: bound.value for name, bound in abandoned.at_most.items()}))
    else:
        assert evaluated(suite) == final
        lost = drops_of(original.scores, final.scores, dict.fromkeys(final.scores, True))
        # What a bound can decide is missed only where it takes the very last answers.
        late = CHUNK / len(suite.tasks[0].questions["search"])
        assert accepts(final.scores) or all(
            lost[name] <= tolerance + late + 1e-9 for name in ("letters", "copy", "more")
        )


def test_only_what_lm_eval_itself_judges_question_by_question_has_a_bound(suite: Suite, tmp_path: Path) -> None:
    assert [bounded(task) for task in suite.tasks] == [True, False, True, True]
    letters, _, copy, _ = suite.tasks
    assert not bounded(replace(letters, higher_is_better=False))
    assert not bounded(replace(letters, aggregate=lambda values: sum(values) / len(values)))
    assert not bounded(replace(copy, metric="acc"))
    own = {
        "process_results": "process_results: !function own.process\n",
        "filter": "filter_list: [{name: none, filter: [{function: custom, filter_fn: !function own.sift}]}]\n",
    }
    for name, text in own.items():
        choice_task(tmp_path, name)
        (tmp_path / "own.py").write_text(
            "def process(doc, results):\n    return {'acc': 7.0, 'acc_norm': 7.0}\n"
            "def sift(resps, docs):\n    return [r[0] for r in resps]\n"
        )
        (tmp_path / f"{name}.yaml").write_text((tmp_path / f"{name}.yaml").read_text() + text)
        loaded = load_tasks(entry(tmp_path, (name, "acc")), settings(tmp_path), tmp_path / "cache")
        assert not bounded(loaded.tasks[0]), name


def test_packs_in_which_the_original_is_wrong_come_first(suite: Suite) -> None:
    requests = suite.requests("search")["loglikelihood"]
    responses = respond(suite, random.Random(0), 0.5)
    for asked in suite.requests("search").values():
        for request in asked:
            request.resps[:] = [responses[id(request)]]
    watch = Watch(suite, "search", evaluated(suite), lambda scores: True)
    packs = pack([sequence_of([1, *r.args[0].encode()], [*r.args[1].encode()], 999) for r in requests], 60)
    order = Following(watch, requests).order(packs)
    right = [[watch.originally(requests[number]) for number, *_ in packs[at].requests] for at in order]
    shares = [sum(values) / len(values) for values in right]
    assert sorted(order) == list(range(len(packs))) and shares == sorted(shares) and len(set(shares)) > 2
