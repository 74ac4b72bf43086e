"""From a pool file that shares norms and embeddings too to a proved export, through real Dagster jobs, on trained
models."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from sandhi_core.evaluation.splits import split_of
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import Manifest
from tests.conftest import SPECIALISTS
from tests.models import edit_tensors, fine_tune, tiny_llama
from tests.pipelines.conftest import Line, PoolWriter, built, sandhi
from tests.pipelines.test_line import best_choice, data_file, tensor_bytes
from tests.pipelines.test_residuals import LADDER, records

pytestmark = pytest.mark.slow

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def besides(trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The trained pool, its frozen embeddings moved a little apart, built by a ladder without residuals that shares all
    that it may. Tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("besides")
    pool = yaml.safe_load(trained_pool.read_text())
    for seed, model in enumerate(pool["models"]):
        copied = Path(shutil.copytree(model["path"], folder / model["name"]))
        model["path"] = str(copied)
        drawn = torch.Generator().manual_seed(seed)
        edit_tensors(copied, lambda t, drawn=drawn: t.update({EMBEDDING: apart(t[EMBEDDING], drawn)}))
    pool |= LADDER | {"merging": {"residuals": "none"}, "grouping": {"besides": ["norms", "embeddings"]}}
    file = folder / "pool.yaml"
    file.write_text(yaml.safe_dump(pool))
    return Line(file, folder / "root", built(file, folder / "root"))


def apart(table: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
    return (table + 0.03 * table.std() * torch.randn(table.shape, generator=drawn)).to(table.dtype)


def changed(line: Line, manifest: Manifest) -> dict[str, set[str]]:
    """By model the tensors that are not its own and no projections."""
    own = {m: {t["name"]: t["digest"] for t in f["tensors"]} for m, f in records(line, "checkpoint").items()}
    return {
        name: {n for n, t in model.tensors.items() if t.digest != own[name][n] and "_proj" not in n}
        for name, model in manifest.models.items()
    }


def test_embeddings_are_shared_within_budget_and_proved(besides: Line) -> None:
    for result in besides.result["models"].values():
        assert result["within_budget"] and result["original"] - result["merged"] <= result["budget"] + 1e-9
    export = Path(besides.result["export"])
    manifest = read_manifest(export)
    found = changed(besides, manifest)
    # Norms below a page would get no file of their own: sharing them spares nothing, and costs an error.
    assert found == {"roman": set()} | {m: {EMBEDDING} for m in SPECIALISTS}
    assert len({(export / m / manifest.models[m].tensors[EMBEDDING].file).stat().st_ino for m in SPECIALISTS}) == 1
    counted = besides.result["bytes"]
    originals = sum(tensor_bytes(f) for m in load_pool(besides.pool).models for f in Path(m.path).glob("*.safetensors"))
    distinct = {f.stat().st_ino: tensor_bytes(f) for f in export.glob("*/*.safetensors")}
    assert counted["checkpoints"] == originals
    assert counted["claimed"] == counted["verified_disk"] == originals - sum(distinct.values())
    assert 0 < counted["verified_memory"] <= counted["claimed"]
    assert counted["duplicates"] == 0
    status, out, err = sandhi("verify", export, "--json", "--engine", "transformers")
    assert status == 0 and json.loads(out)["problems"] == [], err


def test_adapters_make_norms_below_a_page_the_same_bytes_in_private_files(
    tiny_pool: PoolWriter, tmp_path: Path
) -> None:
    for seed, name in enumerate("ab"):
        fine_tune(tiny_llama(tmp_path / name, seed=1), seed=seed, moved=0.001)
    sections = LADDER | {"deploy": {"adapters": {"max_rank": 8}}, "grouping": {"besides": ["norms", "embeddings"]}}
    root = tmp_path / "root"
    (result,) = built(tiny_pool(["a", "b"], **sections), root)["pools"].values()
    manifest = read_manifest(Path(result["export"]))
    assert manifest.stock is not None and manifest.stock.base_of.keys() == {"a", "b"}
    norms = {n for n, t in manifest.models["a"].tensors.items() if n.endswith("norm.weight")}
    assert len(norms) == 5
    for name in norms:
        held = [model.tensors[name] for model in manifest.models.values()]
        assert {(t.sharing, t.file) for t in held} == {("private", "private.safetensors")}
        assert len({t.digest for t in held}) == 1
    assert 0 < result["bytes"]["claimed"] == result["bytes"]["verified_disk"]


@pytest.mark.parametrize("model", SPECIALISTS)
def test_stock_transformers_scores_the_export_as_reported(besides: Line, trained: Path, model: str) -> None:
    """Accuracy on the holdout, computed here from logits, without lm-eval or any of our scoring."""
    directory = Path(besides.result["export"]) / model
    net = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pool = load_pool(besides.pool)
    rows = [json.loads(t) for t in (trained / "tasks" / data_file(trained, model)).read_text().splitlines()]
    rows = [r for r in rows if split_of(r, pool.evaluation.seed, pool.evaluation.splits) == "holdout"]
    right = sum(best_choice(net, tokenizer, row) == row["gold"] for row in rows)
    assert right / len(rows) == pytest.approx(besides.result["models"][model]["merged"], abs=1e-12)


def test_what_is_lost_is_made_again_to_the_byte(besides: Line, tmp_path: Path) -> None:
    root = Path(shutil.copytree(besides.root, tmp_path / "root"))
    for name in ("store", "spectra", "inputs", "exports"):
        shutil.rmtree(root / name)
    again = built(besides.pool, root)
    (result,) = again["pools"].values()
    assert {stage for stage, _ in again["ran"]} == {"merged_weights", "sharing_proof", "deployment"}
    assert read_manifest(Path(result["export"])) == read_manifest(Path(besides.result["export"]))
    assert not any(again["evaluations"].values())


def test_the_report_and_a_dry_run_know_such_a_pool(besides: Line) -> None:
    status, out, err = sandhi("report", besides.pool, "--root", besides.root, "--json")
    assert status == 0, err
    (page,) = json.loads(out)["reports"]
    assert f"{besides.result['bytes']['claimed']:,}" in Path(page).read_text()
    status, out, err = sandhi("build", besides.pool, "--root", besides.root, "--dry-run", "--json")
    told = json.loads(out)
    assert status == 0 and (told["stale"], told["waiting"], told["plan"]["evaluations"]) == ([], [], 0), err
