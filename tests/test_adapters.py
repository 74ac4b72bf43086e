"""Adapters beside an export: which models are some, what their files hold, and that they answer as the models do."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from sandhi_core.adapters import CONFIG, all_there, stock_files, stock_plan, summary, told
from sandhi_core.assignment import PEFT, factor_names, factors_among, vector_names
from sandhi_core.claims import claims_of
from sandhi_core.disk import verify_disk
from sandhi_core.layout import read_manifest
from sandhi_core.records import ExportedModel, ExportedTensor, Manifest
from sandhi_core.serving.load import load
from tests.adapted import ADAPTED, MAX_RANK, NORM, RANKS, adapted_case
from tests.exported import Case, stock

IDS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return adapted_case(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def root(case: Case) -> Path:
    return case.exported()[0]


@pytest.fixture(scope="module")
def manifest(root: Path) -> Manifest:
    return read_manifest(root)


def test_the_plan_says_which_models_are_adapters_and_why_the_others_are_none(case: Case, manifest: Manifest) -> None:
    plan = manifest.stock
    assert plan is not None and plan == stock_plan(manifest.models, MAX_RANK)
    (base,) = plan.bases
    assert tuple(base.adapters) == ADAPTED and base.rank == 8
    for name, adapter in base.adapters.items():
        assert adapter.rank == max(RANKS[name].values(), default=0)
        assert adapter.nbytes == case.assignments[name].overhead
        assert adapter.directory == (f"{name}.adapter" if RANKS[name] else None)
    assert plan.ordinary["dot"].first == NORM and plan.ordinary["dot"].count == 1
    assert plan.ordinary["dot"].nbytes == 4 * 32 and plan.ordinary["dot"].reason == "holds other tensors than ann"
    assert plan.ordinary["eve"].reason == "has residuals of a larger rank than 16" and plan.ordinary["eve"].count == 1
    assert plan.ordinary["far"].reason == "is alone with tensors of these names and shapes"
    assert told(plan) == "3 of 6 models are adapters of one base"


def test_a_base_is_a_stock_checkpoint_of_what_its_models_have_in_common(root: Path, manifest: Manifest) -> None:
    assert manifest.stock is not None
    base = root / manifest.stock.bases[0].directory
    ours, theirs = stock(base), load(root / "cat")  # which adds nothing
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    held = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert held.keys() == manifest.models["cat"].tensors.keys()


# Of PEFT's own, about a name that transformers will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["ann", "ben"])
def test_stock_peft_answers_as_our_loader(root: Path, manifest: Manifest, name: str) -> None:
    assert manifest.stock is not None
    base = stock(root / manifest.stock.bases[0].directory)
    alone = base(IDS).logits
    adapted = PeftModel.from_pretrained(base, root / f"{name}.adapter").eval()
    ours = load(root / name)
    with torch.no_grad():
        assert torch.allclose(adapted(IDS).logits, ours(IDS).logits, rtol=0, atol=1e-4)
    assert not torch.allclose(alone, ours(IDS).logits, rtol=0, atol=1e-3)  # the adapter matters
    assert torch.equal(greedy(adapted), greedy(ours))
    layers = {n for n, _ in adapted.named_parameters() if ".lora_A." in n}
    assert len(layers) == len(RANKS[name])


def greedy(model: torch.nn.Module) -> Tensor:
    generate = model.generate
    assert callable(generate)
    found = generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=12, do_sample=False)
    assert isinstance(found, Tensor)
    return found


def test_an_adapters_scale_is_one_for_engines_that_pass_over_the_patterns(root: Path) -> None:
    config = json.loads((root / "ann.adapter" / CONFIG).read_text())
    assert config["lora_alpha"] == config["r"] == 8 and config["rank_pattern"] == config["alpha_pattern"]
    assert sorted(config["rank_pattern"].values()) == [1, 3, 8]
    factors = load_file(root / "ann.adapter" / "adapter_model.safetensors")
    for module, rank in config["rank_pattern"].items():
        down, up = (factors[f] for f in factor_names(f"{module}.weight"))
        assert len(down) == up.shape[1] == rank and f"{PEFT}{module}.lora_A.weight" in factors
    assert len(factors) == 6


def test_adapters_and_bases_add_no_weights_and_change_no_claim(case: Case, root: Path, manifest: Manifest) -> None:
    sources = {path for path, source in stock_files(manifest).items() if not isinstance(source, bytes)}
    models = {f.stat().st_ino for name in manifest.models for f in (root / name).rglob("*") if f.is_file()}
    assert sources and all((root / path).stat().st_ino in models for path in sources)
    assert {p for p in sources if p.endswith(".safetensors")} == {
        f.relative_to(root).as_posix() for d in ("base.*", "*.adapter") for f in root.glob(f"{d}/*.safetensors")
    }
    disk, counted = verify_disk(root, manifest), claims_of(manifest)
    assert disk.problems == () and all_there(root, manifest)
    assert counted.checkpoint_bytes - disk.distinct_bytes == counted.claimed
    without = manifest.model_copy(update={"stock": None})
    assert claims_of(without) == counted


def test_an_export_again_has_the_same_bytes(case: Case, root: Path) -> None:
    manifest = read_manifest(root)
    assert case.exported() == (root, manifest)
    assert root.name == manifest.digest[:16]


def test_a_pool_that_asks_for_none_has_none(case: Case, tmp_path: Path) -> None:
    plain = case.pool.model_copy(update={"deploy": case.pool.deploy.model_copy(update={"adapters": None})})
    found = Case(
        case.root, plain, case.checkpoints, case.fingerprints, case.tensors, case.merged, case.adjustments
    ).exported()
    assert found[1].stock is None and b"stock" not in found[1].canonical()
    assert {path.name for path in found[0].iterdir() if path.is_dir()} == set(case.checkpoints)


# --- the plan, of any models --------------------------------------------------------------------------------


def of_rank(rank: int, norm: str, files: dict[str, str]) -> ExportedModel:
    """A model of two tensors, and a residual of this rank to one of them."""

    def tensor(digest: str, *shape: int) -> ExportedTensor:
        values = {"digest": digest, "dtype": "BF16", "shape": shape, "nbytes": 4, "file": "f", "sharing": "private"}
        return ExportedTensor.model_validate(values)

    tensors = {"model.q.weight": tensor("q", 6, 4), "model.norm.weight": tensor(norm, 4)}
    if rank:
        down, up = factor_names("model.q.weight")
        tensors |= {down: tensor("a", rank, 4), up: tensor("b", 6, rank)}
    return ExportedModel(directory="m", weights="w", files=files, tensors=tensors, linked="hardlink")


def test_scaled_rows_make_a_model_none() -> None:
    plain, scaled = of_rank(2, "x", {}), of_rank(2, "x", {})
    vectors = dict.fromkeys(vector_names("model.q.weight"), plain.tensors["model.norm.weight"])
    scaled = scaled.model_copy(update={"tensors": scaled.tensors | vectors})
    plan = stock_plan({"a": plain, "b": plain, "c": scaled}, 8)
    assert list(plan.base_of) == ["a", "b"]
    why = plan.ordinary["c"]
    assert why.reason == "scales rows, which no adapter holds"
    assert (why.first, why.count, why.nbytes) == ("model.q.weight", 1, 4 * 4)


def test_a_plan_is_summarised_once_for_all_who_tell_of_it(manifest: Manifest) -> None:
    found = summary(manifest.stock)
    assert (found["told"], found["complete"], found["models"]) == ("3 of 6 models are adapters of one base", 3, 6)
    assert list(found["bases"].values()) == [list(ADAPTED)] and found["ordinary"]["dot"]["first"] == NORM
    assert summary(None) == {}


any_model = st.builds(
    of_rank,
    st.integers(0, 9),
    st.sampled_from("xy"),
    st.fixed_dictionaries({"config.json": st.sampled_from("12"), "README.md": st.sampled_from("12")}),
)


@given(st.dictionaries(st.sampled_from("abcdef"), any_model, min_size=1), st.sampled_from([1, 8]))
def test_every_model_is_once_in_a_plan_and_those_of_one_base_differ_in_residuals_only(
    models: dict[str, ExportedModel], max_rank: int
) -> None:
    plan = stock_plan(models, max_rank)
    placed = [name for base in plan.bases for name in base.adapters] + list(plan.ordinary)
    assert sorted(placed) == sorted(models)
    common = {
        name: (
            {n: t.digest for n, t in m.tensors.items() if n not in factors_among(m.tensors)},
            m.files["config.json"],
        )
        for name, m in models.items()
    }
    for base in plan.bases:
        assert len(base.adapters) > 1 and base.rank <= max_rank
        assert len({json.dumps(common[name]) for name in base.adapters}) == 1
    firsts = [json.dumps(common[next(iter(base.adapters))]) for base in plan.bases]
    assert len(set(firsts)) == len(firsts)
    for name, why in plan.ordinary.items():  # nothing that fits a base was left out
        assert why.reason.startswith("has residuals of a larger") or json.dumps(common[name]) not in firsts
    shuffled = dict(sorted(models.items(), reverse=True))
    assert stock_plan(shuffled, max_rank) == plan
    assert Manifest.parse(Manifest(pool="p", point="d", models=models, stock=plan).canonical()).stock == plan
