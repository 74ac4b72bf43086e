"""trajectory[pool.model]: merge, check, roll back; every decision with its score."""

from assets.pictures import picture
from assets.stage import Job, Outcome, StageAsset
from sandhi_core.assignment import Assignment
from sandhi_core.evaluation.evaluator import merged_weights
from sandhi_core.records import Accepts, Evaluation, Plan
from sandhi_core.report.figures import trajectory_chart
from sandhi_core.search import search


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    plan = job.bench.artifacts.load(Plan, "plan", job.key)
    fingerprint = job.bench.fingerprint(entry.name)
    evaluator = job.bench.evaluator(pool, entry)

    abandoned = 0

    def score(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation | None:
        nonlocal abandoned
        weights = merged_weights(fingerprint, Assignment(tensors), job.bench.store)
        if accepts is None:
            return evaluator.evaluate("search", weights)
        found = evaluator.judged("search", weights, accepts)
        abandoned += found is None
        return found

    tolerance = pool.tolerance(entry)
    floor = evaluator.noise_floor("search", tolerance)
    record = search(
        plan,
        pool.search,
        tolerance,
        evaluator.evaluate("search", evaluator.original),
        job.bench.shared_tensors().digest,
        score,
    ).model_copy(update={"noise_floor": floor})
    accepted = sum(s.decision == "accepted" for s in record.steps)
    budgets = {t.task: t.budget for t in entry.tasks}
    return Outcome(
        record,
        {
            "trajectory": picture(trajectory_chart(record, budgets)),
            "steps": len(record.steps),
            "accepted": accepted,
            "evaluations of the walk": record.evaluations,
            "evaluations per accepted step": record.evaluations / max(accepted, 1),
            **({"abandoned early": abandoned} if pool.search.early_rejection else {}),
            **{f"noise floor {task}": value for task, value in floor.items()},
        },
    )


STAGE = StageAsset(
    name="trajectory",
    description="One model's walk along its plan: each step applied, scored on the search split, kept or not.",
    run=run,
    scores=True,
    kinds=frozenset({"pytorch"}),
)
