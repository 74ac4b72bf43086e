"""How long the steps of a real build took, from its run records: what the simulation of larger pools goes by."""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dagster as dg

from sandhi_core.graph import STAGES


@dataclass(frozen=True)
class Steps:
    """By stage the seconds of its partitions, in the order of their keys; `models`: how many a partition of the stages
    that are one for a group or a pool had on average."""

    told: str
    seconds: dict[str, list[float]]
    models: dict[str, float]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def kept(cls, path: Path) -> "Steps":
        return cls(**json.loads(path.read_text()))


def measured(root: Path, told: str) -> Steps:
    """Of every partition of every stage the materialisation that evaluated most, and of several the newest: one that
    found its scores in the log was no work. Raises SystemExit where a stage never ran."""
    os.environ.setdefault("DAGSTER_HOME", str(root / "dagster"))
    with dg.DagsterInstance.get() as instance:
        best = {stage: _best(instance, stage) for stage in STAGES}
    missing = [stage for stage, found in best.items() if not found]
    if missing:
        raise SystemExit(f"{root} holds no run of {', '.join(missing)}: build a pool in it first")
    pools = Counter(key.partition(".")[0] for key in best["plan"])
    groups = [str(found["models"]).count(",") + 1 for found in best["groups"].values()]
    models = {
        stage: _mean(groups) if STAGES[stage].scope == "group" else _mean(list(pools.values()))
        for stage in STAGES
        if STAGES[stage].scope in ("group", "pool")
    }
    seconds = {stage: [round(found[key]["seconds"], 2) for key in sorted(found)] for stage, found in best.items()}
    return Steps(told, seconds, models)


def _best(instance: dg.DagsterInstance, stage: str) -> dict[str, dict[str, Any]]:
    """The metadata of that materialisation by partition."""
    found: dict[str, dict[str, Any]] = {}
    for record in instance.fetch_materializations(dg.AssetKey(stage), limit=10_000, ascending=True).records:
        materialised = record.asset_materialization
        if materialised is None or record.partition_key is None:
            continue
        metadata = {name: value.value for name, value in materialised.metadata.items()}
        earlier = found.get(record.partition_key)
        if earlier is None or metadata["evaluations"] >= earlier["evaluations"]:
            found[record.partition_key] = metadata
    return found


def _mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)
