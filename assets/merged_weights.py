"""merged_weights[pool]: the deployed point as ordinary checkpoint directories that hold shared bytes once."""

from assets.stage import Job, Outcome, StageAsset
from sandhi_core.adapters import summary
from sandhi_core.assignment import assignment_at
from sandhi_core.export import export_pool
from sandhi_core.layout import read_manifest
from sandhi_core.records import OperatingPoints, Trajectory


def run(job: Job) -> Outcome:
    bench = job.bench
    points = bench.artifacts.load(OperatingPoints, "operating_points", job.key)
    trajectories = bench.of_pool(Trajectory, "trajectory", job.key)
    deployed = points.deployed
    assignments = {m: assignment_at(trajectories[m], steps) for m, steps in deployed.cutoffs.items()}
    for model, assignment in assignments.items():
        bench.restore(f"{job.key}.{model}", assignment)
    record = export_pool(
        bench.catalogue.pools[job.key],
        deployed.name,
        bench.checkpoints(job.key),
        bench.fingerprints(job.key),
        assignments,
        {m: holdout.weights for m, holdout in bench.deployed_holdouts(job.key).items()},
        bench.store,
        bench.artifacts.directory("exports"),
    )
    export = bench.artifacts.root / record.export
    stock = {f"stock {name}": value for name, value in summary(read_manifest(export).stock).items()}
    return Outcome(record, {"export": str(export), "manifest": record.manifest, **stock})


STAGE = StageAsset(
    name="merged_weights",
    description="Exported checkpoints of the deployed point; shared tensors are links to one file.",
    run=run,
    kinds=frozenset({"safetensors"}),
)
