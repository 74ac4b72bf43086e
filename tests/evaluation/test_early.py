"""Early rejection ends a scoring only where the scores would be refused, and changes no number."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sandhi_core.checkpoint import Checkpoint
from sandhi_core.cutoffs import drops_of, within
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.early import AbandonedError, Following, Watch, best, bounded
from sandhi_core.evaluation.evaluator import Evaluator, Weights, weights_key
from sandhi_core.evaluation.layers import LayeredModel
from sandhi_core.evaluation.packed import PackedLM
from sandhi_core.evaluation.packing import pack, scored
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.tasks import Suite, load_tasks
from sandhi_core.pool import SearchSettings
from sandhi_core.records import Accepts, Evaluation, Plan, PlannedMerge, PlannedStep, Recipe, Scores, Trajectory
from sandhi_core.scan import fingerprint
from sandhi_core.search import search
from tests.evaluation import local_tasks
from tests.evaluation.local_tasks import choice_task, entry, generation_task, settings
from tests.evaluation.test_evaluator import likelihood_task
from tests.models import tiny_llama

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
    packs = pack([scored([1, *r.args[0].encode()], [*r.args[1].encode()], 999) for r in requests], 60)
    order = Following(watch, requests).order(packs)
    right = [[watch.originally(requests[number]) for number, *_ in packs[at].requests] for at in order]
    shares = [sum(values) / len(values) for values in right]
    assert sorted(order) == list(range(len(packs))) and shares == sorted(shares) and len(set(shares)) > 2


class Whim:
    """Stands in for a watch: asks in a random order, and stops after so many packs."""

    def __init__(self, seed: int, packs: int | None) -> None:
        self._chance = random.Random(seed)
        self._left = math.inf if packs is None else packs

    def originally(self, request: object) -> float:
        return self._chance.random()

    def answered(self, requests: Sequence[object]) -> None:
        self._left -= 1
        if self._left < 0:
            raise AbandonedError({})


@pytest.mark.parametrize("cache", [1 << 30, 0])
def test_stopped_and_reordered_passes_leave_the_bits_of_the_next_as_they_were(tmp_path: Path, cache: int) -> None:
    """A walk of random changes, some kept, some stopped after some packs, against passes that know nothing."""
    folder = choice_task(tmp_path / "tasks")
    suite = load_tasks(entry(folder, ("letters", "acc")), settings(folder), tmp_path / "cache")
    path = tiny_llama(tmp_path / "model", num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    watched, fresh = PackedLM(model, tokenizer, 64, {"cpu": cache}), PackedLM(model, tokenizer, 64, {})
    fresh._layered = watched._layered
    chance = random.Random(7)
    names = [n for n, p in model.named_parameters() if "layers." in n and p.ndim == 2]

    def bits(scorer: PackedLM, weights: dict[str, str], whim: Any) -> list[Any]:
        with torch.inference_mode():
            scorer.answer(suite.requests("search"), weights, watch=whim)
        return [list(r.resps) for q in suite.tasks[0].questions["search"] for r in q.requests]

    assert bits(watched, {}, None) == bits(fresh, {}, None)
    kept: dict[str, str] = {}
    stopped = 0
    for step in range(16):
        name = chance.choice(names)
        parameter, before = model.get_parameter(name), model.get_parameter(name).detach().clone()
        with torch.no_grad():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        weights = {**kept, name: str(step)}
        try:
            found = bits(watched, weights, Whim(step, (None, 1, 0, None)[step % 4]))
        except AbandonedError:
            stopped += 1
            assert all(asked.cache.trial is None for asked in watched.sets.kept.values())
            found = None
        assert found in (None, bits(fresh, {name: f"fresh {step}"}, None))
        if found is not None and chance.random() < 0.7:
            kept[name] = str(step)
        else:
            with torch.no_grad():
                parameter.copy_(before)
    assert stopped == 8 and len(kept) > 1


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of every pack that a model computed."""
    found: list[int] = []
    original = LayeredModel.logits

    def counting(self: LayeredModel, one: Any, run: Any) -> Tensor:
        found.append(len(one.parents))
        return original(self, one, run)

    monkeypatch.setattr(LayeredModel, "logits", counting)
    yield found


Made = Callable[[str], Evaluator]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Evaluators of one tiny model on two tasks, by the name of their log."""
    monkeypatch.setattr(local_tasks, "QUESTIONS", 90)
    model = tiny_llama(tmp_path / "model")
    folder = generation_task(choice_task(tmp_path / "tasks"))
    (tmp_path / "scans").mkdir()
    identity = fingerprint(Checkpoint.open(model, "m"), tmp_path / "scans")

    def evaluator(log: str) -> Evaluator:
        return Evaluator(
            model,
            identity,
            entry(model, ("letters", "acc"), ("copy", "exact_match")),
            settings(folder, batch_tokens=128, splits={"profile": 0.1, "search": 0.8, "holdout": 0.1}, threads=1),
            ScoreLog(tmp_path / log),
            tmp_path / "cache",
        )

    return evaluator


PLACES = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qo"]


def noisy(tensors: dict[str, str]) -> Weights:
    """Weights whose tensors are noise as large as their names say."""

    def read(name: str) -> Tensor:
        step = int(tensors[name])
        size = [0.0, 0.001, 3.0][step % 3]
        return size * torch.randn(32, 32, generator=torch.Generator().manual_seed(step))

    return Weights(weights_key("noisy", tensors), tensors, read)


def walked(evaluator: Evaluator, chosen: SearchSettings, tolerance: float) -> Trajectory:
    recipe = Recipe(projection="q", shape=(32, 32), dtype="F32", method="mean", rescale="none", contributors=())
    steps = [
        PlannedStep(
            component="attn",
            layer=step,
            merges=(
                PlannedMerge(
                    tensor=PLACES[step % len(PLACES)],
                    projection="q",
                    nbytes=1,
                    recipe=recipe.model_copy(update={"dtype": str(step)}),
                ),
            ),
        )
        for step in range(9)
    ]
    original = evaluator.evaluate("search", evaluator.original)

    def score(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation | None:
        weights = noisy(tensors)
        return evaluator.judged("search", weights, accepts) if accepts else evaluator.evaluate("search", weights)

    plan = Plan(pool="p", model="m", fingerprint="f", steps=tuple(steps))
    limits = dict.fromkeys(original.tasks, tolerance)
    return search(plan, chosen, limits, original, lambda r: r.dtype, score)


@pytest.mark.parametrize(("stride", "tolerance"), [("gallop", 0.001), ("gallop", 0.03), (1, 0.03)])
def test_a_walk_decides_alike_from_fewer_tokens(made: Made, computed: list[int], stride: Any, tolerance: float) -> None:
    plain = walked(made("plain"), SearchSettings(stride=stride), tolerance)
    whole = sum(computed)
    computed.clear()
    chosen = SearchSettings(stride=stride, early_rejection=True)
    found = walked(evaluator := made("early"), chosen, tolerance)
    assert sum(computed) < whole
    abandoned = [s.index for s in found.steps if s.decision == "rejected" and s.scores is None]
    assert abandoned and found.evaluations == plain.evaluations
    steps = [s.model_copy(update={"scores": None}) if s.index in abandoned else s for s in plain.steps]
    assert plain.model_copy(update={"steps": tuple(steps)}) == found
    assert made("early").evaluations == 0 and walked(again := made("early"), chosen, tolerance) == found
    assert again.evaluations == 0 and again.resident is None and evaluator.evaluations > 0


def test_what_is_certain_of_abandoned_weights_is_kept_and_whole_scores_are_preferred(made: Made) -> None:
    first = made("log")
    original = first.evaluate("search", first.original)
    bad, refusing = noisy({PLACES[0]: "2"}), rule({k: v + 0.9 for k, v in original.scores.items()}, 0.0, first.suite)
    assert first.judged("search", bad, refusing) is None and first.evaluations == 2
    again = made("log")
    assert again.judged("search", bad, refusing) is None and again.evaluations == 0
    assert again.judged("search", bad, lambda scores: True) is not None and again.evaluations == 1
    whole = again.judged("search", bad, refusing)
    assert whole is not None and whole == made("log").evaluate("search", bad)


def test_a_model_that_is_scored_plainly_is_looked_at_by_kind(made: Made) -> None:
    evaluator = made("log")
    original = evaluator.evaluate("search", evaluator.original)
    assert evaluator.resident is not None
    evaluator.resident.scorer.plain = "for a test"
    refusing = rule({k: v + 0.9 for k, v in original.scores.items()}, 0.0, evaluator.suite)
    assert evaluator.judged("search", noisy({PLACES[0]: "2"}), refusing) is None


def test_an_answer_that_cannot_be_judged_names_the_model(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = made("log")
    evaluator.evaluate("search", evaluator.original)

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("no such thing")

    monkeypatch.setattr(evaluator.suite.tasks[0].task, "doc_to_target", broken)
    with pytest.raises(EvaluationError, match="cannot judge the answers to task 'letters': no such thing") as error:
        evaluator.judged("search", noisy({PLACES[0]: "1"}), lambda scores: True)
    assert error.value.problem.model == "m"
