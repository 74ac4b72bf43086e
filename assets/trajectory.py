"""trajectory[pool.model]: what one model may share, tried and decided on the search split; every decision with its
score."""

from functools import partial

from assets.pictures import picture
from assets.stage import Job, Outcome
from assets.tables import table
from sandhi_core.assignment import Assignment
from sandhi_core.evaluation.evaluator import Evaluator, merged_weights
from sandhi_core.records import Accepts, Evaluation, Plan, Trajectory
from sandhi_core.report import pictures
from sandhi_core.report.stages import steps_table
from sandhi_core.rungs.allotment import PRICES, distinct
from sandhi_core.rungs.ladder import ladder
from sandhi_core.search import search


def run(job: Job) -> Outcome:
    pool, entry = job.bench.catalogue.entry(job.key)
    evaluator = job.bench.evaluator(pool, entry)
    floor = evaluator.noise_floor("search", pool.tolerance(entry))
    found, metadata = (_walk if pool.search.strategy == "walk" else _ladder)(job, evaluator)
    record = found.model_copy(update={"noise_floor": floor})
    accepted = sum(s.decision == "accepted" for s in record.steps)
    budgets = {t.task: t.budget for t in entry.tasks}
    return Outcome(
        record,
        {
            "trajectory": picture(pictures.trajectory(record, budgets)),
            "every step": table(steps_table(record)),
            "steps": len(record.steps),
            "accepted": accepted,
            "evaluations of the search": record.evaluations,
            **metadata,
            **{f"noise floor {task}": value for task, value in floor.items()},
        },
    )


def _walk(job: Job, evaluator: Evaluator) -> tuple[Trajectory, dict[str, float]]:
    pool, entry = job.bench.catalogue.entry(job.key)
    fingerprint = job.bench.fingerprint(entry.name)
    abandoned = 0

    def score(tensors: dict[str, str], accepts: Accepts | None) -> Evaluation | None:
        nonlocal abandoned
        weights = merged_weights(fingerprint, Assignment(tensors), job.bench.store)
        if accepts is None:
            return evaluator.evaluate("search", weights)
        found = evaluator.judged("search", weights, accepts)
        abandoned += found is None
        return found

    record = search(
        job.bench.artifacts.load(Plan, "plan", job.key),
        pool.search,
        pool.tolerance(entry),
        evaluator.evaluate("search", evaluator.original),
        job.bench.shared_tensors(pool).digest,
        score,
    )
    accepted = sum(s.decision == "accepted" for s in record.steps)
    return record, {
        "evaluations per accepted step": record.evaluations / max(accepted, 1),
        **({"abandoned early": abandoned} if pool.search.early_rejection else {}),
    }


def _ladder(job: Job, evaluator: Evaluator) -> tuple[Trajectory, dict[str, float]]:
    pool, entry = job.bench.catalogue.entry(job.key)
    plan = job.bench.artifacts.load(Plan, "plan", job.key)
    fingerprint, offering = job.bench.fingerprint(entry.name), job.bench.offers(pool, entry, evaluator)
    job.bench.shared_tensors(pool).prepare(merge.recipe for step in plan.steps for merge in step.merges)
    offers = offering.of(plan, told=job.log)
    candidates = {name: offer.candidate for name, offer in offers.items()}
    rungs = distinct(candidates, PRICES, own=pool.deploy.adapters is None)

    def score(assignment: Assignment) -> Evaluation:
        return evaluator.evaluate("search", merged_weights(fingerprint, assignment, job.bench.store))

    baseline = evaluator.evaluate("search", evaluator.original)
    assigned = partial(offering.assigned, offers)
    return ladder(plan, pool.tolerance(entry), baseline, rungs, assigned, score), {"rungs": len(rungs)}
