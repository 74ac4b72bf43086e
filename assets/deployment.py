"""deployment[pool]: the specification a server is started from. Refused unless the proof passed."""

from typing import Any

import dagster as dg

from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.adapters import summary
from sandhi_core.deploy.spec import deployment_spec, write_deployment
from sandhi_core.layout import read_manifest
from sandhi_core.records import MergedWeights, OperatingPoints, SharingProof
from sandhi_core.report import write_report
from sandhi_core.report.gathering import gather
from sandhi_core.report.stages import servers_table


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
    memory, held = record.memory, record.stock_memory
    return Outcome(
        record,
        {
            "servers": table(servers_table(record)),
            "specification": dg.MetadataValue.path(str(path)),
            "export": dg.MetadataValue.path(str(export)),
            "models": models,
            "bytes of weights before (estimated)": memory.weights_bytes_before,
            "bytes of weights after (estimated)": memory.weights_bytes_after if held is None else held.weights_bytes,
            "more tokens of cache (estimated)": memory.more_kv_tokens,
            **stock,
        },
    )


def after(job: Job) -> dict[str, Any]:
    """Write the report, in which the deployment is: no run that makes one leaves the report behind."""
    bench = job.bench
    data = gather(bench.catalogue, job.key, bench.artifacts)
    return {"report": dg.MetadataValue.path(str(write_report(bench.artifacts.directory("reports", job.key), data)))}
