"""One job a stage, except that proof and deployment share one: a blocking check stops only its own run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from assets.stages import STAGE_ASSETS
from sandhi_core.graph import STAGES, Node

JOB_OF: dict[str, str] = {stage: f"build_{stage}" for stage in STAGES} | {"sharing_proof": "build_deployment"}


StageJob = UnresolvedAssetJobDefinition


def jobs(scoring: Mapping[str, str] | None = None) -> list[StageJob]:
    """`scoring`: tags of the runs that evaluate models."""
    score = {JOB_OF[stage.name] for stage in STAGE_ASSETS if stage.scores}
    return [
        dg.define_asset_job(
            name,
            selection=dg.AssetSelection.assets(*[s for s in STAGES if JOB_OF[s] == name]),
            tags=scoring if name in score else None,
        )
        for name in sorted(set(JOB_OF.values()))
    ]


@dataclass(frozen=True)
class Run:
    """One run to start: the partition `key` of the stages `stages` of a job."""

    job: str
    key: str
    stages: tuple[str, ...]


def runs(frontier: Iterable[Node]) -> list[Run]:
    """The runs for a planner's frontier, in stage order. A stale proof takes the deployment along."""
    together = {"sharing_proof": ("sharing_proof", "deployment")}
    return [Run(JOB_OF[stage], key, together.get(stage, (stage,))) for stage, key in frontier]
