"""What runs when a pool is edited, through real Dagster runs on tiny random models, and what is left alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import torch
import yaml
from torch import Tensor

from pipelines.assembly import build_definitions
from pipelines.headless import BuildError, build
from pipelines.instance import dagster_home
from pipelines.jobs import runs
from pipelines.progress import Progress
from pipelines.settings import Settings
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.errors import StoreError
from sandhi_core.graph import STAGES
from sandhi_core.layout import read_manifest
from sandhi_core.records import SharingProof
from tests.evaluation.local_tasks import choice_task, generation_task
from tests.models import edit_tensors
from tests.pipelines.conftest import PoolWriter, built, sandhi

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("only_the_line")]

POOL_STAGES = {(s, "tiny") for s, stage in STAGES.items() if stage.scope == "pool"}
MEMBER = ("trajectory", "cutoffs", "holdout")


def ran(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(stage, key) for stage, key in document["ran"]}


def shifted(found: dict[str, Tensor]) -> None:
    for name in found:
        if name.endswith("q_proj.weight"):
            found[name] += 0.25


def spoiled(found: dict[str, Tensor]) -> None:
    for tensor in found.values():
        tensor.fill_(torch.nan)


def tensors(document: dict[str, Any], model: str) -> dict[str, str]:
    export = Path(document["pools"]["tiny"]["export"])
    return {name: t.digest for name, t in read_manifest(export).models[model].tensors.items()}


def test_a_life_of_a_pool(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    """One pool, edited again and again; each edit re-runs what it must and nothing else."""
    root = tmp_path / "root"
    first = built(tiny_pool(["a", "b", "wide"]), root)
    assert {s for s, _ in ran(first)} == set(STAGES)
    before = {m: tensors(first, m) for m in ("a", "b")}

    joined = built(tiny_pool(["a", "b", "c", "wide"]), root)
    looked_at = {("groups", "tiny.h32-bf16")} | {("plan", f"tiny.{m}") for m in "abc"}
    assert ran(joined) == {
        ("checkpoint", "c"),
        ("profile", "c"),
        *((s, "tiny.c") for s in MEMBER),
        *looked_at,
        *POOL_STAGES,
    }
    assert {m: n for m, n in joined["evaluations"].items() if m != "c"} == {"a": 0, "b": 0, "wide": 0}
    assert {m: tensors(joined, m) for m in ("a", "b")} == before

    cheaper = built(tiny_pool(["a", "b", "c", "wide"], deploy={"device_memory": "40GiB"}), root)
    assert ran(cheaper) == {("deployment", "tiny")}

    regrouped = built(tiny_pool(["a", "b", "c", "wide"], deploy={"device_memory": "40GiB"}), root, "--regroup")
    assert {k for s, k in ran(regrouped) if s == "trajectory"} == {"tiny.a", "tiny.b", "tiny.c"}
    assert not {s for s, _ in ran(regrouped)} & {"checkpoint", "profile"}

    # Formed anew without being asked to, groups that models joined would share other tensors.
    record = root / "records" / "groups" / "tiny.h32-bf16.json"
    whole = json.loads(record.read_bytes())
    record.write_text("{")
    pool = tiny_pool(["a", "b", "c", "wide"], deploy={"device_memory": "40GiB"})
    status, _, err = sandhi("build", pool, "--root", root)
    assert status == 1 and str(record) in err and "is damaged: it says who joined" in err and "--regroup" in err
    assert ran(built(pool, root, "--regroup")) == {("groups", "tiny.h32-bf16"), ("groups", "tiny.h64-bf16")}
    record.write_text(json.dumps(whole | {"version": 0, "record": {}}))  # of another version of Sandhi
    assert ran(built(pool, root)) == {("groups", "tiny.h32-bf16")}

    removed = built(tiny_pool(["a", "b", "wide"], deploy={"device_memory": "40GiB"}), root)
    assert not {s for s, _ in ran(removed)} & {"checkpoint", "profile"}
    assert {m: tensors(removed, m) for m in ("a", "b")} == before  # as before c came

    edit_tensors(tmp_path / "wide", shifted)
    changed = built(tiny_pool(["a", "b", "wide"], deploy={"device_memory": "40GiB"}), root)
    assert {k for s, k in ran(changed) if STAGES[s].scope != "pool"} == {"wide", "tiny.wide", "tiny.h64-bf16"}
    assert {("profile", "wide"), ("checkpoint", "wide")} <= ran(changed)


def test_a_task_file_edited(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    built(pool, root)
    with (tmp_path / "tasks" / "letters.yaml").open("a") as f:
        f.write("description: 'Which letters come next? '\n")
    again = built(pool, root)
    assert {("profile", "a"), ("profile", "b"), ("trajectory", "tiny.a")} <= ran(again)
    assert not {s for s, _ in ran(again)} & {"checkpoint"}


def test_dagster_home_lost_runs_nothing_and_artifacts_lost_run_everything(
    tiny_pool: PoolWriter, tmp_path: Path
) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    first = built(pool, root)
    shutil.rmtree(root / "dagster")
    assert built(pool, root)["ran"] == []
    shutil.rmtree(root / "records")
    again = built(pool, root)
    assert ran(again) == ran(first)
    assert set(again["evaluations"].values()) == {0}  # scores are kept apart
    assert again["pools"]["tiny"]["export"] == first["pools"]["tiny"]["export"]


def test_an_export_that_is_gone_is_made_again(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    first = built(pool, root)
    shutil.rmtree(first["pools"]["tiny"]["export"])
    again = built(pool, root)
    assert ("merged_weights", "tiny") in ran(again)
    assert Path(again["pools"]["tiny"]["deployment"]).is_file()


def test_dry_run_names_what_a_build_then_runs(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    status, out, err = sandhi("build", pool, "--root", root, "--json", "--dry-run")
    assert status == 0, err
    planned = json.loads(out)
    assert not (root / "records").exists()
    document = built(pool, root)
    assert {tuple(n) for n in planned["stale"] + planned["waiting"]} == ran(document)
    assert sum(document["evaluations"].values()) <= planned["plan"]["evaluations"]


def test_deployment_is_refused_where_the_proof_fails(
    tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    document = built(tiny_pool(["a", "b"]), root)
    export = Path(document["pools"]["tiny"]["export"])
    (root / "records" / "sharing_proof" / "tiny.json").unlink()
    (root / "records" / "deployment" / "tiny.json").unlink()
    shard = export / "a" / "private.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    status, _, err = sandhi("build", tiny_pool(["a", "b"]), "--root", root)
    assert status == 1
    assert "private.safetensors" in err and "Traceback" not in err
    assert not (export / "deployment.json").exists()

    # And on its own, outside the run whose check blocks it.
    settings = Settings(tiny_pool(["a", "b"]), root)
    catalogue = load_catalogue(settings.pool_files())
    dagster_home(root)
    with dg.DagsterInstance.get() as instance:
        result = (
            build_definitions(catalogue, settings)
            .resolve_job_def("build_deployment")
            .execute_in_process(
                instance=instance,
                partition_key="tiny",
                asset_selection=[dg.AssetKey("deployment")],
                raise_on_error=False,
            )
        )
    assert not result.success
    assert not (export / "deployment.json").exists()


def test_a_proof_that_is_stopped_takes_no_deployment_away(
    tiny_pool: PoolWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, root = tiny_pool(["a", "b"]), tmp_path / "root"
    deployment = Path(built(pool, root)["pools"]["tiny"]["deployment"])
    before = deployment.read_bytes()
    (root / "records" / "sharing_proof" / "tiny.json").unlink()

    def refuse(*_: object) -> SharingProof:
        raise StoreError("the storage went away", remedy="mount it")

    with monkeypatch.context() as patched:
        patched.setattr("assets.sharing_proof.prove", refuse)
        status, _, err = sandhi("build", pool, "--root", root)
    assert status == 1 and "the storage went away" in err and f"stays deployed as {deployment}" in err
    assert deployment.read_bytes() == before
    assert Path(built(pool, root)["pools"]["tiny"]["deployment"]) == deployment


def test_one_build_of_a_root_at_a_time(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    settings = Settings(tiny_pool(["a", "b"]), tmp_path / "root")
    with settings.artifacts().lock():
        status, _, err = sandhi("build", settings.pools, "--root", settings.root)
    assert status == 1
    assert err.startswith("error: store: ") and "another build or removal is using this artifact root" in err
    assert len(err.splitlines()) == 1  # nothing was read before it was refused


def test_sensor_asks_for_the_planners_frontier(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    settings = Settings(tiny_pool(["a", "b"]), tmp_path / "root")
    catalogue = load_catalogue(settings.pool_files())
    dagster_home(settings.root)
    definitions = build_definitions(catalogue, settings)
    sensor = definitions.resolve_sensor_def("rebuild_stale")
    with dg.DagsterInstance.get() as instance:
        requested = sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions)).run_requests
        assert requested is not None
        planned = runs(Planner(catalogue, settings.artifacts()).schedule().frontier)
        assert [(r.job_name, r.partition_key) for r in requested] == [(r.job, r.key) for r in planned]
        assert {r.job for r in planned} == {"build_checkpoint"}
        build(catalogue, settings, Progress({}))
        quiet = sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions))
        assert quiet.run_requests == [] and quiet.skip_message == "nothing is stale"
        first = {r.run_key for r in requested}
        edit_tensors(tmp_path / "a", shifted)
        changed = sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions)).run_requests
        assert changed is not None
        assert [r.partition_key for r in changed] == ["a"]
        assert not first & {r.run_key for r in changed}
        tiny_pool(["a", "b", "c"])
        told = sensor.evaluate_tick(dg.build_sensor_context(instance, definitions=definitions))
        assert told.skip_message is not None and "reload" in told.skip_message


def test_a_stage_that_fails_says_why_and_what_is_done_is_kept(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    """Weights that turn bad after preflight: no half-made record, and a build that goes on once they are mended."""
    settings = Settings(tiny_pool(["a", "b"]), tmp_path / "root")
    catalogue = load_catalogue(settings.pool_files())
    good = (tmp_path / "b" / "model.safetensors").read_bytes()
    edit_tensors(tmp_path / "b", spoiled)
    with pytest.raises(BuildError, match="checkpoint of b failed") as caught:
        build(catalogue, settings, Progress({}))
    assert "Traceback" not in str(caught.value)
    (tmp_path / "b" / "model.safetensors").write_bytes(good)
    document = built(settings.pools, settings.root)
    assert ("checkpoint", "b") in ran(document)


def test_definitions_load_and_validate(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    settings = Settings(tiny_pool(["a", "b", "wide"]), tmp_path / "root")
    definitions = build_definitions(load_catalogue(settings.pool_files()), settings)
    dg.Definitions.validate_loadable(definitions)
    keys = {spec.key.to_user_string() for spec in definitions.resolve_all_asset_specs()}
    assert keys == set(STAGES)


def test_a_model_with_several_tasks_of_several_kinds(tiny_pool: PoolWriter, tmp_path: Path) -> None:
    """Multiple choice and generated answers, each with its own budget: all have to hold."""
    choice_task(tmp_path / "tasks", "numbers")
    generation_task(tmp_path / "tasks")
    path = tiny_pool(["a", "b"])
    pool = yaml.safe_load(path.read_text())
    pool["models"][0]["tasks"] += [
        {"task": "numbers", "metric": "acc_norm", "budget": 0.15},
        {"task": "copy", "metric": "exact_match", "budget": 0.15},
    ]
    path.write_text(yaml.safe_dump(pool))
    document = built(path, tmp_path / "root")
    found = {t["task"]: t for t in document["pools"]["tiny"]["models"]["a"]["tasks"]}
    assert {name: t["metric"] for name, t in found.items()} == {
        "letters": "acc",
        "numbers": "acc_norm",
        "copy": "exact_match",
    }
    assert all(t["within_budget"] for t in found.values())
    assert all(t["merged"] >= t["original"] - t["budget"] - 1e-9 for t in found.values())
