"""What runs when a ladder pool with residuals is killed, edited or robbed of its side files, on tiny random models."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sandhi_core.artifacts import Artifacts
from sandhi_core.checkpoints.side_files import keep, kept
from sandhi_core.layout import read_manifest
from sandhi_core.records import OperatingPoints
from tests.conftest import CHECKOUT
from tests.evaluation.local_tasks import choice_task
from tests.models import fine_tune, tiny_llama
from tests.pipelines.conftest import Line, PoolWriter, built, line_alone, sandhi
from tests.pipelines.test_rebuilds import MEMBER, POOL_STAGES, ran, tensors
from tests.pipelines.test_residuals import LADDER

pytestmark = pytest.mark.slow

GROUP = ("groups", "tiny.h32-bf16")
LOST = ("inputs", "spectra", "store")


@pytest.fixture(scope="module", autouse=True)
def only_the_line() -> Iterator[None]:
    """Other tests measure memory, in processes that take seconds to start, and look at reports."""
    with line_alone(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.building.report_pool", lambda file, root: root / "unwritten")
        yield


@pytest.fixture(scope="module")
def kin(tmp_path_factory: pytest.TempPathFactory) -> PoolWriter:
    """Writes pools of a, b and c, fine-tunes of one base."""
    folder = tmp_path_factory.mktemp("kin")
    choice_task(folder / "tasks", doc_to_choice=["a", "b", "c"])
    for seed, name in enumerate("abc"):
        fine_tune(tiny_llama(folder / name, seed=7, initializer_range=0.6), seed=seed, moved=0.3)

    def write(models: str, name: str = "tiny", budget_of_b: float = 0.2, **sections: Any) -> Path:
        task = {"task": "letters", "metric": "acc"}
        entries = [
            {"name": m, "path": m, "tasks": [task | {"budget": budget_of_b if m == "b" else 0.2}]} for m in models
        ]
        evaluation = {"include_path": "tasks", "dtype": "float32", "device": "cpu", "threads": 1}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"name": name, "models": entries, "evaluation": evaluation} | LADDER | sections))
        return path

    return write


@pytest.fixture(scope="module")
def pair(kin: PoolWriter, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The pool of a and b, built. Tests must leave it as it is."""
    root, pool = tmp_path_factory.mktemp("pair") / "root", kin("ab")
    return Line(pool, root, built(pool, root))


@pytest.fixture(scope="module")
def trio(kin: PoolWriter, pair: Line, tmp_path_factory: pytest.TempPathFactory) -> Line:
    """The same after c has joined. Tests must leave it as it is."""
    root, pool = copied(pair, tmp_path_factory.mktemp("trio")), kin("abc")
    return Line(pool, root, built(pool, root))


def copied(line: Line, folder: Path) -> Path:
    """A copy of a root, in which files that are links to one another still are."""
    subprocess.run(["cp", "-a", line.root, folder / "root"], check=True)
    return folder / "root"


def record(root: Path, stage: str, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "records" / stage / f"{key}.json").read_text())["record"]
    return found


def files(root: Path, pattern: str) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.glob(pattern))}


def test_the_pool_is_worth_these_tests(pair: Line) -> None:
    steps = [s for m in "ab" for s in record(pair.root, "trajectory", f"tiny.{m}")["steps"]]
    assert {s["decision"] for s in steps} == {"accepted", "rejected"}
    for model in read_manifest(Path(pair.result["export"])).models.values():
        assert any(".lora_" in name for name in model.tensors)


KILLED = """
import os, signal, sys
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.__main__ import main

add, rungs = ScoreLog.add, 0

def torn(log, evaluation):
    "As add, until a third rung of b's ladder was scored: of that only a part reaches the log."
    global rungs
    rungs += log._path.stem == "b" and evaluation.split == "search"
    if rungs == 5:  # after the noise floor and the baseline
        log._path.open("ab", 0).write(evaluation.canonical()[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    add(log, evaluation)

ScoreLog.add = torn
sys.exit(main())
"""


def test_killed_in_a_ladder_it_goes_on_to_the_same_bytes(kin: PoolWriter, pair: Line, tmp_path: Path) -> None:
    pool, root = kin("ab"), tmp_path / "root"
    command = [sys.executable, "-c", KILLED, "build", str(pool), "--root", str(root)]
    killed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = Counter({p.stem: p.read_bytes().count(b"\n") for p in root.glob("scores/*.jsonl")})  # whole lines
    assert not (root / "records/trajectory/tiny.b.json").exists()
    again = built(pool, root)
    done = {("trajectory", "tiny.a")} | {(s, m) for s in ("checkpoint", "profile") for m in "ab"}
    assert not ran(again) & (done | {GROUP})
    # What it was at when it was killed is scored again, and that alone.
    assert kept + Counter(again["evaluations"]) == Counter(pair.document["evaluations"])
    shutil.rmtree(root / "records" / "deployment")  # commands that name the root itself
    for pattern in ("records/*/*.json", "scores/*.jsonl", "exports/*/*/sandhi.json", "exports/*/*/*/*", "store/*/*"):
        expected = files(pair.root, pattern)
        assert files(root, pattern) == {f: b for f, b in expected.items() if "/deployment/" not in f} != {}


def test_a_joining_model_is_all_that_is_scored(pair: Line, trio: Line) -> None:
    plans = {("plan", f"tiny.{m}") for m in "abc"}
    new = {("checkpoint", "c"), ("profile", "c"), *((s, "tiny.c") for s in MEMBER)}
    assert ran(trio.document) == new | {GROUP} | plans | POOL_STAGES
    evaluations = trio.document["evaluations"]
    assert evaluations["a"] == evaluations["b"] == 0 < evaluations["c"]
    before, after = (
        Artifacts(line.root).load(OperatingPoints, "operating_points", "tiny").deployed for line in (pair, trio)
    )
    assert after.savings.net > before.savings.net
    for model in "ab":
        assert after.cutoffs[model] == before.cutoffs[model]
        assert tensors(trio.document, model) == tensors(pair.document, model)


def test_a_newcomer_that_leaves_leaves_everything_as_it_was(
    kin: PoolWriter, pair: Line, trio: Line, tmp_path: Path
) -> None:
    root = copied(trio, tmp_path)
    removed = built(kin("ab"), root)
    assert ran(removed) == {GROUP, ("plan", "tiny.a"), ("plan", "tiny.b")} | POOL_STAGES
    assert not any(removed["evaluations"].values())
    export, before = Path(removed["pools"]["tiny"]["export"]), Path(pair.result["export"])
    assert files(export, "**/*.*") == files(before, "**/*.*") | files(export, "deployment.json")


def test_a_founder_that_leaves_has_the_others_searched_anew(kin: PoolWriter, trio: Line, tmp_path: Path) -> None:
    removed = built(kin("bc"), root := copied(trio, tmp_path))
    members = {(s, f"tiny.{m}") for s in ("plan", *MEMBER) for m in "bc"}
    assert ran(removed) == {GROUP} | members | POOL_STAGES
    steps = [step for m in "bc" for step in record(root, "plan", f"tiny.{m}")["steps"]]
    sources = [merge["recipe"]["contributors"] for step in steps for merge in step["merges"]]
    assert sources and all([c["model"] for c in found] == ["b", "c"] for found in sources)


def test_another_budget_concerns_its_own_model(kin: PoolWriter, pair: Line, tmp_path: Path) -> None:
    changed = built(kin("ab", budget_of_b=0.1), root := copied(pair, tmp_path))
    own = {(s, "tiny.b") for s in MEMBER}
    assert own | {("operating_points", "tiny"), ("sharing_proof", "tiny")} <= ran(changed) <= own | POOL_STAGES
    assert changed["evaluations"]["a"] == 0
    found = changed["pools"]["tiny"]["models"]["b"]
    assert found["budget"] == 0.1 and found["original"] - found["merged"] <= 0.1 + 1e-9
    assert record(root, "trajectory", "tiny.b")["tolerance"] == {"letters": 0.1}


def test_certified_quality_walks_the_holdout_again_and_nothing_else(
    kin: PoolWriter, pair: Line, tmp_path: Path
) -> None:
    root = copied(pair, tmp_path)
    certified = built(kin("ab", holdout={"quality": "certified"}), root)
    walks = {("holdout", f"tiny.{m}") for m in "ab"}
    assert walks <= ran(certified) <= walks | POOL_STAGES
    assert not any(certified["evaluations"].values())  # a bound is met no later than the change itself
    held = {m: record(root, "holdout", f"tiny.{m}") for m in "ab"}
    assert any(walk["steps"] for walk in held.values())
    for walk in held.values():
        deployed = walk["tasks"]["letters"]
        assert walk["quality"] == "certified" and deployed["certified"]
        assert walk["steps"] == 0 or -deployed["bound"] <= deployed["budget"]


def test_a_model_of_two_pools_is_profiled_once(kin: PoolWriter, pair: Line, tmp_path: Path) -> None:
    root = copied(pair, tmp_path)
    collected = {p: p.stat().st_mtime_ns for p in root.glob("inputs/*/*")}
    other = built(kin("ac", name="other"), root)
    own = {n for n in ran(other) if n[1].startswith("other")}
    assert ran(other) == own | {("checkpoint", "c"), ("profile", "c")}
    assert {s for s, _ in own} == {GROUP[0], "plan", *MEMBER} | {s for s, _ in POOL_STAGES}
    lines = (root / "scores/a.jsonl").read_text().splitlines()
    keys = [(e["weights"], e["context"]) for e in map(json.loads, lines)]
    assert len(keys) == len(set(keys))
    assert {p: p.stat().st_mtime_ns for p in collected} == collected
    assert len(list(root.glob("inputs/*"))) == 3
    assert built(kin("ab"), root)["ran"] == []


def rob(root: Path, *also: str) -> Path:
    for name in (*LOST, *also):
        shutil.rmtree(root / name)
    return root


def test_what_is_lost_is_not_missed_until_needed_and_then_made_again(
    kin: PoolWriter, pair: Line, tmp_path: Path
) -> None:
    root, pool = rob(copied(pair, tmp_path)), kin("ab")
    assert built(pool, root)["ran"] == []
    shutil.rmtree(root / "exports")
    again = built(pool, root)
    assert ran(again) == {(s, "tiny") for s in ("merged_weights", "sharing_proof", "deployment")}
    assert not any(again["evaluations"].values())
    assert files(root, "exports/*/*/sandhi.json") == files(pair.root, "exports/*/*/sandhi.json")
    before = files(root, "records/*/*.json")
    again = built(pool, rob(root, "records/trajectory"))
    assert ran(again) == {("trajectory", f"tiny.{m}") for m in "ab"}
    assert not any(again["evaluations"].values())
    assert files(root, "records/*/*.json") == before


def test_a_residual_that_comes_out_otherwise_is_refused_and_the_remedy_helps(
    kin: PoolWriter, pair: Line, tmp_path: Path
) -> None:
    root, pool = rob(copied(pair, tmp_path), "exports"), kin("ab")
    shutil.copytree(pair.root / "inputs", root / "inputs")
    for file in root.glob("inputs/*/*.safetensors"):
        blocks = kept(file)
        assert blocks is not None
        # As another machine might have summed them.
        keep(file, {n: torch.eye(len(b)) if b.ndim == 2 else torch.ones_like(b) for n, b in blocks.items()})
    assert refused(pool, root, "residual") and built(pool, root)["ran"] == []


def refused(pool: Path, root: Path, what: str) -> list[str]:
    """What had to be removed, as errors say, until a build went through, every budget held."""
    removed: list[str] = []
    while (answer := sandhi("build", pool, "--root", root))[0]:
        assert f"the {what} that was scored is lost, and what is made in its place differs" in " ".join(
            answer[2].split()
        )
        named = re.search(r"remove (records/trajectory/\S+\.json)", answer[2])
        assert named is not None and named[1] not in removed, answer[2]
        (root / named[1]).unlink()
        removed.append(named[1])
    return removed


def test_a_shared_tensor_that_comes_out_otherwise_is_refused_and_the_remedy_helps(
    kin: PoolWriter, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    pool = kin("ab", merging={"residuals": "low_rank", "methods": ["regmean"]})
    built(pool, root)
    for name in ("spectra", "store", "exports"):
        shutil.rmtree(root / name)
    for file in root.glob("inputs/*/*_proj*.safetensors"):
        blocks = kept(file)
        assert blocks is not None
        keep(file, {name: torch.eye(len(b)) if b.ndim == 2 else b for name, b in blocks.items()})
    assert refused(pool, root, "shared tensor") and built(pool, root)["ran"] == []


def test_side_files_and_scores_lost_are_made_again_for_the_holdout(kin: PoolWriter, pair: Line, tmp_path: Path) -> None:
    root = rob(copied(pair, tmp_path), "scores", "records/holdout")
    assert ran(built(kin("ab"), root)) == {("holdout", f"tiny.{m}") for m in "ab"}
    assert files(root, "records/holdout/*.json") == files(pair.root, "records/holdout/*.json")
