"""The deployment of an export that was made by hand, with scores that nobody measured."""

from pathlib import Path

from sandhi_core.deploy.spec import deployment_spec, write_deployment
from sandhi_core.layout import read_manifest
from sandhi_core.records import HoldoutScore, HoldoutTask, Look, MemoryComparison, SharingProof
from sandhi_core.savings import savings
from tests.deploy import pools
from tests.exported import Case


def deployed(case: Case) -> Path:
    """Export a case and write the deployment beside it, as a build does after the proof; returns the export."""
    root, manifest = case.exported()
    counted = savings(case.assignments, case.fingerprints)
    proof = SharingProof(
        pool=case.pool.name,
        export=root.name,
        manifest=manifest.digest,
        passed=True,
        problems=(),
        tensors_checked=0,
        questions_checked={},
        questions_equal={},
        checkpoint_bytes=counted.checkpoint_bytes,
        duplicates=counted.duplicates,
        claimed=counted.net,
        verified_disk=counted.net,
        verified_memory=counted.net,
        memory=MemoryComparison(engine="none", originals=(), exports=(), shared=counted.net, saved=counted.net),
    )
    configs = {name: checkpoint.config for name, checkpoint in case.checkpoints.items()}
    holdouts = {name: _holdout(name) for name in case.checkpoints}
    points = pools.POINTS
    spec = deployment_spec(case.pool, manifest, root, configs, proof, holdouts, points, case.fingerprints)
    write_deployment(root, spec)
    assert read_manifest(root) == manifest
    return root


def _holdout(name: str) -> HoldoutScore:
    tasks: dict[str, HoldoutTask] = {}
    look = Look(steps=1, within_budget=True, weights=f"weights of {name}", tasks=tasks)
    return HoldoutScore(
        pool="small", model=name, steps=1, weights=look.weights, tasks=tasks, original=look, walked=(look,)
    )
