"""deployment[pool]: the specification a server is started from. Refused unless the proof passed."""

from assets.stage import Job, Outcome, StageAsset
from sandhi_core.adapters import summary
from sandhi_core.deploy.spec import deployment_spec, write_deployment
from sandhi_core.layout import read_manifest
from sandhi_core.records import MergedWeights, OperatingPoints, SharingProof


def run(job: Job) -> Outcome:
    bench = job.bench
    load = bench.artifacts.load
    export = bench.artifacts.root / load(MergedWeights, "merged_weights", job.key).export
    record = deployment_spec(
        bench.catalogue.pools[job.key],
        read_manifest(export),
        export,
        {m: checkpoint.config for m, checkpoint in bench.checkpoints(job.key).items()},
        load(SharingProof, "sharing_proof", job.key),
        bench.deployed_holdouts(job.key),
        load(OperatingPoints, "operating_points", job.key),
        bench.fingerprints(job.key),
    )
    path = write_deployment(export, record)
    models = len(bench.catalogue.members(job.key))
    stock = {f"stock {name}": value for name, value in summary(record.stock).items()}
    return Outcome(record, {"specification": str(path), "models": models, **stock})


STAGE = StageAsset(
    name="deployment",
    description="Deployment specification with commands and memory figures; exists only where the proof passed.",
    run=run,
)
