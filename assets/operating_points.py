"""operating_points[pool]: a cutoff for every model, what it saves, and the point that is deployed."""

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.operating_points import operating_points
from sandhi_core.records import CutoffSet, HoldoutScore, OperatingPoints, Trajectory
from sandhi_core.report import ReportData, page, pictures


def run(job: Job) -> Outcome:
    bench = job.bench
    pool = bench.catalogue.pools[job.key]
    earlier = None
    if (
        pool.grouping.on_new_model == "join"
        and not job.regroup
        and bench.artifacts.envelope(("operating_points", job.key))
    ):
        earlier = bench.artifacts.load(OperatingPoints, "operating_points", job.key)
    record = operating_points(
        pool,
        bench.of_pool(CutoffSet, "cutoffs", job.key),
        bench.of_pool(Trajectory, "trajectory", job.key),
        bench.fingerprints(job.key),
        bench.of_pool(HoldoutScore, "holdout", job.key),
        earlier=earlier,
    )
    deployed = record.deployed.savings
    return Outcome(
        record,
        {
            "pareto": picture(pictures.pareto(record)),
            "points": table(page.points_table(ReportData(pool, points=record))),
            "bytes of all checkpoints": deployed.checkpoint_bytes,
            "bytes of exact duplicates": deployed.duplicates,
            "bytes claimed": deployed.net,
            "share claimed": deployed.net / deployed.checkpoint_bytes,
        },
    )
