"""merged_weights[pool]: the deployed point as ordinary checkpoint directories that hold shared bytes once."""

import dagster as dg

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.adapters import summary
from sandhi_core.assignment import assignment_at
from sandhi_core.export import export_pool
from sandhi_core.layout import read_manifest
from sandhi_core.records import OperatingPoints, Plan, Trajectory
from sandhi_core.report import page, pictures
from sandhi_core.report.data import shared_holdings, slot_states


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
    plans, alignment = bench.of_pool(Plan, "plan", job.key), bench.catalogue.pools[job.key].deploy.alignment_bytes
    fingerprints = bench.fingerprints(job.key)
    states = slot_states(fingerprints, plans, trajectories, deployed, alignment)
    held = shared_holdings(fingerprints, trajectories, deployed, alignment)
    shared = {(s.slot.tensor, s.digest) for slots in states.values() for s in slots if s.state == "shared"}
    stock = {f"stock {name}": value for name, value in summary(read_manifest(export).stock).items()}
    metadata = {
        **({"who shares what": picture(pictures.sharing(states))} if any(states.values()) else {}),
        "tensors of several models": table(page.shared_table(held, fingerprints.values())),
        "export": dg.MetadataValue.path(str(export)),
        "manifest": record.manifest,
        "merged matrices": len(shared),
        "bytes claimed": deployed.savings.net,
        **stock,
    }
    return Outcome(record, metadata)
