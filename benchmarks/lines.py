"""Ways of sharing that are the pipeline itself, from pool file to proof, each in an artifact root of its own."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.outcomes import Loss, Outcome
from sandhi_core.artifacts import Artifacts
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.pools.pool import Pool
from sandhi_core.records import HoldoutScore, OperatingPoints, SharingProof

Sections = Mapping[str, Mapping[str, Any]]

WALK: Sections = {
    "profile": {"noise": True},
    "grouping": {"candidates": "wide"},
    "search": {"strategy": "walk", "accept": "original", "stride": "gallop"},
    "merging": {"rescale": "none", "residuals": "none"},
    "deploy": {"engine": "vllm"},
}
REPLICA: Sections = {
    **WALK,
    "grouping": {"candidates": "reference"},
    "search": {"strategy": "walk", "accept": "reference", "stride": 1},
    "merging": {"rescale": "common", "residuals": "none"},
}
LADDER: Sections = {
    "profile": {"noise": False},
    "grouping": {"candidates": "wide"},
    "search": {"strategy": "ladder"},
    "merging": {"rescale": "none", "residuals": "low_rank"},
    "deploy": {"engine": "transformers", "plugin": False},
}
BESIDES = {"candidates": "wide", "besides": ["norms", "embeddings"]}
EVERY_METHOD = ["mean", "base", "member", "regmean"]
ADAPTERS = {"engine": "vllm", "adapters": {"max_rank": 64}}


@dataclass(frozen=True)
class Way:
    """A way of the pipeline: what its pool file says, and which qualities its holdout is asked for, one after the
    other in one artifact root. `bases`: whether it is offered the models' bases."""

    sections: Sections
    qualities: tuple[str, ...] = ("point",)
    bases: bool = False


BOTH = ("point", "certified")
WAYS: Mapping[str, Way] = {
    "SANDHI replica": Way(REPLICA),
    "walk": Way(WALK, BOTH),
    "ladder without residuals": Way({**LADDER, "merging": {"rescale": "none", "residuals": "none"}}),
    "ladder": Way(LADDER, BOTH),
    "ladder, RegMean too": Way({**LADDER, "merging": {**LADDER["merging"], "methods": ["mean", "regmean"]}}, BOTH),
    "ladder, every rung": Way(
        {**LADDER, "grouping": BESIDES, "merging": {**LADDER["merging"], "methods": EVERY_METHOD}}, BOTH, bases=True
    ),
    "ladder of adapters": Way({**LADDER, "grouping": BESIDES, "deploy": ADAPTERS}),
}


def varied(pool: Pool, sections: Sections, file: Path) -> Path:
    """The pool with other settings, in a file of its own."""
    whole = pool.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        # What the pool's own file says of a search is left aside: each way has its own.
        whole[name] = fields if name == "search" else {**whole.get(name, {}), **fields}
    file.write_text(yaml.safe_dump(whole))
    return file


def offered(way: Way, bases: Sequence[Path]) -> Sections:
    """What a way's pool file says where the models have these bases."""
    merging = dict(way.sections.get("merging", {}))
    if way.bases and bases:
        merging["bases"] = [str(base) for base in bases]
    elif way.bases:
        merging["methods"] = [method for method in merging["methods"] if method != "base"]
    return {**way.sections, "merging": merging}


def rows(name: str, way: Way, pool: Pool, bases: Sequence[Path], folder: Path) -> Iterator[Outcome]:
    """A way's rows, one a quality; those after the first are built on from it, and say what both took together."""
    spent, evaluations = 0.0, 0
    for quality in way.qualities:
        sections = {**offered(way, bases), "holdout": {"quality": quality}}
        outcome = built(f"{name}, {quality}" if len(way.qualities) > 1 else name, pool, sections, folder)
        spent, evaluations = spent + outcome.seconds, evaluations + outcome.evaluations
        yield replace(outcome, seconds=spent, evaluations=evaluations)


def built(name: str, pool: Pool, sections: Sections, folder: Path, *options: str) -> Outcome:
    """Build the varied pool below `folder`. Seconds are those of the whole command, proof included.

    Raises RuntimeError where the build fails or its proof does not pass.
    """
    file, root = varied(pool, sections, folder / "pool.yaml"), folder / "root"
    begun = time.perf_counter()
    command = [sys.executable, "-m", "sandhi_core", "build", str(file), "--root", str(root), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: sandhi build failed")
    spent = time.perf_counter() - begun
    artifacts, answer = Artifacts(root), json.loads(done.stdout)
    points = artifacts.load(OperatingPoints, "operating_points", pool.name)
    if not artifacts.load(SharingProof, "sharing_proof", pool.name).passed:
        raise RuntimeError(f"{name}: the proof did not pass")
    walked = {m.name: artifacts.load(HoldoutScore, "holdout", f"{pool.name}.{m.name}") for m in pool.models}
    losses = {
        model: max(
            (Loss(-task.difference, -task.bound, task.budget) for task in score.tasks.values()),
            key=lambda loss: loss.drop - loss.budget,
        )
        for model, score in deployed_holdouts(points, walked).items()
    }
    saved = points.deployed.savings
    outcome = Outcome(name, saved.net, saved.checkpoint_bytes, losses, sum(answer["evaluations"].values()), spent)
    if (stock := answer["pools"][pool.name]["stock"]) is not None:
        outcome.notes.append(stock["told"])
    return outcome
