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

LADDER: Sections = {
    "profile": {"noise": False},
    "search": {"strategy": "ladder", "accept": "original"},
    "merging": {"rescale": "none", "residuals": "low_rank"},
    "grouping": {"candidates": "wide"},
    "deploy": {"engine": "transformers"},
}
WALK: Sections = {"grouping": {"candidates": "wide"}, "search": {"accept": "original", "stride": "gallop"}}
REPLICA: Sections = {
    "grouping": {"candidates": "reference"},
    "search": {"accept": "reference", "stride": 1},
    "merging": {"rescale": "common"},
}
WAYS: Mapping[str, Sections] = {
    "SANDHI replica": REPLICA,
    "walk, point": WALK,
    "walk, certified": {**WALK, "holdout": {"quality": "certified"}},
    "ladder without residuals, point": {**LADDER, "merging": {"rescale": "none"}},
    "ladder, point": LADDER,
    "ladder, certified": {**LADDER, "holdout": {"quality": "certified"}},
}


def varied(pool: Pool, sections: Sections, file: Path) -> Path:
    """The pool with other settings, in a file of its own."""
    whole = pool.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        whole[name] = {**whole.get(name, {}), **fields}
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
