"""Second moments of inputs are those of a plain forward pass over the same tokens, and are collected once."""

from pathlib import Path

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation import inputs as module
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.inputs import Inputs, input_grams, read_by
from sandhi_core.evaluation.layers import _Run
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Fingerprint
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny

SOURCES = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluator, Fingerprint]:
    folder = tmp_path_factory.mktemp("inputs")
    directory = tiny("llama", folder / "m", num_hidden_layers=2)
    choice_task(folder / "tasks")
    settings = EvaluationSettings(include_path=str(folder / "tasks"), device="cpu", dtype="float32", threads=1)
    entry = ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="letters", metric="acc", budget=0.1),))
    found = fingerprint(Checkpoint.open(directory, "m"), folder / "scans")
    return Evaluator(directory, found, entry, settings, ScoreLog(folder / "log"), folder / "cache"), found


def test_a_slot_reads_what_the_first_of_its_kind_does(opened: tuple[Evaluator, Fingerprint]) -> None:
    slots = opened[1].slots
    names = {slot.tensor: slot for slot in slots}
    for slot in slots:
        source = names[read_by(slot, slots)]
        assert (source.layer, source.projection) == (slot.layer, SOURCES[slot.projection])


@pytest.mark.parametrize("memory", [1, 2**30])
def test_every_source_has_the_moments_of_what_it_reads(opened: tuple[Evaluator, Fingerprint], memory: int) -> None:
    evaluator, found = opened
    held = evaluator.originals()
    sources = [slot for slot in found.slots if read_by(slot, found.slots) == slot.tensor]
    grams = dict(input_grams(held, evaluator.suite, "profile", sources, memory))
    assert list(grams) == [slot.tensor for slot in sources]

    held.answers(evaluator.suite, "profile")
    packs = [pack for asked in held.scorer.sets.kept.values() for pack in asked.packs]
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in grams}
    hooks = [
        held.module(name).register_forward_pre_hook(lambda _, given, name=name: seen[name].append(given[0][0]))
        for name in seen
    ]
    with torch.inference_mode():
        for pack in packs:
            held.scorer._layered.logits(pack, _Run())
    for hook in hooks:
        hook.remove()
    for name, inputs in seen.items():
        rows = torch.cat(inputs)
        torch.testing.assert_close(grams[name].blocks[0], rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(grams[name].centre, rows.mean(0), rtol=1e-4, atol=1e-6)


def test_moments_are_collected_once_and_are_of_the_original(
    opened: tuple[Evaluator, Fingerprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    first = found.slots[1].tensor  # k, which reads what q does
    evaluator.originals().hold({first: "zero"}, lambda name: torch.zeros(found.tensor(name).shape))
    made = Inputs(tmp_path, found, evaluator).gram(first)
    (source,) = {slot.tensor for slot in found.slots if slot.layer == 0 and slot.projection == "q"}
    fresh = dict(input_grams(evaluator.originals(), evaluator.suite, "profile", [found.slots[0]]))
    torch.testing.assert_close(made.blocks[0], fresh[source].blocks[0], rtol=1e-5, atol=1e-7)

    monkeypatch.setattr(Evaluator, "originals", lambda self: pytest.fail("the model was asked again"))
    again = Inputs(tmp_path, found, evaluator)
    assert all(torch.equal(a, b) for a, b in zip(again.gram(first).blocks, made.blocks, strict=True))
    assert torch.equal(again.gram(first).centre, made.centre)
    assert again.weighting(first) is again.weighting(source)
    assert again.weighting(first, affine=True) is again.weighting(source, affine=True) is not again.weighting(first)


@pytest.mark.parametrize("damage", ["cut off", "flipped", "another's", "importance's"])
def test_a_damaged_file_is_made_again(opened: tuple[Evaluator, Fingerprint], tmp_path: Path, damage: str) -> None:
    evaluator, found = opened
    inputs = Inputs(tmp_path, found, evaluator)
    name = found.slots[0].tensor
    made = inputs.gram(name)
    inputs.ready(importance=True)
    (file,) = tmp_path.rglob(f"{name}.safetensors")
    data = file.read_bytes()
    damaged = {
        "cut off": data[:100],
        "flipped": data[:-1] + bytes([data[-1] ^ 64]),
        "another's": next(f for f in sorted(tmp_path.rglob("*proj*")) if f != file).read_bytes(),
        "importance's": next(tmp_path.rglob("importance*")).read_bytes(),
    }[damage]
    file.unlink()  # what is mapped stays as it is
    file.write_bytes(damaged)
    again = inputs.gram(name)
    torch.testing.assert_close((again.blocks[0], again.centre), (made.blocks[0], made.centre))


def test_what_is_ready_is_not_looked_for_again_and_takes_nobodys_model(
    opened: tuple[Evaluator, Fingerprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    inputs = Inputs(tmp_path, found, evaluator)
    inputs.ready()
    assert evaluator.resident is None  # what was loaded to collect them
    inputs.ready(importance=True)
    assert evaluator.resident is None
    held = evaluator.originals()
    Inputs(tmp_path, found, evaluator).ready(importance=True)
    monkeypatch.setattr(Inputs, "_missing", lambda self: pytest.fail("looked for again"))
    inputs.ready(importance=True)
    assert evaluator.resident is held


def test_a_projection_that_no_question_reaches_is_named(
    opened: tuple[Evaluator, Fingerprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    unused = torch.nn.Linear(4, 4)
    monkeypatch.setattr(evaluator.originals(), "module", lambda name: unused)
    with pytest.raises(EvaluationError, match="no question reaches this projection") as refused:
        Inputs(tmp_path, found, evaluator).gram(found.slots[0].tensor)
    assert (refused.value.problem.model, refused.value.problem.tensor) == ("m", found.slots[0].tensor)


def test_moments_that_cannot_be_kept_name_the_model(
    opened: tuple[Evaluator, Fingerprint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    monkeypatch.setattr(module, "keep", lambda path, tensors: None)
    with pytest.raises(EvaluationError, match="could not be kept") as refused:
        Inputs(tmp_path, found, evaluator).gram(found.slots[0].tensor)
    assert refused.value.problem.model == "m"
