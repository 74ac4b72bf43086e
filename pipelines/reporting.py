"""`sandhi report`: gathers a pool's records and has the report written from them."""

from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from pipelines.settings import Settings
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.errors import Problem, StoreError, UsageError
from sandhi_core.files import writing
from sandhi_core.graph import Node
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
from sandhi_core.report import ReportData, write_report

_NO_RECORDS = ("pool", "never", "stale", "waiting")
R = TypeVar("R", bound=Record)


def report(path: Path, root: Path) -> tuple[list[Path], list[Problem]]:
    """Write the report of a pool file, or of every pool file in a directory; what cannot be reported is a problem."""
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise UsageError("the directory holds no pool file (*.yaml)", file=str(path), remedy="name a pool file")
    pages, problems = [], []
    for file in files:
        try:
            pages.append(report_pool(file, root))
        except StoreError as error:
            problems.append(error.problem)
    return pages, problems


def report_pool(file: Path, root: Path) -> Path:
    """Write the report of the pool's newest records; stages that have not run are reported as not measured, and
    the page says at its head in what it is not of the pool file as it stands.

    Raises StoreError where none has: a root in which the pool was never built is most likely the wrong one.
    """
    catalogue = load_catalogue([file])
    (pool,) = catalogue.pools.values()
    artifacts = Settings(file, root).artifacts()
    models = catalogue.members(pool.name)
    groups = [k for k in catalogue.keys("group") if k.partition(".")[0] == pool.name]
    weights = _one(artifacts, MergedWeights, "merged_weights", pool.name)
    points = _one(artifacts, OperatingPoints, "operating_points", pool.name)
    members = {m: f"{pool.name}.{m}" for m in models}
    same = {m: m for m in models}
    data = ReportData(
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
        proof=_one(artifacts, SharingProof, "sharing_proof", pool.name),
        deployment=_one(artifacts, DeploymentSpec, "deployment", pool.name),
        **_outdated(Planner(catalogue, artifacts)),
    )
    if not any(getattr(data, part.name) for part in fields(data) if part.name not in _NO_RECORDS):
        raise StoreError(
            f"nothing of pool {pool.name} has been built in this artifact root",
            file=str(root),
            remedy=f"run `sandhi build {file}` first, or give the --root in which it was built",
        )
    directory = artifacts.directory("reports", pool.name)
    with writing(directory):
        return write_report(directory, data)


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
