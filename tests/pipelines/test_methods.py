"""Shared tensors by several methods, from pool file to export, on fine-tunes of known kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import load_catalogue
from sandhi_core.checkpoints.architectures import ORDER
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.layout import read_manifest
from sandhi_core.records import Group
from tests.models import edit_tensors, fine_tune, tiny_llama
from tests.pipelines.conftest import PoolWriter, built, sandhi
from tests.pipelines.test_families import materialise
from tests.pipelines.test_residuals import LADDER, METHODS, groups_of
from tests.synthetic import profile

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("only_the_line")]


def adapted(directory: Path, seed: int, rank: int = 2) -> Path:
    """Merge an adapter into every matrix of a layer, as fine-tuning by LoRA does: in float32 it is exact enough."""
    drawn = torch.Generator().manual_seed(seed)

    def add(found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            if "layers" in name and tensor.ndim == 2:
                up, down = (torch.randn(n, rank, generator=drawn) for n in tensor.shape)
                found[name] = tensor + 0.05 * up @ down.T

    edit_tensors(directory, add)
    return directory


NAMES = ("a", "b", "c")


def formed(pool: Path, root: Path) -> list[Group]:
    """The groups of a pool, its stages run up to them; profiles are made up: they order steps and nothing else."""
    catalogue = load_catalogue([pool])
    bench = Bench(catalogue, Artifacts(root), lambda model, seconds: None)
    for model in catalogue.keys("model"):
        materialise(bench, "checkpoint", model)
        bench.artifacts.save(("profile", model), "", {}, profile(model, 2))
    for key in catalogue.keys("group"):
        materialise(bench, "groups", key)
    return groups_of(root)


def merging(*methods: str, **others: Any) -> dict[str, Any]:
    return {**LADDER, "merging": {"residuals": "low_rank", "methods": list(methods), **others}}


@pytest.fixture
def tuned(tiny_pool: PoolWriter, tmp_path: Path) -> Callable[..., Path]:
    """A pool of fine-tunes by adapters of rank 2, and their base beside it."""
    for seed, name in enumerate((*NAMES, "d")):
        adapted(tiny_llama(tmp_path / name, seed=1, dtype=torch.float32), seed=50 + seed)
    tiny_llama(tmp_path / "base", seed=1, dtype=torch.float32)
    tiny_llama(tmp_path / "stranger", seed=2, dtype=torch.float32)
    return tiny_pool


def test_fine_tunes_by_adapters_share_their_base_whatever_else_is_offered(
    tuned: Callable[..., Path], tmp_path: Path
) -> None:
    """Their difference from it has rank 2 and the residual is as good as exact; from their mean it has rank 6."""
    found = formed(tuned(NAMES, **merging(*METHODS, bases=["stranger", "base"])), tmp_path / "root")
    assert len(found) == 14
    for group in found:
        assert group.recipe.method == "base" and group.recipe.payers == NAMES
        assert [c.model for c in group.recipe.contributors] == ["merging.bases[1]"]
        assert group.compared["base"] < min(cost for method, cost in group.compared.items() if method != "base")


def test_a_newcomer_changes_nobody_elses_recipes_and_a_changed_base_everybodys(
    tuned: Callable[..., Path], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    built(tuned(NAMES, **merging("mean", "base", bases=["base"])), root)
    before = {g.recipe.digest: g.compared for g in groups_of(root)}
    joined = built(tuned((*NAMES, "d"), **merging("mean", "base", bases=["base"])), root)
    assert {key for stage, key in joined["ran"] if stage == "trajectory"} == {"tiny.d"}
    assert {g.recipe.digest: g.compared for g in groups_of(root)} == before
    assert all(len(g.members) == 4 and g.recipe.payers == NAMES for g in groups_of(root))
    fine_tune(tmp_path / "base", seed=3, moved=0.001)
    again = built(tuned((*NAMES, "d"), **merging("mean", "base", bases=["base"])), root)
    assert {key for stage, key in again["ran"] if stage == "trajectory"} == {f"tiny.{m}" for m in (*NAMES, "d")}
    assert not {"checkpoint", "profile"} & {stage for stage, _ in again["ran"]}
    assert not before.keys() & {g.recipe.digest for g in groups_of(root)}
    assert built(tuned((*NAMES, "d"), **merging("mean", "base", bases=["base"])), root)["ran"] == []


def test_methods_go_with_scaled_rows_and_with_what_lies_beside_projections(
    tuned: Callable[..., Path], tmp_path: Path
) -> None:
    for seed, name in enumerate(NAMES):
        fine_tune(tmp_path / name, seed=70 + seed, moved=0.001)  # its embeddings too
    sections = merging("member", "base", "regmean", bases=["base"], affine="rows", reform=True)
    pool = tuned(NAMES, **sections, grouping={"besides": ["norms", "embeddings"]})
    root = tmp_path / "root"
    document = built(pool, root)
    beside = [g for g in groups_of(root) if g.recipe.projection not in ORDER]
    assert {g.recipe.projection for g in beside} >= {"embed_tokens.weight"}
    assert all((g.recipe.method, g.compared) == ("mean", {}) and g.recipe.payers == () for g in beside)
    assert all(len(g.compared) == 3 for g in groups_of(root) if g not in beside)
    result = document["pools"]["tiny"]
    assert all(model["within_budget"] for model in result["models"].values())
    assert 0 < result["bytes"]["claimed"] == result["bytes"]["verified_disk"]
    status, out, err = sandhi("verify", result["export"], "--json")
    assert status == 0 and json.loads(out)["problems"] == [], err
    for folder in ("store", "spectra", "inputs"):
        shutil.rmtree(root / folder)
    manifest = read_manifest(Path(result["export"]))
    shutil.rmtree(root / "exports")
    again = built(pool, root)
    assert {stage for stage, _ in again["ran"]} == {"merged_weights", "sharing_proof", "deployment"}
    assert read_manifest(Path(again["pools"]["tiny"]["export"])) == manifest


@pytest.mark.parametrize(
    "changed",
    [
        {"search": {"strategy": "ladder", "errors": "outputs"}},
        {"deploy": {"adapters": {"max_rank": 1}}},
        {"deploy": {"engine": "transformers"}},
    ],
)
def test_what_decides_bids_is_compared_by_anew(
    changed: dict[str, Any], tuned: Callable[..., Path], tmp_path: Path
) -> None:
    """Though nobody came or left: groups are carried over only as long as they would be chosen by the same."""
    sections = merging("mean", "member") | {"deploy": {"adapters": {"max_rank": 8}}}
    pool = lambda: tuned(NAMES, **(sections | changed))  # noqa: E731
    formed(tuned(NAMES, **sections), tmp_path / "root")
    before = [g.compared for g in groups_of(tmp_path / "root")]
    after = [g.compared for g in formed(pool(), tmp_path / "root")]
    assert before != after == [g.compared for g in formed(pool(), tmp_path / "fresh")]


@pytest.mark.parametrize("errors", ["answers", "outputs"])
def test_a_walk_takes_gradients_only_where_errors_are_of_answers(
    errors: str, tuned: Callable[..., Path], tmp_path: Path
) -> None:
    formed(tuned(NAMES, merging={"methods": ["mean", "member"]}, search={"errors": errors}), tmp_path / "root")
    taken = len(list((tmp_path / "root").glob("inputs/*/importance.safetensors")))
    assert taken == (len(NAMES) if errors == "answers" else 0)


def test_a_members_own_tensor_costs_that_model_nothing(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    for seed, name in enumerate(NAMES):
        fine_tune(tiny_llama(tmp_path / name, seed=1), seed=50 + seed, moved=0.01 * (seed + 1))
    pool = tiny_pool(NAMES, merging={"methods": ["member"]})
    document = built(pool, tmp_path / "root")
    found = groups_of(tmp_path / "root")
    # Nearest to the others is who moved least.
    assert {tuple(c.model for c in g.recipe.contributors) for g in found} == {("a",)}
    models = document["pools"]["tiny"]["models"]
    assert models["a"]["original"] == models["a"]["merged"]
    manifest = read_manifest(Path(document["pools"]["tiny"]["export"]))
    own = Checkpoint.open(tmp_path / "a", "a")
    shared = {n: t for n, t in manifest.models["a"].tensors.items() if t.sharing != "private"}
    assert {t.sharing for n, t in shared.items()} == {"duplicate"} and any("proj" in n for n in shared)
    assert not any("lora" in name for name in manifest.models["a"].tensors)
    for name in (n for n in shared if "proj" in n):
        (digest,) = {m.tensors[name].digest for m in manifest.models.values() if m.tensors[name].sharing != "private"}
        stored = (tmp_path / "root" / "store" / digest / f"{name}.safetensors").read_bytes()
        assert stored.endswith(bytes(own.raw(name)))
    counted = document["pools"]["tiny"]["bytes"]
    assert counted["claimed"] == counted["verified_disk"] > 0


def test_one_model_that_went_its_own_way_is_left_out_of_the_average(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    names = (*NAMES, "odd")
    for seed, name in enumerate(names):
        fine_tune(tiny_llama(tmp_path / name, seed=1), seed=50 + seed, moved=0.15 if name == "odd" else 0.005)
    found = formed(tiny_pool(names, **merging("mean", reform=True)), tmp_path / "root")
    assert {tuple(c.model for c in g.recipe.contributors) for g in found} == {NAMES}
    assert all(len(g.members) == 4 and set(g.compared) == {"mean"} for g in found)


def test_a_base_that_is_a_model_of_the_pool_too_is_held_by_it_as_its_own(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    for seed, name in enumerate(NAMES):
        fine_tune(tiny_llama(tmp_path / name, seed=1), seed=50 + seed, moved=0.01 * seed)
    (pool,) = built(tiny_pool(NAMES, merging={"methods": ["base"], "bases": ["a"]}), tmp_path / "root")[
        "pools"
    ].values()
    assert pool["models"]["a"]["original"] == pool["models"]["a"]["merged"]
    tensors = {m: model.tensors for m, model in read_manifest(Path(pool["export"])).models.items()}
    held = {n: t for n, t in tensors["a"].items() if t.sharing != "private" and "proj" in n}
    assert held and {t.sharing for t in held.values()} == {"duplicate"}
    for name, tensor in held.items():
        assert {t[name].digest for t in tensors.values() if t[name].sharing == "merged"} == {tensor.digest}
    assert pool["bytes"]["claimed"] == pool["bytes"]["verified_disk"] > 0


def test_bases_that_do_not_fit_are_told_before_anything_runs(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    tiny_llama(tmp_path / "wide", hidden_size=64)
    pool = tiny_pool(["a", "b"], merging={"methods": ["mean", "base"], "bases": ["wide", "missing/base/x"]})
    status, out, _ = sandhi("check", pool, "--root", tmp_path / "root", "--json")
    problems = {p["model"]: p for p in json.loads(out)["problems"] if p["severity"] == "error"}
    assert status == 1 and set(problems) == {"merging.bases[0]", "merging.bases[1]"}
    assert problems["merging.bases[0]"]["code"] == "base-fits-nothing"
    assert problems["merging.bases[1]"]["code"] == "directory-missing"
    assert all("tiny.yaml" in p["file"] or "missing" in p["file"] for p in problems.values())
