"""Models whose scoring ends early: what is left behind, and that searches decide as with everything scored."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation.early import AbandonedError
from sandhi_core.evaluation.evaluator import Evaluator, Weights, weights_key
from sandhi_core.evaluation.layers import LayeredModel
from sandhi_core.evaluation.packed import PackedLM
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.evaluation.tasks import load_tasks
from sandhi_core.pools.pool import SearchSettings
from sandhi_core.records import Accepts, Evaluation, Plan, PlannedMerge, PlannedStep, Recipe, Trajectory
from sandhi_core.search import search
from tests.evaluation import local_tasks
from tests.evaluation.local_tasks import choice_task, entry, generation_task, settings
from tests.evaluation.test_early import rule
from tests.models import tiny_llama


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
