"""holdout[pool.model]: the boldest cutoff that holds on questions that decided nothing before."""

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.assignment import Assignment
from sandhi_core.evaluation.evaluator import merged_weights
from sandhi_core.holdout import walk_holdout
from sandhi_core.records import CutoffSet, Evaluation, Trajectory
from sandhi_core.report import pictures
from sandhi_core.report.stages import looks_table


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    artifacts = job.bench.artifacts
    fingerprint = job.bench.fingerprint(entry.name)
    evaluator = job.bench.evaluator(pool, entry)

    def evaluate(assignment: Assignment) -> Evaluation:
        job.bench.restore(job.key, assignment)
        return evaluator.evaluate("holdout", merged_weights(fingerprint, assignment, job.bench.store))

    record = walk_holdout(
        pool.name,
        entry,
        artifacts.load(CutoffSet, "cutoffs", job.key),
        artifacts.load(Trajectory, "trajectory", job.key),
        evaluate,
        pool.holdout.quality,
    )
    tasks = record.tasks.items()
    metadata = {
        "change": picture(pictures.holdout({entry.name: record})),
        "every look": table(looks_table(record)),
        "steps": record.steps,
        "looks": len(record.walked),
        **{f"original {t}": r.original for t, r in tasks},
        **{f"merged {t}": r.merged for t, r in tasks},
        **{f"difference {t}": r.difference for t, r in tasks},
        **{f"share of budget used {t}": -r.difference / r.budget for t, r in tasks},
        **{f"certified {t}": r.certified for t, r in tasks},
        **{f"smallest certifiable budget {t}": r.certifiable for t, r in tasks},
    }
    return Outcome(record, metadata)
