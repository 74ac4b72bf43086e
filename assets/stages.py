"""All stages, in the order in which they run."""

from assets import (
    checkpoint,
    cutoffs,
    deployment,
    groups,
    holdout,
    merged_weights,
    operating_points,
    plan,
    profile,
    sharing_proof,
    trajectory,
)
from assets.stage import StageAsset

STAGE_ASSETS: tuple[StageAsset, ...] = (
    checkpoint.STAGE,
    profile.STAGE,
    groups.STAGE,
    plan.STAGE,
    trajectory.STAGE,
    cutoffs.STAGE,
    holdout.STAGE,
    operating_points.STAGE,
    merged_weights.STAGE,
    sharing_proof.STAGE,
    deployment.STAGE,
)
