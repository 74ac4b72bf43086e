"""From a pool file that asks for adapters to a proved export that stock PEFT opens, through real Dagster jobs, on
trained models."""

import json
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipelines.instance import opened_instance
from sandhi_core.assignment import factors_among
from sandhi_core.layout import read_manifest
from sandhi_core.serving.load import load
from tests.pipelines.conftest import Line, built, sandhi
from tests.pipelines.test_line import data_file

pytestmark = pytest.mark.slow

FROZEN = ("sorter", "converter")  # by the base's norms and embeddings, as where only the matrices are fine-tuned
MAX_RANK = 32
LADDER: dict[str, Any] = {
    "profile": {"noise": False},
    "search": {"strategy": "ladder"},
    "merging": {"residuals": "low_rank"},
    "deploy": {"adapters": {"max_rank": MAX_RANK}},
}


@pytest.fixture(scope="module")
def adapted(trained: Path, trained_pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The trained pool, two of its models with the base's norms and embeddings, built with adapters. Tests must leave
    it as it is."""
    folder = tmp_path_factory.mktemp("adapted")
    document = yaml.safe_load(trained_pool.read_text())
    base = load_file(trained / "models" / "base" / "model.safetensors")
    for model in document["models"]:
        if model["name"] in FROZEN:
            target = Path(shutil.copytree(model["path"], folder / model["name"]))
            own = load_file(target / "model.safetensors")
            frozen = {n: t if n.endswith("proj.weight") else base[n] for n, t in own.items()}
            save_file(frozen, target / "model.safetensors", metadata={"format": "pt"})
            model["path"] = str(target)
    pool = folder / "pool.yaml"
    pool.write_text(yaml.safe_dump({**document, **LADDER}))
    return Line(pool, folder / "root", built(pool, folder / "root"))


def test_the_plan_is_told_everywhere_as_far_as_it_is_complete(adapted: Line) -> None:
    export = Path(adapted.result["export"])
    plan = read_manifest(export).stock
    assert plan is not None
    (base,) = plan.bases
    assert tuple(base.adapters) == tuple(sorted(FROZEN)) and 0 < base.rank <= MAX_RANK
    assert plan.ordinary["inflector"].first == "model.layers.0.input_layernorm.weight"
    assert plan.ordinary["roman"].reason.endswith("of these names and shapes")
    told = adapted.result["stock"]
    assert (told["complete"], told["models"], told["told"]) == (2, 4, "2 of 4 models are adapters of one base")
    assert json.loads(Path(adapted.result["deployment"]).read_text())["stock"] == plan.model_dump(mode="json")
    page = Path(adapted.result["report"]).read_text()
    assert "Stock adapters" in page and "2 of 4" in page and base.directory in page
    status, out, _ = sandhi("build", adapted.pool, "--root", adapted.root)
    assert status == 0 and "Stock adapters: 2 of 4 models are adapters of one base." in out
    assert "inflector is none: it holds other tensors than" in out


def test_the_assets_metadata_says_it_too(adapted: Line) -> None:
    with opened_instance(adapted.root) as instance:
        for stage in ("merged_weights", "deployment"):
            event = instance.get_latest_materialization_event(dg.AssetKey(stage))
            assert event is not None and event.asset_materialization is not None
            metadata = event.asset_materialization.metadata
            assert metadata["stock complete"].value == 2
            assert metadata["stock told"].value == "2 of 4 models are adapters of one base"


def test_every_rung_is_of_residuals_within_the_limit(adapted: Line) -> None:
    for path in (adapted.root / "records" / "trajectory").glob("*.json"):
        steps = json.loads(path.read_text())["record"]["steps"]
        assert len({json.dumps(sorted(step["tensors"])) for step in steps}) <= 1  # every slot that can be shared
        ranks = [added["rank"] for step in steps for added in step["adjustments"].values()]
        assert all(rank <= MAX_RANK for rank in ranks)
        assert ranks or path.stem.endswith("roman")


def test_the_proof_and_verify_pass_and_every_byte_is_saved(adapted: Line) -> None:
    counted = adapted.result["bytes"]
    assert counted["claimed"] == counted["verified_disk"] > 0
    assert 0 < counted["verified_memory"] <= counted["claimed"]
    status, out, err = sandhi("verify", adapted.result["export"], "--json")
    assert status == 0 and json.loads(out)["problems"] == [], err


def test_one_server_serves_the_adapters_and_others_the_rest(adapted: Line) -> None:
    spec = json.loads(Path(adapted.result["deployment"]).read_text())
    (server,) = spec["bases"]
    command = server["shell"].split()
    assert "--model" in command and "--enable-lora" in command and server["port"] == 8000
    for model in server["models"]:
        assert f"{model['model']}={adapted.result['export']}/{model['adapter']}" in command
    engines = {server["model"]: server["engine"] for server in spec["servers"]}
    assert engines == {"inflector": "vllm", "roman": "vllm"}  # with the plugin, which serves residuals too


# Of PEFT's own, about a name that transformers will drop.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", FROZEN)
def test_stock_peft_answers_the_tasks_prompts_as_our_loader(adapted: Line, trained: Path, name: str) -> None:
    export = Path(adapted.result["export"])
    manifest = read_manifest(export)
    assert manifest.stock is not None and factors_among(manifest.models[name].tensors)
    base = manifest.stock.base_of[name]
    ours = load(export / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(export / base.directory)
    stock = AutoModelForCausalLM.from_pretrained(export / base.directory, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(stock, export / f"{name}.adapter").eval()
    rows = [json.loads(line) for line in (trained / "tasks" / data_file(trained, name)).read_text().splitlines()][:24]
    with torch.no_grad():
        for row in rows:
            ids = tokenizer(row["query"], return_tensors="pt")["input_ids"]
            for _ in range(6):  # greedily
                one, other = ours(input_ids=ids).logits, theirs(input_ids=ids).logits
                assert torch.allclose(one, other, rtol=0, atol=1e-4)
                assert torch.equal(one[0, -1].argmax(), other[0, -1].argmax())
                ids = torch.cat([ids, one[:, -1:].argmax(-1)], dim=1)
