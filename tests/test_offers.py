"""What a plan offers a model: spectra made once, residuals in the store, assignments that are scored as they act."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sandhi_core import offers as module
from sandhi_core.assignment import factor_names
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.evaluation.evaluator import Evaluator, merged_weights
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.offers import Offers
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Contributor, Fingerprint, Plan, PlannedMerge, PlannedStep, Recipe
from sandhi_core.rungs.allotment import Bid, nbytes
from sandhi_core.store import Store
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny


class Case:
    """A tiny model whose every slot is offered a matrix a little off its own; the first with a joiner's plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = tiny("llama", folder / "m", num_hidden_layers=2)
        choice_task(folder / "tasks")
        settings = EvaluationSettings(include_path=str(folder / "tasks"), device="cpu", dtype="float32", threads=1)
        tasks = (TaskBudget(task="letters", metric="acc", budget=0.1),)
        entry = ModelEntry(name="m", path=str(self.directory), tasks=tasks)
        self.checkpoint = Checkpoint.open(self.directory, "m")
        self.fingerprint: Fingerprint = fingerprint(self.checkpoint, folder / "scans")
        self.log = ScoreLog(folder / "log")
        self.evaluator = Evaluator(self.directory, self.fingerprint, entry, settings, self.log, folder / "cache")
        self.store = Store(folder / "store")
        self.given = {
            slot.tensor: self.checkpoint.tensor(slot.tensor)
            + 0.01 * torch.randn(self.fingerprint.tensor(slot.tensor).shape, generator=torch.Generator().manual_seed(n))
            for n, slot in enumerate(self.fingerprint.slots)
        }
        self.shared = {name: self.store.put(name, tensor) for name, tensor in self.given.items()}
        self.plan = Plan(
            pool="p",
            model="m",
            fingerprint=self.fingerprint.digest,
            steps=tuple(
                PlannedStep(component=slot.component, layer=slot.layer, merges=(self.merge(n),))
                for n, slot in enumerate(self.fingerprint.slots)
            ),
        )

    def merge(self, number: int) -> PlannedMerge:
        slot = self.fingerprint.slots[number]
        models = ("a", "b") if number == 0 else ("a", "m")
        recipe = Recipe(
            projection=slot.projection,
            shape=self.fingerprint.tensor(slot.tensor).shape,
            dtype="F32",
            method="mean",
            rescale="none",
            contributors=tuple(Contributor(model=m, layer=0, tensor=slot.tensor, digest=m) for m in models),
        )
        return PlannedMerge(tensor=slot.tensor, projection=slot.projection, nbytes=slot.nbytes, recipe=recipe)

    @property
    def offering(self) -> Offers:
        return self.offers()

    def offers(self, **options: Any) -> Offers:
        inputs = Inputs(self.folder / "inputs", self.fingerprint, self.evaluator)
        (self.folder / "spectra").mkdir(exist_ok=True)
        shared = lambda recipe: self.shared[recipe.contributors[0].tensor]  # noqa: E731
        return Offers(self.folder / "spectra", self.fingerprint, self.checkpoint, inputs, self.store, shared, **options)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def test_every_planned_slot_is_offered_its_tensor(case: Case) -> None:
    offers = case.offering.of(case.plan)
    assert list(offers) == [slot.tensor for slot in case.fingerprint.slots]
    first, *others = case.fingerprint.slots
    assert offers[first.tensor].candidate.spared == first.nbytes  # it only joins
    assert all(offers[slot.tensor].candidate.spared == slot.nbytes / 2 for slot in others)
    for name, offer in offers.items():
        assert offer.shared == case.shared[name]
        assert (offer.candidate.squares[:-1] >= offer.candidate.squares[1:]).all()


def test_errors_count_as_much_as_answers_depend_on_the_outputs(case: Case) -> None:
    plain, weighed = case.offering.of(case.plan), case.offers(answers=True).of(case.plan)
    importance = Inputs(case.folder / "inputs", case.fingerprint, case.evaluator).importance
    for name, offer in weighed.items():
        assert offer.file == plain[name].file
        np.testing.assert_array_equal(offer.candidate.squares, importance.of(name) * plain[name].candidate.squares)
    assert len({importance.of(name) for name in weighed}) > 1


def test_spectra_are_made_once_and_again_where_they_are_lost(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case.offering.of(case.plan)
    real, asked = module.spectrum, []
    monkeypatch.setattr(module, "spectrum", lambda *given: (asked.append(1), real(*given))[1])
    name = next(iter(made))
    before = made[name].residual(Bid(2))
    case.offering.of(case.plan)
    assert asked == []
    made[name].file.unlink()
    again = case.offering.of(case.plan)[name].residual(Bid(2))
    assert asked == [1]
    assert again.parts.keys() == before.parts.keys() == {"up", "down"}
    assert all(torch.equal(again.parts[part], before.parts[part]) for part in before.parts)


def test_an_assignment_acts_as_shared_matrix_and_residual(case: Case) -> None:
    """Scores under hooks equal those of the matrix W + B A itself, put in place by hand."""
    offering = case.offering
    offers = offering.of(case.plan)
    ranks = {name: Bid(n % 4) for n, name in enumerate(offers)}
    held = offering.assigned(offers, ranks)
    assert held.tensors == case.shared and {n for n, (r, _) in ranks.items() if r} == held.adjustments.keys()
    for name, adjustment in held.adjustments.items():
        down, up = factor_names(name)
        assert case.store.path(adjustment.down, down).is_file() and case.store.path(adjustment.up, up).is_file()
        assert adjustment.nbytes == case.store.tensor(adjustment.up).nbytes + case.store.tensor(adjustment.down).nbytes

    acting = {
        name: case.given[name]
        + (
            case.store.tensor(a.up).float() @ case.store.tensor(a.down).float()
            if (a := held.adjustments.get(name))
            else 0.0
        )
        for name in offers
    }
    resident = case.evaluator.originals()
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        original = resident.model(tokens).logits
        weights = merged_weights(case.fingerprint, held, case.store)
        resident.hold(weights.tensors, weights.read)
        served = resident.model(tokens).logits
        resident.hold(dict.fromkeys(acting, "by hand"), acting.__getitem__)
        torch.testing.assert_close(served, resident.model(tokens).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(served, original, rtol=1e-3, atol=1e-3)
        resident.hold({}, acting.__getitem__)
        assert torch.equal(resident.model(tokens).logits, original)


@pytest.mark.parametrize("largest", [0, 2])
def test_with_vectors_it_acts_as_scaled_and_shifted(case: Case, largest: int) -> None:
    """Hooks against a forward pass of the matrices s W + B A, put in place by hand, with t as a bias."""
    offering = case.offers(largest=largest, affine=True)
    offers = offering.of(case.plan)
    for offer in offers.values():
        assert offer.candidate.limit == largest and offer.candidate.affine is not None
        # A fit takes error off, or leaves what its rounding to bfloat16 adds.
        assert offer.candidate.affine.sum() < offer.candidate.squares.sum() + 1e-5
    held = offering.assigned(offers, dict.fromkeys(offers, Bid(largest, affine=True)))
    assert {a.kind for a in held.adjustments.values()} == {"affine"}
    assert {a.rank for a in held.adjustments.values()} == {largest}
    resident = case.evaluator.originals()
    weights = merged_weights(case.fingerprint, held, case.store)
    resident.hold(weights.tensors, weights.read)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        served = resident.model(tokens).logits
        acting = {}
        for name, added in held.adjustments.items():
            scale, shift = case.store.tensor(added.scale).float(), case.store.tensor(added.shift).float()
            acting[name] = scale[:, None] * case.given[name]
            if largest:
                acting[name] += case.store.tensor(added.up).float() @ case.store.tensor(added.down).float()
            assert added.nbytes == nbytes(acting[name].shape, largest, affine=True)
            assert resident.module(name).bias is None
            resident.module(name).register_forward_hook(lambda _, given, output, shift=shift: output + shift)
        resident.hold(dict.fromkeys(acting, "by hand"), acting.__getitem__)
        torch.testing.assert_close(served, resident.model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_offers_without_vectors_are_the_same_beside_them(case: Case) -> None:
    plain, both = case.offering.of(case.plan), case.offers(affine=True).of(case.plan)
    for name, offer in plain.items():
        assert offer.candidate.affine is None and offer.file == both[name].file != both[name].scaled
        assert (offer.candidate.squares == both[name].candidate.squares).all()


def test_scores_know_residuals_apart(case: Case) -> None:
    offering = case.offering
    offers = offering.of(case.plan)
    name = next(iter(offers))
    keys = {
        merged_weights(case.fingerprint, offering.assigned(offers, {name: Bid(rank)}), case.store).key
        for rank in range(4)
    }
    assert len(keys) == 4


def test_cached_layers_do_not_hide_a_residual(case: Case) -> None:
    """Only the residual changes between two scores; the second is that of a fresh model."""
    offering = case.offering
    offers = offering.of(case.plan)
    held = [offering.assigned(offers, dict.fromkeys(offers, Bid(rank))) for rank in (0, 8, 0)]
    weights = [merged_weights(case.fingerprint, one, case.store) for one in held]
    resident = case.evaluator.originals()
    likelihoods = []
    for one in weights:
        resident.hold(one.tensors, one.read)
        requests = case.evaluator.suite.requests("search")
        with torch.inference_mode():
            resident.scorer.answer(requests, one.tensors)
        likelihoods.append([request.resps[0] for asked in requests.values() for request in asked])
    assert likelihoods[0] != likelihoods[1] and likelihoods[0] == likelihoods[2]


@pytest.mark.parametrize("affine", [False, True])
def test_a_spectrum_kept_in_short_bids_the_same_and_is_made_whole_for_a_residual(case: Case, affine: bool) -> None:
    """But for scaled and shifted rows, which a spectrum in short says nothing of."""
    merge = case.merge(1)
    offering = case.offers(affine=affine)
    whole = offering.offer(merge.tensor, merge.recipe)
    before = whole.residual(Bid(3, affine))
    offering.shorten(merge.tensor, merge.recipe)
    assert not whole.file.exists()
    short = offering.candidate(merge.tensor, merge.recipe)
    assert not whole.file.exists()
    assert (short.squares == whole.candidate.squares).all() and short.affine is None
    assert (short.shape, short.spared, short.limit) == (
        whole.candidate.shape,
        whole.candidate.spared,
        whole.candidate.limit,
    )
    made = offering.offer(merge.tensor, merge.recipe)
    again = made.residual(Bid(3, affine))
    assert (made.candidate.affine is not None) == affine and again.parts.keys() == before.parts.keys()
    assert all(torch.equal(again.parts[part], before.parts[part]) for part in before.parts)


@pytest.mark.parametrize("affine", [False, True])
def test_a_spectrum_that_another_pool_removed_is_made_again(case: Case, affine: bool) -> None:
    """Spectra are named by what they hold, so pools of one root share them: one rejects what another's ladder cuts."""
    merge = case.merge(1)
    ladders = case.offers(affine=affine).offer(merge.tensor, merge.recipe)
    before = ladders.residual(Bid(3, affine))
    case.offering.shorten(merge.tensor, merge.recipe)
    for path in (ladders.scaled,) if ladders.scaled else ():
        path.unlink()
    after = ladders.residual(Bid(3, affine))
    assert after.parts.keys() == before.parts.keys()
    assert all(torch.equal(after.parts[part], before.parts[part]) for part in before.parts)


def test_the_owner_of_what_is_taken_needs_no_decomposition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = case.fingerprint.slots[1]
    own = Contributor(model="m", layer=0, tensor=slot.tensor, digest=slot.digest)
    recipe = case.merge(1).recipe.model_copy(update={"method": "member", "contributors": (own,)})
    case.shared[slot.tensor] = case.store.put(slot.tensor, case.checkpoint.tensor(slot.tensor))
    with monkeypatch.context() as patch:
        patch.setattr(module, "spectrum", lambda *given: pytest.fail("decomposed"))
        found = case.offering.candidate(slot.tensor, recipe)
    whole = case.offering.offer(slot.tensor, recipe).candidate
    np.testing.assert_array_equal(found.squares, whole.squares)
    assert (found.shape, found.spared, found.limit) == (whole.shape, whole.spared, whole.limit)


def test_a_norm_below_a_page_spares_nothing(case: Case) -> None:
    """As `savings` counts it: it would get no file of its own."""
    name, table = "model.norm.weight", "model.embed_tokens.weight"
    for tensor, part in ((name, 0.0), (table, 0.5)):
        info = case.fingerprint.tensor(tensor)
        of = tuple(Contributor(model=m, layer=0, tensor=tensor, digest=m) for m in "am")
        recipe = case.merge(1).recipe.model_copy(
            update={"projection": tensor.removeprefix("model."), "shape": info.shape, "contributors": of}
        )
        case.shared[tensor] = case.store.put(tensor, 1.01 * case.checkpoint.tensor(tensor))
        assert case.offering.offer(tensor, recipe).candidate.spared == part * info.nbytes


def test_evidence_asks_for_no_scaled_rows(case: Case) -> None:
    merge = case.merge(1)
    assert case.offers(affine=True).candidate(merge.tensor, merge.recipe).affine is None
    assert len(list((case.folder / "spectra").iterdir())) == 1


@pytest.mark.parametrize(
    ("method", "contributors", "payers", "part"),
    [
        ("mean", ("a", "m", "z"), (), 2 / 3),
        ("regmean", ("a", "z"), (), 1.0),
        ("member", ("m",), (), 0.0),
        ("member", ("a",), (), 1.0),
        ("base", ("merging.bases[0]",), ("a", "m"), 1 / 2),
        ("base", ("merging.bases[0]",), ("a", "b"), 1.0),
        ("base", ("merging.bases[0]",), ("m",), 0.0),
    ],
)
def test_what_a_slot_spares_is_what_the_pool_need_not_hold_again(
    case: Case, method: str, contributors: tuple[str, ...], payers: tuple[str, ...], part: float
) -> None:
    slot = case.fingerprint.slots[1]
    recipe = case.merge(1).recipe.model_copy(
        update={
            "method": method,
            "contributors": tuple(Contributor(model=m, layer=0, tensor=slot.tensor, digest=m) for m in contributors),
            "payers": payers,
        }
    )
    assert case.offering.candidate(slot.tensor, recipe).spared == pytest.approx(part * slot.nbytes)
