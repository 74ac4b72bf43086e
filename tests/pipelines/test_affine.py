"""From a pool file with rows scaled and shifted to a proved export, through real Dagster jobs, on trained models."""

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
from sandhi_core.serving.load import load
from tests.conftest import SPECIALISTS
from tests.pipelines.conftest import Line, built, sandhi
from tests.pipelines.test_line import best_choice, data_file
from tests.pipelines.test_residuals import LADDER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def affine(trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The trained pool, built by a ladder with vectors but no residuals, under budgets large enough for these to take
    part. Tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("affine")
    pool = folder / "pool.yaml"
    written = {**yaml.safe_load(trained_pool.read_text()), **LADDER, "merging": {"affine": "rows"}}
    for model in written["models"]:
        model["tasks"][0]["budget"] = 0.4
    pool.write_text(yaml.safe_dump(written))
    return Line(pool, folder / "root", built(pool, folder / "root"))


def test_vectors_are_exported_counted_and_proved(affine: Line) -> None:
    export = Path(affine.result["export"])
    tensors = [t for m in read_manifest(export).models.values() for t in m.tensors.items()]
    vectors = [t for name, t in tensors if name.endswith((".row_scale", ".row_shift"))]
    assert vectors and all(t.sharing == "private" and t.dtype == "BF16" and len(t.shape) == 1 for t in vectors)
    assert not any(".lora_" in name for name, _ in tensors)
    status, out, err = sandhi("verify", export, "--json")
    assert status == 0, err
    table = json.loads(out)
    assert table["problems"] == [] and table["bytes"]["added"] == sum(t.nbytes for t in vectors)
    counted = affine.result["bytes"]
    assert 0 < counted["verified_memory"] <= counted["claimed"] == counted["verified_disk"]


@pytest.mark.parametrize("model", SPECIALISTS)
def test_our_loader_scores_the_export_as_reported(affine: Line, trained: Path, model: str) -> None:
    """Accuracy on the holdout, computed here from logits, without lm-eval or any of our scoring."""
    directory = Path(affine.result["export"]) / model
    net, tokenizer = load(directory, dtype=torch.float32), AutoTokenizer.from_pretrained(directory)
    pool = load_pool(affine.pool)
    rows = [json.loads(t) for t in (trained / "tasks" / data_file(trained, model)).read_text().splitlines()]
    rows = [r for r in rows if split_of(r, pool.evaluation.seed, pool.evaluation.splits) == "holdout"]
    right = sum(best_choice(net, tokenizer, row) == row["gold"] for row in rows)
    assert right / len(rows) == pytest.approx(affine.result["models"][model]["merged"], abs=1e-12)


def test_stock_loaders_refuse_models_with_vectors(affine: Line) -> None:
    export = Path(affine.result["export"])
    models = read_manifest(export).models.items()
    scaled = [name for name, model in models if any(tensor.endswith(".row_scale") for tensor in model.tensors)]
    assert scaled
    for name in scaled:
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(export / name)


def test_lost_vectors_are_made_again_to_the_byte(affine: Line, tmp_path: Path) -> None:
    root = Path(shutil.copytree(affine.root, tmp_path / "root"))
    manifest = read_manifest(Path(affine.result["export"]))
    lost = {t.digest for m in manifest.models.values() for name, t in m.tensors.items() if ".row_" in name}
    for digest in lost:
        shutil.rmtree(root / "store" / digest)
    for folder in ("spectra", "inputs", "exports"):
        shutil.rmtree(root / folder)
    again = built(affine.pool, root)
    (result,) = again["pools"].values()
    assert {stage for stage, _ in again["ran"]} == {"merged_weights", "sharing_proof", "deployment"}
    assert read_manifest(Path(result["export"])) == manifest
