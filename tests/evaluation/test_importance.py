"""Importance is what autograd gives, sequence by sequence, and leaves the model as it was."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation import importance as module
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.importance import Importance, importance
from sandhi_core.evaluation.packing import TokenSequence
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Fingerprint
from tests.evaluation.local_tasks import choice_task, generation_task
from tests.models import tiny

Opened = tuple[Evaluator, Fingerprint]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma3_text", "qwen3"])
def opened(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Opened:
    folder = tmp_path_factory.mktemp("importance")
    directory = tiny(request.param, folder / "m", num_hidden_layers=2)
    choice_task(folder / "tasks")
    generation_task(folder / "tasks")
    settings = EvaluationSettings(include_path=str(folder / "tasks"), device="cpu", dtype="float32", threads=1)
    tasks = (
        TaskBudget(task="letters", metric="acc", budget=0.1),
        TaskBudget(task="copy", metric="exact_match", budget=0.1),
    )
    entry = ModelEntry(name="m", path=str(directory), tasks=tasks)
    found = fingerprint(Checkpoint.open(directory, "m"), folder / "scans")
    return Evaluator(directory, found, entry, settings, ScoreLog(folder / "log"), folder / "cache"), found


def by_hand(model: torch.nn.Module, layer: torch.nn.Module, sequences: list[TokenSequence]) -> float:
    """One sequence after the other, nothing padded."""
    outputs, gradients = [], []

    def watch(_: object, given: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    hook = layer.register_forward_hook(watch)
    for sequence in sequences:
        logits = model(torch.tensor([sequence.tokens])).logits[0, -len(sequence.targets) :]
        chances = logits.log_softmax(-1)[torch.arange(len(sequence.targets)), list(sequence.targets)]
        chances.sum().backward()  # type: ignore[no-untyped-call]
        gradients.append(outputs[-1].grad)
    hook.remove()
    model.zero_grad()
    counts = [len(s.tokens) for s in sequences]
    rows, slopes = (torch.cat(list(map(by_token, found, counts))) for found in (outputs, gradients))
    product = rows.square().sum(1).mean() * slopes.square().sum(1).mean() / rows.shape[1]
    return float(product)


def by_token(values: torch.Tensor, tokens: int) -> torch.Tensor:
    """All heads of a token in one row, wherever they stand; no sequence here has as many tokens as heads."""
    (found,) = values.detach()
    return (found if len(found) == tokens else found.transpose(0, 1)).flatten(1)


def test_it_is_what_autograd_gives_one_sequence_after_the_other(opened: Opened) -> None:
    evaluator, found = opened
    held = evaluator.originals()
    sequences = held.sequences(evaluator.suite, "profile")[:40:3]
    names = [slot.tensor for slot in found.slots] + ["model.norm.weight", "model.embed_tokens.weight"]
    in_heads = [t.name for t in found.tensors if "q_norm" in t.name or "k_norm" in t.name]
    got = importance(held, sequences, names + in_heads)
    assert set(got) == set(names + in_heads)
    for name in names[::3] + names[-2:] + in_heads:
        assert got[name] == pytest.approx(by_hand(held.model, held.module(name), sequences), rel=1e-3)


def test_as_many_positions_as_heads_are_not_mistaken_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny("gemma3_text", tmp_path / "m")
    settings = EvaluationSettings(device="cpu", dtype="float32", threads=1)
    held = Resident(directory, "m", settings)
    heads = held.model.config.num_attention_heads
    sequences = [TokenSequence(tuple(range(5, 5 + n)), (7,)) for n in (heads, heads - 2)]
    name = "model.layers.0.self_attn.q_norm.weight"
    together = importance(held, sequences, [name])
    monkeypatch.setattr(module, "BATCH", 1)  # nothing is padded for another's sake
    assert together[name] == pytest.approx(importance(held, sequences, [name])[name], rel=1e-4)


def test_answers_are_what_is_scored_and_what_the_model_writes(opened: Opened) -> None:
    evaluator, _ = opened
    held = evaluator.originals()
    tokenizer = held.scorer.tokenizer
    texts = [tokenizer.decode([*s.tokens, s.targets[-1]]) for s in held.sequences(evaluator.suite, "profile")]
    choices, outputs = [t for t in texts if " then" in t], [t for t in texts if "say " in t]
    asked = evaluator.suite.questions("profile")
    assert len(choices) == 3 * asked["letters"] and len(outputs) <= asked["copy"] and len(outputs) > 0


def test_the_model_is_left_as_it_was(opened: Opened) -> None:
    evaluator, found = opened
    before = evaluator.originals().answers(evaluator.suite, "search")
    held = evaluator.originals()
    importance(held, held.sequences(evaluator.suite, "profile"), [found.slots[0].tensor])
    assert all(p.grad is None and p.requires_grad for p in held.model.parameters())
    assert held.answers(evaluator.suite, "search") == before


def test_it_is_collected_once_and_1_on_the_average_of_projections(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    made = Importance(tmp_path, found, evaluator)
    assert fmean(made.of(slot.tensor) for slot in found.slots) == pytest.approx(1.0)
    monkeypatch.setattr(Evaluator, "originals", lambda self: pytest.fail("the model was asked again"))
    assert Importance(tmp_path, found, evaluator).of(found.slots[3].tensor) == made.of(found.slots[3].tensor)
    with pytest.raises(EvaluationError, match="no question reaches this tensor") as refused:
        made.of("model.layers.9.mlp.up_proj.weight")
    assert refused.value.problem.model == "m"


def test_of_many_answers_an_even_part_is_derived(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, found = opened
    held = evaluator.originals()
    sequences = held.sequences(evaluator.suite, "profile")
    derived: list[TokenSequence] = []
    real = module._backward
    monkeypatch.setattr(
        module, "_backward", lambda model, batch, sums: (derived.extend(batch), real(model, batch, sums))
    )
    total = sum(len(s.tokens) for s in sequences)
    importance(held, sequences, [found.slots[0].tensor], tokens=total // 3)
    assert len(derived) == pytest.approx(len(sequences) / 3, abs=1.5)
    assert {s.tokens for s in derived} <= {s.tokens for s in sequences} and sequences[0] in derived


def test_of_answers_with_longer_contexts_than_all_that_is_derived_one_is(opened: Opened) -> None:
    evaluator, found = opened
    held = evaluator.originals()
    sequences, name = held.sequences(evaluator.suite, "profile"), found.slots[0].tensor
    assert importance(held, sequences, [name], tokens=1) == importance(held, sequences[:1], [name])


def test_what_cannot_be_derived_says_what_to_do(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, found = opened
    held = evaluator.originals()
    with pytest.raises(EvaluationError, match="no question asks for an answer"):
        importance(held, [], [found.slots[0].tensor])
    hook = held.module(found.slots[0].tensor).register_forward_hook(lambda _, given, output: output.detach())
    try:
        with pytest.raises(EvaluationError, match="cannot be derived") as caught:
            importance(held, held.sequences(evaluator.suite, "profile"), [found.slots[0].tensor])
    finally:
        hook.remove()
    assert "search.errors: outputs" in (caught.value.problem.remedy or "")
    assert all(p.requires_grad for p in held.model.parameters())


def test_a_projection_without_tokens_is_refused_only_where_it_is_asked_for(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened
    unreached = found.slots[0].tensor
    real = importance
    monkeypatch.setattr(
        module, "importance", lambda held, s, names: real(held, s, [name for name in names if name != unreached])
    )
    made = Importance(tmp_path, found, evaluator)
    assert fmean(made.of(slot.tensor) for slot in found.slots[1:]) == pytest.approx(1.0)
    with pytest.raises(EvaluationError, match="no question reaches this tensor") as refused:
        made.of(unreached)
    assert (refused.value.problem.model, refused.value.problem.tensor) == ("m", unreached)


def test_too_little_memory_is_not_taken_for_code_that_cannot_be_derived(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "_backward", full)
    with pytest.raises(EvaluationError, match="no memory left") as refused:
        Importance(tmp_path, found, evaluator).of(found.slots[0].tensor)
    assert refused.value.problem.model == "m" and "search.errors: outputs" in refused.value.problem.remedy


def test_what_cannot_be_kept_names_the_model(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, found = opened
    monkeypatch.setattr(module, "keep", lambda path, tensors: None)
    with pytest.raises(EvaluationError, match="could not be kept") as refused:
        Importance(tmp_path, found, evaluator).of(found.slots[0].tensor)
    assert refused.value.problem.model == "m"
