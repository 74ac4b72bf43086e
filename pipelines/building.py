"""`sandhi build`: preflight, the jobs, and what came out of them as one document."""

import sys
from pathlib import Path
from typing import Any

from pipelines.headless import build
from pipelines.progress import Progress
from pipelines.reporting import report_pool
from pipelines.scratch import SCRATCH
from pipelines.settings import Settings
from sandhi_core.adapters import summary as stock_summary
from sandhi_core.artifacts import Artifacts
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.deploy.spec import DeploymentSpec
from sandhi_core.errors import PreflightError, Problem
from sandhi_core.graph import Catalogue, Node
from sandhi_core.holdout import deployed_holdouts
from sandhi_core.pools.pool import ModelEntry
from sandhi_core.records import HoldoutScore, MergedWeights, OperatingPoints, SharingProof


def build_pool(file: Path, root: Path, *, regroup: bool = False) -> dict[str, Any]:
    """Run what is stale of a pool and report it.

    Raises StoreError at once where another build uses the root, PreflightError with all problems before anything is
    scored, BuildError where a stage failed.
    """
    settings = Settings.of_command(file, root)
    catalogue = load_catalogue([file], settings.placed)
    artifacts = settings.artifacts()
    problems: list[Problem] = []
    expected: dict[Node, int] = {}
    with artifacts.lock():  # before anything that takes long
        artifacts.sweep()
        artifacts.directory(SCRATCH)
        if regroup or Planner(catalogue, artifacts).schedule().frontier:
            from pipelines.checking import examine  # loads lm-eval, which a build with nothing to do need not wait for

            findings = examine(file, root, regroup=regroup)
            expected = findings.evaluations
            problems = [Problem.model_validate(p) for p in findings.document["problems"]]
            if not findings.document["ok"]:
                raise PreflightError(problems)
            for warning in problems:
                print(warning.line(), file=sys.stderr)
        built = build(catalogue, settings, Progress(expected), regroup=regroup)
    (name,) = catalogue.pools
    report = report_pool(file, root)
    return {
        "ok": True,
        "problems": [p.model_dump(mode="json") for p in problems],
        "ran": [list(node) for node in built.ran],
        "evaluations": {m: built.evaluations[m] for m in sorted(catalogue.members(name))},
        "pools": {name: summary(catalogue, artifacts, name, report)},
    }


def dry_run(file: Path, root: Path, *, regroup: bool = False, headers_only: bool = False) -> dict[str, Any]:
    """What a build would run (`stale`), what that may make stale (`waiting`), and the cost of both at most.
    `headers_only`: as checking.check."""
    from pipelines.checking import examine

    document, schedule, _ = examine(file, root, regroup=regroup, headers_only=headers_only)
    return {
        "ok": document["ok"],
        "problems": document["problems"],
        "stale": [list(node) for node in schedule.frontier],
        "waiting": [list(node) for node in schedule.waiting],
        "plan": document["plan"],
    }


def summary(catalogue: Catalogue, artifacts: Artifacts, name: str, report: Path) -> dict[str, Any]:
    """The deployed point of a built pool: every model's scores, the bytes, and where everything lies."""
    points = artifacts.load(OperatingPoints, "operating_points", name)
    proof = artifacts.load(SharingProof, "sharing_proof", name)
    spec = artifacts.load(DeploymentSpec, "deployment", name)
    export = artifacts.root / artifacts.load(MergedWeights, "merged_weights", name).export
    entries = catalogue.pools[name].models
    walked = {e.name: artifacts.load(HoldoutScore, "holdout", f"{name}.{e.name}") for e in entries}
    holdouts = deployed_holdouts(points, walked)
    return {
        "point": points.deployed.name,
        "models": {e.name: _model(e, holdouts[e.name]) for e in entries},
        "bytes": {
            "checkpoints": proof.checkpoint_bytes,
            "duplicates": proof.duplicates,
            "added": points.deployed.savings.overhead,
            "claimed": proof.claimed,
            "verified_disk": proof.verified_disk,
            "verified_memory": proof.verified_memory,
        },
        "rounding": list(spec.rounding),
        "stock": _stock(spec),
        "export": str(export),
        "report": str(report),
        "deployment": str(export / "deployment.json"),
    }


def _stock(spec: DeploymentSpec) -> dict[str, Any] | None:
    """How far models are adapters, and the weights that engines hold then; None where the pool asks for none."""
    if spec.stock_memory is None:
        return None
    held = {
        "weights_bytes_before": spec.memory.weights_bytes_before,
        "weights_bytes": spec.stock_memory.weights_bytes,
    }
    return stock_summary(spec.stock) | held


def _model(entry: ModelEntry, holdout: HoldoutScore) -> dict[str, Any]:
    """The task that has used most of its budget, and under `tasks` all of them."""
    tasks = [
        {"task": name, **result.model_dump(exclude={"difference", "bound", "questions"})}
        for name, result in holdout.tasks.items()
    ]
    used = {name: -result.difference / result.budget for name, result in holdout.tasks.items()}
    tightest = max(tasks, key=lambda t: used[t["task"]])
    return {**tightest, "tasks": tasks}
