"""A small pool and its stages, run one by one without Dagster: one can be stopped and run again in a second.

It is a ladder with residuals, moments of inputs and adapters: of all settings the one that writes most kinds of files.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from assets.stage import Job
from assets.stages import STAGE_ASSETS
from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.disk import verify_disk
from sandhi_core.graph import Node, fingerprint
from sandhi_core.layout import read_manifest
from tests.evaluation.local_tasks import choice_task
from tests.models import tiny_llama

MODELS = "ab"
SLOW = ("sharing_proof", "deployment")
"""Stages that start processes; whole builds go through them."""

Tree = dict[str, tuple[int, str]]
"""Path below a folder to mode and sha256."""


def make_pool(folder: Path) -> Path:
    choice_task(folder / "tasks")
    for name in MODELS:
        tiny_llama(folder / name, seed=ord(name))
        (folder / name / "notes.txt").write_text(f"of {name}\n")
    pool = {
        "name": "tiny",
        "models": [
            {"name": m, "path": m, "tasks": [{"task": "letters", "metric": "acc", "budget": 0.9}]} for m in MODELS
        ],
        "evaluation": {"include_path": "tasks", "dtype": "float32", "device": "cpu", "threads": 1},
        "profile": {"noise": False},
        "grouping": {"besides": ["norms", "embeddings"]},
        "search": {"strategy": "ladder"},
        "merging": {"methods": ["mean", "regmean"], "residuals": "low_rank"},
        "deploy": {"adapters": {"max_rank": 64}},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(pool))
    return path


def nodes(pool: Path) -> list[Node]:
    """All but the SLOW stages', in an order in which they can run."""
    graph, done = load_catalogue([pool]).graph(), list[Node]()
    while left := [n for n in graph if n not in done and n[0] not in SLOW]:
        done.append(next(n for n in left if all(upper in done for upper in graph[n])))
    return done


def run(pool: Path, root: Path, node: Node, evaluated: Callable[[str, float], None]) -> None:
    """Make a node if it is stale, as a build does that begins here."""
    catalogue, artifacts = load_catalogue([pool]), Artifacts(root)
    artifacts.directory()
    artifacts.sweep()
    planner = Planner(catalogue, artifacts)
    if node not in planner.schedule().frontier:
        return
    own = planner.own(node)
    upstream = {u: artifacts.required(u).data_version for u in planner.graph[node]}
    stage = STAGE_ASSETS[node[0]]
    outcome = stage.run(Job(Bench(catalogue, artifacts, evaluated), node[1], False, lambda line: None))
    artifacts.save(node, fingerprint(node, own, upstream), own, outcome.record)


def tree(root: Path) -> Tree:
    """Every file, hidden ones too; not locks, nor what libraries keep for themselves."""
    found: Tree = {}
    for folder, subfolders, names in os.walk(root):
        within = Path(folder).relative_to(root)
        if within == Path():
            subfolders[:] = [name for name in subfolders if name not in ("datasets", "dagster", "scratch")]
        for name in names:
            path = Path(folder, name)
            if name not in ("lock", "use") and not name.endswith(".lock"):
                found[str(within / name)] = (path.stat().st_mode & 0o777, digest(path))
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def copied(source: Path, target: Path) -> None:
    """As it is, hard links too."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def lines(root: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in root.glob("scores/*.jsonl"))


def exports_problems(root: Path) -> list[str]:
    """What is wrong with the exports that have a final name."""
    problems = []
    for export in (path for path in root.glob("exports/*/*") if not path.name.startswith(".")):
        problems += [p.line() for p in verify_disk(export, read_manifest(export)).problems]
    return problems


def differences(wanted: Tree, found: Tree) -> list[str]:
    paths = sorted(wanted.keys() | found.keys())
    return [f"{p}: {wanted.get(p)} undisturbed, {found.get(p)} now" for p in paths if wanted.get(p) != found.get(p)]
