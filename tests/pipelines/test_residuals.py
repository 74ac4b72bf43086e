"""From a pool file with a ladder, residuals and every method to a proved export, through real Dagster jobs, on trained
models."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from sandhi_core.evaluation.splits import split_of
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import Group, Groups
from sandhi_core.serving.load import load
from tests.conftest import SPECIALISTS
from tests.pipelines.conftest import Line, built, line_alone, sandhi
from tests.pipelines.test_line import best_choice, data_file, tensor_bytes

pytestmark = pytest.mark.slow

LADDER: dict[str, Any] = {
    "profile": {"noise": False},
    "search": {"strategy": "ladder"},
    "merging": {"residuals": "low_rank"},
    "deploy": {"engine": "transformers"},
}
METHODS = ["mean", "base", "regmean", "member"]


@pytest.fixture(scope="module")
def ladder(trained: Path, trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The trained pool, with a base and every method, built by a ladder with residuals. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("ladder")
    merging = {"residuals": "low_rank", "methods": METHODS, "bases": [str(trained / "models" / "base")]}
    pool = folder / "pool.yaml"
    pool.write_text(yaml.safe_dump({**yaml.safe_load(trained_pool.read_text()), **LADDER, "merging": merging}))
    return Line(pool, folder / "root", built(pool, folder / "root"))


def records(line: Line, stage: str) -> dict[str, Any]:
    return {
        path.stem.rpartition(".")[2]: json.loads(path.read_text())["record"]
        for path in (line.root / "records" / stage).glob("*.json")
    }


def groups_of(root: Path) -> list[Group]:
    files = sorted((root / "records" / "groups").glob("*.json"))
    return [g for file in files for g in Groups.model_validate(json.loads(file.read_text())["record"]).groups]


def test_few_scores_are_asked_for_and_every_model_keeps_its_budget(ladder: Line) -> None:
    for result in ladder.result["models"].values():
        assert result["within_budget"] and result["original"] - result["merged"] <= result["budget"] + 1e-9
    for name, walk in records(ladder, "trajectory").items():
        assert walk["evaluations"] == len(walk["steps"]) <= 28, name
        prices = [step["price"] for step in walk["steps"]]
        assert prices == sorted(prices)
    assert all(profile["sensitivities"] == [] for profile in records(ladder, "profile").values())


def test_residuals_are_exported_counted_and_proved(ladder: Line) -> None:
    export = Path(ladder.result["export"])
    tensors = [t for m in read_manifest(export).models.values() for t in m.tensors.items()]
    factors = [t for name, t in tensors if ".lora_" in name]
    assert factors and all(t.sharing == "private" and t.dtype == "BF16" for t in factors)
    originals = sum(tensor_bytes(f) for m in load_pool(ladder.pool).models for f in Path(m.path).glob("*.safetensors"))
    distinct = {f.stat().st_ino: tensor_bytes(f) for f in (*export.glob("*/*.safetensors"), *export.glob("*/*.sandhi"))}
    counted = ladder.result["bytes"]
    assert counted["checkpoints"] == originals
    assert counted["claimed"] == counted["verified_disk"] == originals - sum(distinct.values())
    assert 0 < counted["verified_memory"] <= counted["claimed"]
    status, out, err = sandhi("verify", export, "--json")
    assert status == 0 and json.loads(out)["problems"] == [], err


@pytest.mark.parametrize("model", SPECIALISTS)
def test_our_loader_scores_the_export_as_reported_and_stock_transformers_refuses_residuals(
    ladder: Line, trained: Path, model: str
) -> None:
    """Accuracy on the holdout, computed here from logits, without lm-eval or any of our scoring."""
    directory = Path(ladder.result["export"]) / model
    net, tokenizer = load(directory, dtype=torch.float32), AutoTokenizer.from_pretrained(directory)
    pool = load_pool(ladder.pool)
    rows = [json.loads(t) for t in (trained / "tasks" / data_file(trained, model)).read_text().splitlines()]
    rows = [r for r in rows if split_of(r, pool.evaluation.seed, pool.evaluation.splits) == "holdout"]
    right = sum(best_choice(net, tokenizer, row) == row["gold"] for row in rows)
    assert right / len(rows) == pytest.approx(ladder.result["models"][model]["merged"], abs=1e-12)
    corrected = any(".lora_" in name for name in read_manifest(directory.parent).models[model].tensors)
    assert corrected, "this pool is to show residuals"
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_every_group_took_the_method_that_costs_least(ladder: Line) -> None:
    found = groups_of(ladder.root)
    assert found
    for group in found:
        assert list(group.compared) and set(group.compared) == set(METHODS)
        assert group.compared[group.recipe.method] == min(group.compared.values())
    assert len({group.recipe.method for group in found}) > 1


def test_spectra_of_methods_not_taken_are_kept_in_short(ladder: Line) -> None:
    found = groups_of(ladder.root)
    spectra = ladder.root / "spectra"
    members = sum(len(g.members) for g in found)
    assert 0 < len(list(spectra.glob("*.safetensors"))) <= members
    assert len(list(spectra.glob("*.squares"))) >= 2 * members


def test_lost_tensors_are_made_again_to_the_byte(ladder: Line, tmp_path: Path) -> None:
    """Those that are shared, and the residuals beside them."""
    root = Path(shutil.copytree(ladder.root, tmp_path / "root"))
    for folder in ("store", "spectra", "inputs", "exports"):
        shutil.rmtree(root / folder)
    with line_alone():
        again = built(ladder.pool, root)
    (result,) = again["pools"].values()
    assert {stage for stage, _ in again["ran"]} == {"merged_weights", "sharing_proof", "deployment"}
    assert read_manifest(Path(result["export"])) == read_manifest(Path(ladder.result["export"]))
    assert not any(again["evaluations"].values())


def test_deployment_names_the_loader(ladder: Line) -> None:
    spec = json.loads(Path(ladder.result["deployment"]).read_text())
    assert spec["engine"] == "transformers"
    for server in spec["servers"]:
        assert server["port"] is None and server["shell"].startswith("python3 -m sandhi_core.serving.look ")
