"""One job a stage, except that proof and deployment share one: a blocking check stops only its own run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.storage.tags import PARTITION_NAME_TAG

from assets.stages import STAGE_ASSETS
from sandhi_core.graph import STAGES, Catalogue, Node

JOB_OF: dict[str, str] = {stage: f"build_{stage}" for stage in STAGES} | {"sharing_proof": "build_deployment"}
POOL_TAG, MODEL_TAG = "sandhi/pool", "sandhi/model"

StageJob = UnresolvedAssetJobDefinition


def jobs(scoring: Mapping[str, str] | None = None) -> list[StageJob]:
    """`scoring`: tags of the runs that evaluate models."""
    score = {JOB_OF[name] for name, stage in STAGE_ASSETS.items() if stage.scores}
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

    def tags(self, catalogue: Catalogue) -> dict[str, str]:
        """By what people look for runs: the pool (of a model's own stages all that name it) and the model."""
        pools = ",".join(pool.name for pool in catalogue.pools_of((self.stages[0], self.key)))
        own = STAGES[self.stages[0]].scope in ("model", "member")
        return {POOL_TAG: pools, **({MODEL_TAG: self.key.rpartition(".")[2]} if own else {})}


def runs(frontier: Iterable[Node]) -> list[Run]:
    """The runs for a planner's frontier, in stage order. A stale proof takes the deployment along."""
    together = {"sharing_proof": ("sharing_proof", "deployment")}
    return [Run(JOB_OF[stage], key, together.get(stage, (stage,))) for stage, key in frontier]


def nodes_of(run: dg.DagsterRun) -> set[Node]:
    """What a run makes; nothing where its job is none of these."""
    chosen = run.asset_selection or [dg.AssetKey(stage) for stage in STAGES if JOB_OF[stage] == run.job_name]
    key = run.tags.get(PARTITION_NAME_TAG, "")
    return {(asset.to_user_string(), key) for asset in chosen} if run.job_name in JOB_OF.values() else set()
