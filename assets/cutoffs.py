"""cutoffs[pool.model]: every point of the trajectory at which the model is within its budgets."""

from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.cutoffs import cutoff_set
from sandhi_core.records import Plan, Trajectory
from sandhi_core.report.stages import cutoffs_table


def run(job: Job) -> Outcome:
    _, entry = job.bench.catalogue.entry(job.key)
    artifacts = job.bench.artifacts
    record = cutoff_set(
        artifacts.load(Trajectory, "trajectory", job.key),
        artifacts.load(Plan, "plan", job.key),
        {t.task: t.budget for t in entry.tasks},
    )
    within = [c for c in record.cutoffs if c.within_budget]
    return Outcome(
        record,
        {
            "every cutoff": table(cutoffs_table(record)),
            "cutoffs": len(record.cutoffs),
            "within budget": len(within),
            "deepest": record.deepest,
            "knee": record.knee,
            "bytes freed at most": max(c.freed for c in within),
        },
    )
