"""Exports with residuals: loaded as they were scored, out of the mapped files, and by nothing that would drop them."""

import io
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError
from sandhi_core.evaluation.evaluator import merged_weights
from sandhi_core.evaluation.resident import Resident
from sandhi_core.rungs.residual import factors
from sandhi_core.serving.hold import unmapped_bytes
from sandhi_core.serving.load import NEW_TOKENS, load, main, module_of
from sandhi_core.survey import survey
from sandhi_core.survey_files import ADJUSTED_INDEX, INDEX
from tests.evaluation.local_tasks import settings
from tests.exported import EMBED, GATE, MODELS, RANKS, Case, make_case, make_models, stock
from tests.models import tiny_llama

TOKENS = torch.arange(40)[None] % 64
ADJUSTED = ("single", "tied")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"), make_models(tmp_path_factory.mktemp("models")), RANKS)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same in bfloat16."""
    models = make_models(tmp_path_factory.mktemp("models"), torch.bfloat16)
    return make_case(tmp_path_factory.mktemp("case"), models, RANKS)


@pytest.fixture(scope="module")
def root(case: Case) -> Path:
    return case.exported()[0]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_answers_as_what_was_scored(case: Case, root: Path, tmp_path: Path, name: str) -> None:
    assert verify_disk(root, case.exported()[1]).problems == ()
    scored = Resident(case.checkpoints[name].directory, name, settings(tmp_path))
    weights = merged_weights(case.fingerprints[name], case.assignments[name], case.store)
    scored.hold(weights.tensors, weights.read)
    loaded = load(root / name)
    assert torch.equal(logits(loaded), logits(scored.model))
    assert torch.equal(logits(loaded), logits(case.swapped(name)))
    assert torch.equal(logits(loaded), logits(Resident(root / name, name, settings(tmp_path)).model))
    assert not loaded.training and loaded.dtype == torch.float32


@pytest.mark.parametrize("name", ADJUSTED)
def test_residuals_make_a_difference(case: Case, root: Path, name: str) -> None:
    plain = Case(case.root, case.pool, case.checkpoints, case.fingerprints, case.tensors, case.merged)
    assert not torch.equal(logits(load(root / name)), logits(plain.swapped(name)))


@pytest.mark.parametrize("name", MODELS)
def test_in_the_files_dtype_nothing_is_copied(halves: Case, name: str) -> None:
    root, _ = halves.exported()
    loaded = load(root / name)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(halves.swapped(name)))
    assert len(factors(loaded)) == 2 * sum(model == name for model, _ in RANKS)
    assert unmapped_bytes(loaded, root / name) == 0


def test_residuals_stay_mapped_whatever_dtype_the_model_computes_in(halves: Case, case: Case, root: Path) -> None:
    wide = load(halves.exported()[0] / "single", torch.float32)
    assert wide.dtype == torch.float32
    assert unmapped_bytes(wide, halves.exported()[0] / "single") == sum(p.nbytes for p in wide.parameters())
    # the files' own float32: only the factors are bfloat16
    assert unmapped_bytes(load(root / "single"), root / "single") == 0


def test_a_model_is_asked_for_in_another_dtype_as_it_was_scored(halves: Case, tmp_path: Path) -> None:
    scored = Resident(halves.checkpoints["single"].directory, "single", settings(tmp_path, dtype="float32"))
    weights = merged_weights(halves.fingerprints["single"], halves.assignments["single"], halves.store)
    scored.hold(weights.tensors, weights.read)
    exported = Resident(halves.exported()[0] / "single", "single", settings(tmp_path, dtype="float32"))
    assert torch.equal(logits(exported.model), logits(scored.model))


def test_ties_generation_and_name_are_those_of_the_directory(case: Case, root: Path) -> None:
    tied = load(root / "tied")
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    for name in ADJUSTED:
        ours, theirs = load(root / name), stock(case.checkpoints[name].directory)
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
        assert ours.name_or_path == ours.config.name_or_path == str(root / name)
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_a_directory_without_a_generation_config_gets_one(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models")
    for directory in models.values():
        (directory / "generation_config.json").unlink()
    root, _ = make_case(tmp_path, models, RANKS).exported()
    ours, theirs = (
        {key: value for key, value in model.generation_config.to_dict().items() if value}  # None and False are one
        for model in (load(root / "single"), stock(models["single"]))
    )
    assert ours == theirs and ours["eos_token_id"] == 2


# --- who may open what --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADJUSTED)
@pytest.mark.parametrize("options", [{}, {"use_safetensors": True}])
def test_stock_transformers_refuses_what_it_would_answer_wrongly(
    root: Path, name: str, options: dict[str, bool]
) -> None:
    with pytest.raises(OSError, match=r"no file named model.safetensors"):
        AutoModelForCausalLM.from_pretrained(root / name, local_files_only=True, **options)


def test_a_model_that_adds_nothing_is_the_checkpoint_that_it_was(case: Case, root: Path, tmp_path: Path) -> None:
    plain = Case(case.root, case.pool, case.checkpoints, case.fingerprints, case.tensors, case.merged)
    before, manifest = plain.exported()
    assert manifest.models["sharded"] == case.exported()[1].models["sharded"]
    files = sorted(p.name for p in (before / "sharded").iterdir())
    assert INDEX in files and files == sorted(p.name for p in (root / "sharded").iterdir())
    for file in files:
        assert (before / "sharded" / file).read_bytes() == (root / "sharded" / file).read_bytes()
    assert torch.equal(logits(stock(root / "sharded")), logits(load(root / "sharded")))


def test_an_export_with_residuals_is_no_member_of_a_pool(root: Path) -> None:
    (problem,) = survey(root / "single", "single").problems
    assert (problem.code, problem.file) == ("weights-missing", ADJUSTED_INDEX)


def test_a_checkpoint_is_loaded_too(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "plain")
    assert torch.equal(logits(load(directory)), logits(stock(directory)))
    with pytest.raises(CheckpointError, match=r"model nothing file .*nothing: is no directory"):
        load(tmp_path / "nothing")


def test_names_may_lack_the_prefix(case: Case) -> None:
    model = stock(case.checkpoints["single"].directory)
    assert module_of(model, GATE) is module_of(model, GATE.removeprefix("model.")) is not None
    assert module_of(model, EMBED) is model.get_input_embeddings()
    for nothing in ("weight", "model.layers.9.mlp.up_proj.weight", "model.layers.0.mlp.weight", GATE + "s", ""):
        assert module_of(model, nothing) is None


# --- a quick look -------------------------------------------------------------------------------------------


def greedy(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    asked = len(tokens)
    while len(tokens) < asked + NEW_TOKENS:
        with torch.inference_mode():
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
        if tokens[-1] == model.config.eos_token_id:
            break
    return tokens[asked:]


def test_prompts_are_continued(
    case: Case, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\nde f"))
    assert main([str(root / "single")]) == 0
    model, tokenizer = case.swapped("single"), AutoTokenizer.from_pretrained(root / "single")
    continued = [
        tokenizer.decode(greedy(model, tokenizer(prompt).input_ids), skip_special_tokens=True)
        for prompt in ("abc", "de f")
    ]
    assert capsys.readouterr().out == "".join(text.replace("\n", "\\n") + "\n" for text in continued)


def test_a_directory_that_is_none_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "error: checkpoint: model none file " in err
