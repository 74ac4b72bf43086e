"""What norms, biases, embeddings and heads act on is what a plain forward pass over the same tokens shows; a model that
holds others of them is scored as one that was loaded with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sandhi_core.assignment import Assignment
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.errors import EvaluationError
from sandhi_core.evaluation import uses as module
from sandhi_core.evaluation.evaluator import Evaluator, merged_weights
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.layers import _Run
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.records import Fingerprint
from sandhi_core.store import Store
from tests.evaluation.local_tasks import choice_task
from tests.models import edit_tensors, tiny

EMBEDDING, HEAD, FINAL = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def opened(folder: Path, directory: Path, log: str = "log") -> tuple[Evaluator, Fingerprint]:
    choice_task(folder / "tasks")
    settings = EvaluationSettings(include_path=str(folder / "tasks"), device="cpu", dtype="float32", threads=1)
    entry = ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="letters", metric="acc", budget=0.1),))
    found = fingerprint(Checkpoint.open(directory, "m"), folder / "scans")
    return Evaluator(directory, found, entry, settings, ScoreLog(folder / log), folder / "cache"), found


def seen(evaluator: Evaluator, tensor: str, *, outputs: bool = False) -> Tensor:
    """What goes into (or comes out of) the module of a tensor, for every token of every pack."""
    held = evaluator.originals()
    held.answers(evaluator.suite, "profile")
    found: list[Tensor] = []
    packs = [pack for asked in held.scorer.sets.kept.values() for pack in asked.packs]
    with (
        held.module(tensor).register_forward_hook(
            lambda _, given, output: found.append((output if outputs else given[0])[0])
        ),
        torch.inference_mode(),
    ):
        for pack in packs:
            held.scorer._layered.logits(pack, _Run())
    return torch.cat(found)


@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", False), ("qwen3", True), ("gemma3_text", True)])
def test_uses_are_those_of_a_plain_pass(tmp_path: Path, model_type: str, tied: bool) -> None:
    directory = tiny(model_type, tmp_path / "m", tie_word_embeddings=tied)
    evaluator, found = opened(tmp_path, directory)
    uses = Inputs(tmp_path / "inputs", found, evaluator).uses
    norms = [FINAL, "model.layers.1.post_attention_layernorm.weight"]
    norms += ["model.layers.0.self_attn.k_norm.weight"] if model_type != "qwen2" else []
    for name in norms:
        inputs = seen(evaluator, name).flatten(0, -2)
        z = inputs / inputs.square().mean(dim=-1, keepdim=True).sqrt()
        rows = uses.of(name).rows
        assert rows is not None and rows.mean() == pytest.approx(1.0, rel=1e-4)
        torch.testing.assert_close(rows.float(), z.square().mean(dim=0), rtol=1e-3, atol=1e-5)
    tokens = seen(evaluator, EMBEDDING)
    table = uses.of(EMBEDDING)
    assert table.rows is not None
    torch.testing.assert_close(table.rows, torch.bincount(tokens, minlength=64).double() / len(tokens))
    head = table if tied else uses.of(HEAD)
    read = seen(evaluator, HEAD)
    assert head.gram is not None and (tied or table.gram is None)
    torch.testing.assert_close(head.gram.blocks[0], read.T @ read / len(read), rtol=1e-3, atol=1e-5)
    if model_type == "qwen2":
        bias = uses.of("model.layers.0.self_attn.q_proj.bias")
        outputs = seen(evaluator, "model.layers.0.self_attn.q_proj.bias", outputs=True)
        assert bias.whole is not None and bias.rows is None
        assert float(bias.whole) == pytest.approx(float(outputs.square().sum(dim=1).mean()), rel=1e-4)


def test_uses_are_collected_once_and_what_cannot_be_kept_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, found = opened(tmp_path, tiny("llama", tmp_path / "m"))
    first = Inputs(tmp_path / "inputs", found, evaluator).uses.of(FINAL)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "originals", lambda self: pytest.fail("the model was asked again"))
        again = Inputs(tmp_path / "inputs", found, evaluator).uses.of(FINAL)
    assert first.rows is not None and again.rows is not None and torch.equal(first.rows, again.rows)
    monkeypatch.setattr(module, "keep", lambda path, tensors: None)
    with pytest.raises(EvaluationError, match="could not be kept") as refused:
        Inputs(tmp_path / "elsewhere", found, evaluator).uses.of(HEAD)
    assert refused.value.problem.model == "m"
    assert refused.value.problem.tensor == HEAD and "grouping.besides" in refused.value.problem.remedy


def moved(name: str) -> Callable[[dict[str, Tensor]], None]:
    def move(tensors: dict[str, Tensor]) -> None:
        noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
        tensors[name] = (tensors[name] + 0.5 * noise).to(tensors[name].dtype)

    return move


@pytest.mark.parametrize("tied", [True, False])
def test_changed_norms_and_tables_are_scored_as_if_loaded(tmp_path: Path, tied: bool) -> None:
    """One after the other in one resident model, whose states are kept in between."""
    size: dict[str, Any] = {"tie_word_embeddings": tied, "num_hidden_layers": 3, "initializer_range": 0.6}
    evaluator, found = opened(tmp_path, tiny("llama", tmp_path / "m", **size))
    original = evaluator.evaluate("search", evaluator.original)
    store = Store(tmp_path / "store")
    names = [
        EMBEDDING,
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        FINAL,
    ]
    for number, name in enumerate(names if tied else [*names, HEAD]):
        directory = tiny("llama", tmp_path / f"m{number}", **size)
        edit_tensors(directory, moved(name))
        digest = store.put(name, Checkpoint.open(directory, "m").tensor(name))
        held = evaluator.evaluate("search", merged_weights(found, Assignment({name: digest}), store))
        fresh = opened(tmp_path, directory, f"log{number}")[0]
        loaded = fresh.evaluate("search", fresh.original)
        assert held.tasks == loaded.tasks, name
        seen_by_one = evaluator._loaded().model(torch.arange(3, 40)[None]).logits
        torch.testing.assert_close(seen_by_one, fresh.originals().model(torch.arange(3, 40)[None]).logits)
    assert evaluator._made("again", "search", evaluator.original).tasks == original.tasks
