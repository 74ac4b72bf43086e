"""Ways of sharing that are the pipeline itself, from pool file to proof, each in an artifact root of its own."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.outcomes import Loss, Outcome
from sandhi_core.artifacts import Artifacts
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.pool import Pool
from sandhi_core.records import HoldoutScore, OperatingPoints, SharingProof

Sections = Mapping[str, Mapping[str, Any]]

POINT, CERTIFIED = {"quality": "point"}, {"quality": "certified"}
WALK: Sections = {
    "profile": {"noise": True},
    "grouping": {"candidates": "wide"},
    "search": {"strategy": "walk", "accept": "original", "stride": "gallop"},
    "merging": {"rescale": "none", "residuals": "none"},
    "holdout": POINT,
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
    "holdout": POINT,
    "deploy": {"engine": "transformers"},
}
WAYS: Mapping[str, Sections] = {
    "SANDHI replica": REPLICA,
    "walk, point": WALK,
    "walk, certified": {**WALK, "holdout": CERTIFIED},
    "ladder without residuals, point": {**LADDER, "merging": {"rescale": "none", "residuals": "none"}},
    "ladder, point": LADDER,
    "ladder, certified": {**LADDER, "holdout": CERTIFIED},
}


def varied(pool: Pool, sections: Sections, file: Path) -> Path:
    """The pool with other settings, in a file of its own."""
    whole = pool.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        # What the pool's own file says of a search is left aside: each way has its own.
        whole[name] = fields if name == "search" else {**whole.get(name, {}), **fields}
    file.write_text(yaml.safe_dump(whole))
    return file


def built(name: str, pool: Pool, sections: Sections, folder: Path) -> Outcome:
    """Build the varied pool below `folder`, an empty one. Seconds are those of the whole command, proof included.

    Raises RuntimeError where the build fails or its proof does not pass.
    """
    file, root = varied(pool, sections, folder / "pool.yaml"), folder / "root"
    begun = time.perf_counter()
    command = [sys.executable, "-m", "sandhi_core", "build", str(file), "--root", str(root), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: sandhi build failed")
    spent = time.perf_counter() - begun
    artifacts = Artifacts(root)
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
    evaluations = sum(json.loads(done.stdout)["evaluations"].values())
    saved = points.deployed.savings
    return Outcome(name, saved.net, saved.checkpoint_bytes, losses, evaluations, spent)
