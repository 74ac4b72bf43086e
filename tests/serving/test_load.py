"""Exports with residuals: loaded as they were scored, out of the mapped files, and by nothing that would drop them."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from sandhi_core.checkpoints.survey import survey
from sandhi_core.checkpoints.survey_files import ADJUSTED_INDEX, INDEX, PICKLES
from sandhi_core.claims import claims_of
from sandhi_core.disk import verify_disk
from sandhi_core.errors import CheckpointError
from sandhi_core.evaluation.evaluator import merged_weights
from sandhi_core.evaluation.resident import Resident
from sandhi_core.rungs.residual import factors
from sandhi_core.serving.census import unmapped_bytes
from sandhi_core.serving.load import index_of, load, module_of
from tests.evaluation.local_tasks import settings
from tests.exported import EMBED, GATE, MODELS, RANKS, UP, VECTORS, Case, make_case, make_models, stock
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [{}, RANKS])
def test_vectors_are_served_as_they_were_scored_out_of_the_files(
    tmp_path: Path, ranks: dict[tuple[str, str], int], dtype: torch.dtype, name: str
) -> None:
    """Beside factors and without them."""
    case = make_case(tmp_path, make_models(tmp_path / "models", dtype), ranks, VECTORS)
    root, manifest = case.exported()
    assert verify_disk(root, manifest).problems == ()
    loaded = load(root / name)
    assert torch.equal(logits(loaded), logits(case.swapped(name)))
    parts = sum(len(case.residual(name, tensor).parts) for tensor in case.adjustments.get(name, {}))
    assert len(factors(loaded)) == parts
    assert unmapped_bytes(loaded, root / name) == 0
    claims, plain = claims_of(manifest), Case(**{**vars(case), "adjustments": {}}).exported()[1]
    assert claims.added == sum(one.overhead for one in case.assignments.values())
    assert claims.claimed == claims_of(plain).claimed - claims.added
    if parts:
        with pytest.raises(CheckpointError, match="these would be left out"):
            loaded.save_pretrained(tmp_path / "saved")
        with pytest.raises(OSError, match=r"no file named model.safetensors"):
            AutoModelForCausalLM.from_pretrained(root / name, local_files_only=True)


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


@pytest.mark.parametrize("name", ADJUSTED)
def test_no_loader_that_globs_finds_weights_that_it_would_serve_without_residuals(
    case: Case, root: Path, name: str
) -> None:
    """vLLM and SGLang take all *.safetensors, else *.bin and *.pt, where there is no index that they know."""
    files = [p for p in (root / name).rglob("*") if p.is_file()]
    assert not [p for p in files for pattern in ("*.safetensors", "*.safetensors.*", *PICKLES) if p.match(pattern)]
    shards = sorted((root / name).glob("*.sandhi"))
    held = {tensor: path.name for path in shards for tensor in load_file(path)}  # safetensors all the same
    assert held == {tensor: entry.file for tensor, entry in case.exported()[1].models[name].tensors.items()}


def test_shared_shards_are_the_same_files_in_either_kind_of_directory(case: Case, root: Path) -> None:
    manifest = case.exported()[1]
    entry = case.store.path(case.tensors["tied"][UP], UP)
    files = {name: root / name / manifest.models[name].tensors[UP].file for name in MODELS}
    assert {name: path.suffix for name, path in files.items()} == {
        "sharded": ".safetensors",
        "single": ".sandhi",
        "tied": ".sandhi",
    }
    assert all(path.samefile(entry) for path in files.values())
    shared = {path.name for name in ("sharded", "single") for path in (root / name).glob("shared-*")}
    assert len({Path(file).stem for file in shared}) == 3  # what both hold has one name before the suffix


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


def test_parts_of_such_an_export_are_no_checkpoint_either(root: Path, tmp_path: Path) -> None:
    parts = Path(shutil.copytree(root / "single", tmp_path / "single"))
    (parts / ADJUSTED_INDEX).unlink()
    (problem,) = survey(parts, "single").problems
    assert (problem.code, problem.file) == ("weights-missing", "adapter_model.sandhi")
    plain = tiny_llama(tmp_path / "plain")
    shutil.copy(parts / "private.sandhi", plain)
    (problem,) = survey(plain, "plain").problems
    assert (problem.code, problem.file) == ("weights-stray", "private.sandhi")
    with pytest.raises(CheckpointError, match=r"is missing, but private.sandhi is a part of a model with residuals"):
        index_of(plain)


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


def test_a_model_with_residuals_refuses_to_be_saved_without_them(halves: Case, tmp_path: Path) -> None:
    root, _ = halves.exported()
    with pytest.raises(CheckpointError, match="these would be left out"):
        load(root / "single").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_whole_export_is_no_model(halves: Case) -> None:
    root, _ = halves.exported()
    with pytest.raises(CheckpointError, match=r"is a whole export .give the directory of one model"):
        load(root)
