"""What it costs that one more model joins a pool: evaluations of it and of all others, seconds by whose stages.

    python -m benchmarks.joins .sandhi-demo/fixture --out benchmarks

The models are one trained model moved by noise, eight times. They are added to a pool file one after the other, and
after each the pool is built as `sandhi build` does it, in this process. Memory is not measured: that starts a process
for every model and every original, whoever joined.
"""

import argparse
import io
import json
import shutil
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import dagster as dg
import torch
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.rows import table
from benchmarks.ways import commit, say
from pipelines.headless import build
from pipelines.instance import opened_instance
from pipelines.progress import Progress
from pipelines.settings import Settings
from sandhi_core.catalogue import load_catalogue
from sandhi_core.graph import STAGES, Node
from sandhi_core.records import MemoryComparison, ProcessMemory

MODELS, MOVED, BUDGET = 8, 0.01, 0.06
ORIGIN, TASK = "sorter", "sandhi_sort"


@dataclass(frozen=True)
class Join:
    """What the n-th model's joining ran. Seconds are those of the stages: without Dagster around them."""

    models: int
    own_evaluations: int
    other_evaluations: int
    own_seconds: float  # of the new model's checkpoint, profile, trajectory, cutoffs and holdout
    plan_seconds: float  # of the group, and of every member's plan
    pool_seconds: float  # of points, export, proof and deployment, which hold all models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fixture", type=Path, help="folder of a demo pool: models/ and tasks/")
    parser.add_argument("--models", type=int, default=MODELS, help="how many join (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for joins.json and joins.txt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        joins = measured(arguments.fixture.resolve(), Path(folder), arguments.models)
    text = f"{shown(joins)}\n\ncommit {commit()}, torch {torch.__version__}, one thread of a CPU\n"
    print(text, end="")
    (arguments.out / "joins.txt").write_text(text)
    (arguments.out / "joins.json").write_text(json.dumps([asdict(join) for join in joins], indent=1) + "\n")


def measured(fixture: Path, folder: Path, models: int) -> list[Join]:
    """Every join of a pool that grows from one model to so many."""
    names = [f"m{n}" for n in range(1, models + 1)]
    for seed, name in enumerate(names):
        moved(fixture / "models" / ORIGIN, folder / name, seed)
    nothing = dict.fromkeys(("rss", "pss", "shared", "private", "private_dirty", "unmapped", "whole"), 0)
    process = ProcessMemory(model="nobody's", **nothing)
    enough = MemoryComparison(engine="not measured", originals=(), exports=(process,), shared=2**40, saved=2**40)
    with patch("assets.sharing_proof.compare", lambda *_, **__: enough):
        return [joined(folder, fixture / "tasks", names[:n]) for n in range(1, models + 1)]


def joined(folder: Path, tasks: Path, names: list[str]) -> Join:
    """The last of these models joins the others."""
    pool = written(folder / "pool.yaml", names, tasks)
    settings = Settings(pool, folder / "root")
    before = events(settings.root).keys()
    build(load_catalogue([pool]), settings, Progress({}, io.StringIO()))
    ran = [event for number, event in events(settings.root).items() if number not in before]
    join = summed(len(names), names[-1], ran)
    say(f"{len(names)} models: {join}")
    return join


def moved(origin: Path, target: Path, seed: int) -> None:
    """A copy of a checkpoint with normal noise on every matrix, a small part of its size."""
    shutil.copytree(origin, target)
    drawn = torch.Generator().manual_seed(seed)
    tensors = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            noise = torch.randn(tensor.shape, generator=drawn) * tensor.float().std() * MOVED
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def written(path: Path, models: list[str], tasks: Path) -> Path:
    entries = [{"name": m, "path": m, "tasks": [{"task": TASK, "metric": "acc", "budget": BUDGET}]} for m in models]
    evaluation = {"include_path": str(tasks), "dtype": "float32", "device": "cpu", "threads": 1}
    path.write_text(yaml.safe_dump({"name": "growing", "models": entries, "evaluation": evaluation}))
    return path


@dataclass(frozen=True)
class Event:
    node: Node
    evaluations: int
    seconds: float


def events(root: Path) -> dict[int, Event]:
    """Every materialisation by its number."""
    found = {}
    with opened_instance(root) as instance:
        for stage in STAGES:
            for record in instance.fetch_materializations(dg.AssetKey(stage), limit=10_000).records:
                event = record.asset_materialization
                if event is not None and event.partition is not None:
                    evaluations, seconds = (float(str(event.metadata[m].value)) for m in ("evaluations", "seconds"))
                    found[record.storage_id] = Event((stage, event.partition), int(evaluations), seconds)
    return found


def summed(models: int, joined: str, ran: list[Event]) -> Join:
    evaluations: Counter[bool] = Counter()
    seconds: dict[str, float] = dict.fromkeys(("own", "plan", "pool"), 0.0)
    for event in ran:
        stage, key = event.node
        own = key.rpartition(".")[2] == joined
        evaluations[own] += event.evaluations
        whose = "pool" if STAGES[stage].scope == "pool" else "plan" if stage in ("groups", "plan") else "own"
        seconds[whose] += event.seconds
    mine, plan, of_pool = (round(spent, 2) for spent in seconds.values())
    return Join(models, evaluations[True], evaluations[False], mine, plan, of_pool)


def shown(joins: list[Join]) -> str:
    head = ("models", "evaluations of the new one", "of the others", "its own stages", "group and plans", "the pool's")
    return table(
        head,
        [
            (
                str(join.models),
                str(join.own_evaluations),
                str(join.other_evaluations),
                f"{join.own_seconds:.1f} s",
                f"{join.plan_seconds:.1f} s",
                f"{join.pool_seconds:.1f} s",
            )
            for join in joins
        ],
    )


if __name__ == "__main__":
    main()
