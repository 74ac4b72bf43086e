"""plan[pool.model]: one model's own steps, and nothing that changes when another model merely joins."""

from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.grouping.groups import make_plan
from sandhi_core.records import Groups, Profile
from sandhi_core.report.stages import plan_table


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    artifacts = job.bench.artifacts
    group = f"{pool.name}.{job.bench.catalogue.group_of[entry.name]}"
    record = make_plan(
        artifacts.load(Groups, "groups", group),
        job.bench.fingerprint(entry.name),
        artifacts.load(Profile, "profile", entry.name),
        pool.name,
    )
    return Outcome(
        record,
        {
            "steps in order": table(plan_table(record)),
            "steps": len(record.steps),
            "bytes planned": sum(m.nbytes for s in record.steps for m in s.merges),
        },
    )
