"""From a pool file to a deployment, through real Dagster jobs, on trained models; the bytes looked at independently."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import dagster as dg
import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from assets import trajectory
from assets.stage import Job
from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import load_catalogue
from sandhi_core.evaluation.splits import split_of
from sandhi_core.graph import STAGES
from sandhi_core.layout import read_manifest
from sandhi_core.pools.pool import load_pool
from sandhi_core.records import HoldoutScore, OperatingPoints, Trajectory
from tests.conftest import CHECKOUT, OUTSIDER, SPECIALISTS
from tests.pipelines.conftest import Line, built, sandhi

pytestmark = pytest.mark.slow

MODELS = {**SPECIALISTS, **OUTSIDER}


def test_everything_ran_once(line: Line) -> None:
    ran = [tuple(node) for node in line.document["ran"]]
    assert len(ran) == len(set(ran))
    assert {stage for stage, _ in ran} == set(STAGES)
    assert set(line.document["evaluations"]) == set(MODELS)


def test_every_model_is_within_its_budget(line: Line) -> None:
    for result in line.result["models"].values():
        assert result["within_budget"]
        assert result["original"] - result["merged"] <= result["budget"] + 1e-9
        assert result["low"] <= result["merged"] - result["original"] <= result["high"]


def test_something_is_merged_and_the_columns_agree(line: Line) -> None:
    counted = line.result["bytes"]
    assert counted["claimed"] > counted["duplicates"] > 0
    assert counted["verified_disk"] == counted["claimed"]
    assert counted["verified_memory"] > 0


def test_the_files_hold_the_claimed_bytes_once(line: Line) -> None:
    """Tensor bytes by inode, read with safetensors alone, against the checkpoints'."""
    export = Path(line.result["export"])
    originals = distinct = 0
    for model in load_pool(line.pool).models:
        originals += sum(tensor_bytes(f) for f in Path(model.path).glob("*.safetensors"))
    seen: set[int] = set()
    for file in sorted(export.glob("*/*.safetensors")):
        if file.stat().st_ino not in seen:
            seen.add(file.stat().st_ino)
            distinct += tensor_bytes(file)
    assert originals == line.result["bytes"]["checkpoints"]
    assert originals - distinct == line.result["bytes"]["claimed"]


def tensor_bytes(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118 - no dict


def test_exported_tensors_are_the_originals_or_shared(line: Line) -> None:
    export = Path(line.result["export"])
    owners: dict[str, set[str]] = defaultdict(set)
    for model in load_pool(line.pool).models:
        before = AutoModelForCausalLM.from_pretrained(model.path, dtype="auto").state_dict()
        after = AutoModelForCausalLM.from_pretrained(export / model.name, dtype="auto").state_dict()
        assert before.keys() == after.keys()
        described = read_manifest(export).models[model.name].tensors
        for name, tensor in described.items():
            owners[tensor.digest].add(model.name)
            same = torch.equal(before[name], after[name])
            assert same or (line.root / "store" / tensor.digest).is_dir()  # nothing but what a recipe gave
            assert not (same and tensor.sharing == "merged")
            assert same or tensor.sharing != "duplicate"
    merged = [t for m in read_manifest(export).models.values() for t in m.tensors.values() if t.sharing == "merged"]
    assert merged
    assert all(len(owners[t.digest]) > 1 for t in merged)


@pytest.mark.parametrize("model", SPECIALISTS)
def test_stock_transformers_scores_the_export_as_reported(line: Line, trained: Path, model: str) -> None:
    """Accuracy on the holdout, computed here from logits, without lm-eval or any of our scoring."""
    directory = Path(line.result["export"]) / model
    net = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    pool = load_pool(line.pool)
    rows = [json.loads(t) for t in (trained / "tasks" / data_file(trained, model)).read_text().splitlines()]
    rows = [r for r in rows if split_of(r, pool.evaluation.seed, pool.evaluation.splits) == "holdout"]
    right = sum(best_choice(net, tokenizer, row) == row["gold"] for row in rows)
    assert right / len(rows) == pytest.approx(line.result["models"][model]["merged"], abs=1e-12)


def data_file(trained: Path, model: str) -> str:
    import yaml

    task = yaml.safe_load((trained / "tasks" / f"{MODELS[model]}.yaml").read_text())
    return str(task["dataset_kwargs"]["data_files"]["test"])


@torch.inference_mode()
def best_choice(net: torch.nn.Module, tokenizer: object, row: dict[str, object]) -> int:
    scores = []
    for choice in row["choices"]:  # type: ignore[attr-defined]
        context = tokenizer(row["query"]).input_ids  # type: ignore[operator]
        whole = tokenizer(f"{row['query']} {choice}").input_ids  # type: ignore[operator]
        logits = net(torch.tensor([whole])).logits[0].log_softmax(-1)
        targets = whole[len(context) :]
        scores.append(sum(float(logits[len(context) - 1 + i, t]) for i, t in enumerate(targets)))
    return scores.index(max(scores))


def test_nothing_runs_again(line: Line) -> None:
    again = built(line.pool, line.root)
    assert again["ran"] == []
    assert set(again["evaluations"].values()) == {0}
    assert again["pools"] == line.document["pools"]


def test_dagster_knows_every_materialisation_and_check(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(line.root / "dagster"))
    with dg.DagsterInstance.get() as instance:
        for stage, key in line.document["ran"]:
            record = instance.get_latest_data_version_record(dg.AssetKey(stage), partition_key=key)
            assert record is not None
            envelope = json.loads((line.root / "records" / stage / f"{key}.json").read_text())
            materialised = record.asset_materialization
            assert materialised is not None and materialised.tags is not None
            assert materialised.tags["dagster/data_version"] == envelope["data_version"]


def test_report_and_deployment_are_there(line: Line) -> None:
    page = Path(line.result["report"])
    assert "<html" in page.read_text()
    assert {p.name for p in page.parent.glob("*.png")} >= {"pareto.png"}
    spec = json.loads(Path(line.result["deployment"]).read_text())
    assert {server["model"] for server in spec["servers"]} == set(MODELS)
    assert spec["claims"]["verified_disk"] == line.result["bytes"]["verified_disk"]


def test_verify_accepts_the_export(line: Line) -> None:
    status, out, err = sandhi("verify", line.result["export"], "--json")
    assert status == 0, err
    assert json.loads(out)["problems"] == []


def test_early_rejection_decides_alike(line: Line, tmp_path: Path) -> None:
    root = Path(shutil.copytree(line.root, tmp_path / "root"))
    shutil.rmtree(root / "scores")
    pool = tmp_path / "pool.yaml"
    pool.write_text(yaml.safe_dump({**yaml.safe_load(line.pool.read_text()), "search": {"early_rejection": True}}))
    catalogue, artifacts = load_catalogue([pool]), Artifacts(root)
    abandoned = 0
    for key in catalogue.keys("member"):
        before = artifacts.load(Trajectory, "trajectory", key)
        outcome = trajectory.run(Job(Bench(catalogue, artifacts, lambda model, seconds: None), key, False, print))
        found = outcome.record
        assert isinstance(found, Trajectory)
        spared = [s.index for s in found.steps if s.decision == "rejected" and s.scores is None]
        steps = tuple(s.model_copy(update={"scores": None}) if s.index in spared else s for s in before.steps)
        assert found == before.model_copy(update={"steps": steps})
        abandoned += outcome.metadata["abandoned early"]
    assert abandoned > 0


def test_killed_in_the_middle_and_run_again_gives_the_same_bytes(line: Line, tmp_path: Path) -> None:
    root = tmp_path / "root"
    command = [sys.executable, "-m", "sandhi_core", "build", str(line.pool), "--root", str(root), "--json"]
    evaluations = 0
    for stop_at in (7, 29, 45):  # within a profile, a later profile, a trajectory
        process = subprocess.Popen(
            command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while process.poll() is None and scores(root) < stop_at:
            time.sleep(0.05)
        assert process.poll() is None, "the build ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        evaluations = scores(root)
    document = built(line.pool, root)
    # Whatever was scored before the kills is not scored again, except what was being scored.
    assert sum(document["evaluations"].values()) <= sum(line.document["evaluations"].values()) - evaluations + 3
    assert scores(root) == scores(line.root)
    assert files(root / "exports") == files(line.root / "exports")
    for stage in STAGES.keys() - {"sharing_proof", "deployment"}:  # these hold measurements
        assert records(root, stage) == records(line.root, stage)


def scores(root: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in root.glob("scores/*.jsonl"))


def files(folder: Path) -> dict[str, bytes]:
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != "deployment.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def records(root: Path, stage: str) -> dict[str, object]:
    return {p.name: json.loads(p.read_text())["record"] for p in sorted((root / "records" / stage).glob("*.json"))}


def test_a_build_reports_exports_and_deploys_the_same_cutoffs(line: Line) -> None:
    artifacts = Artifacts(line.root)
    (name,) = line.document["pools"]
    deployed = artifacts.load(OperatingPoints, "operating_points", name).deployed
    manifest = read_manifest(Path(line.result["export"]))
    for model, result in line.result["models"].items():
        score = artifacts.load(HoldoutScore, "holdout", f"{name}.{model}").going(deployed.cutoffs[model])
        assert manifest.models[model].weights == score.weights
        assert {t["task"]: t["merged"] for t in result["tasks"]} == {t: r.merged for t, r in score.tasks.items()}
