"""`sandhi check`: everything that must hold before the first evaluation, and what a build would cost."""

from pathlib import Path
from typing import Any

from pipelines.settings import Settings
from sandhi_core.catalogue import Planner, load_catalogue
from sandhi_core.errors import Problem, SandhiError
from sandhi_core.evaluation.tasks import SPLITS, load_tasks
from sandhi_core.forecast import forecast
from sandhi_core.graph import Catalogue
from sandhi_core.pool import Pool
from sandhi_core.preflight import check_model, check_pool
from sandhi_core.records import Fingerprint, Split


def check(file: Path, root: Path, *, regroup: bool = False) -> dict[str, Any]:
    """All problems of all models of a pool at once, worst first, and the cost of building it.

    Every weight is read once; digests and statistics are kept, so that a build does not read them again. `regroup`:
    the cost of a build that forms the groups anew.
    """
    catalogue = load_catalogue([file])
    (pool,) = catalogue.pools.values()
    settings = Settings(file, root)
    problems, fingerprints = _models(pool, settings.artifacts().directory("scans"))
    task_problems, questions = _questions(pool, settings.artifacts().directory("datasets"))
    problems += task_problems
    problems += check_pool(pool, fingerprints, questions, root)
    problems.sort(key=lambda p: (p.severity != "error", p.model or "", p.code))
    return {
        "ok": all(p.severity != "error" for p in problems),
        "problems": [p.model_dump(mode="json") for p in problems],
        "plan": _cost(catalogue, settings, fingerprints, regroup),
    }


def _cost(
    catalogue: Catalogue, settings: Settings, fingerprints: dict[str, Fingerprint], regroup: bool
) -> dict[str, Any]:
    """What the stale nodes would cost at most (those that wait for stale ones counted as stale)."""
    (pool,) = catalogue.pools.values()
    schedule = Planner(catalogue, settings.artifacts()).schedule(catalogue.regrouped(regroup))
    plan = forecast(catalogue, pool, fingerprints, [*schedule.frontier, *schedule.waiting])
    return plan.model_dump(mode="json")


def _models(pool: Pool, scans: Path) -> tuple[list[Problem], dict[str, Fingerprint]]:
    problems: list[Problem] = []
    fingerprints: dict[str, Fingerprint] = {}
    for entry in pool.models:
        found, fingerprint = check_model(entry, scans)
        problems += found
        if fingerprint is not None:
            fingerprints[entry.name] = fingerprint
    return problems, fingerprints


def _questions(pool: Pool, cache: Path) -> tuple[list[Problem], dict[str, dict[str, dict[Split, int]]]]:
    """Per model and task the number of questions of each split."""
    problems: list[Problem] = []
    questions: dict[str, dict[str, dict[Split, int]]] = {}
    for entry in pool.models:
        try:
            suite = load_tasks(entry, pool.evaluation, cache)
        except SandhiError as error:
            problems.append(error.problem.model_copy(update={"model": entry.name}))
            continue
        counts = {split: suite.questions(split) for split in SPLITS}
        questions[entry.name] = {t.task: {s: counts[s][t.task] for s in SPLITS} for t in entry.tasks}
    return problems, questions
