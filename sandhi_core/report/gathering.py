"""Gathers what the artifact root has of a pool for its report."""

from typing import TypeVar

from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.graph import Catalogue, Node
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.layout import read_manifest
from sandhi_core.records import (
    CutoffSet,
    Fingerprint,
    Groups,
    HoldoutScore,
    MergedWeights,
    OperatingPoints,
    Plan,
    Profile,
    Record,
    SharingProof,
    Trajectory,
)
from sandhi_core.report.data import ReportData

R = TypeVar("R", bound=Record)


def gather(catalogue: Catalogue, name: str, artifacts: Artifacts) -> ReportData:
    """The newest records of the pool `name`, and in what they are not of the pool file as it stands."""
    pool, models = catalogue.pools[name], catalogue.members(name)
    alone = Catalogue({name: pool}, {m: catalogue.group_of[m] for m in models})
    groups = [k for k in catalogue.keys("group") if k.partition(".")[0] == name]
    weights = _one(artifacts, MergedWeights, "merged_weights", name)
    points = _one(artifacts, OperatingPoints, "operating_points", name)
    members = {m: f"{name}.{m}" for m in models}
    same = {m: m for m in models}
    return ReportData(
        pool=pool,
        fingerprints=_found(artifacts, Fingerprint, "checkpoint", same),
        profiles=_found(artifacts, Profile, "profile", same),
        groups=_found(artifacts, Groups, "groups", {k: k for k in groups}),
        plans=_found(artifacts, Plan, "plan", members),
        trajectories=_found(artifacts, Trajectory, "trajectory", members),
        cutoffs=_found(artifacts, CutoffSet, "cutoffs", members),
        holdouts=_deployed(points, _found(artifacts, HoldoutScore, "holdout", members)),
        points=points,
        manifest=read_manifest(artifacts.root / weights.export) if weights else None,
        proof=_one(artifacts, SharingProof, "sharing_proof", name),
        deployment=_one(artifacts, DeploymentSpec, "deployment", name),
        **_outdated(Planner(alone, artifacts)),
    )


def _outdated(planner: Planner) -> dict[str, tuple[Node, ...]]:
    """The nodes that a build would run, or might, by why."""
    schedule = planner.schedule()
    never = tuple(n for n in planner.graph if n not in schedule.fresh and planner.artifacts.envelope(n) is None)
    return {
        "never": never,
        "stale": tuple(node for node in schedule.frontier if node not in never),
        "waiting": tuple(node for node in schedule.waiting if node not in never),
    }


def _deployed(points: OperatingPoints | None, holdouts: dict[str, HoldoutScore]) -> dict[str, HoldoutScore]:
    """The scores at the cutoffs that are deployed. A report may come before the points have followed a model's
    newest walk: that model is shown as it was walked."""
    if points is None:
        return holdouts
    followed = {m: h for m, h in holdouts.items() if points.deployed.cutoffs.get(m) in h.held}
    return holdouts | deployed_holdouts(points, followed)


def _one(artifacts: Artifacts, kind: type[R], stage: str, key: str) -> R | None:
    envelope = artifacts.envelope((stage, key))
    return None if envelope is None else kind.model_validate(envelope.record)


def _found(artifacts: Artifacts, kind: type[R], stage: str, keys: dict[str, str]) -> dict[str, R]:
    found = ((name, _one(artifacts, kind, stage, key)) for name, key in keys.items())
    return {name: record for name, record in found if record is not None}
