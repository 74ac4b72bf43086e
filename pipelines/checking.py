"""`sandhi check`: everything that must hold before the first evaluation, and what a build would cost."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.progress import Reading
from pipelines.scratch import SCRATCH
from pipelines.settings import Settings
from sandhi_core.catalogue import Planner, load_catalogue, weight_bytes
from sandhi_core.codes import rank
from sandhi_core.costs import Cost
from sandhi_core.errors import Problem, SandhiError
from sandhi_core.evaluation.tasks import SPLITS, load_tasks
from sandhi_core.forecast import costs, forecast
from sandhi_core.graph import Catalogue, Node, Schedule
from sandhi_core.neighbours import disturbed
from sandhi_core.pools.file import Document, read_document
from sandhi_core.pools.pool import Pool
from sandhi_core.pools.problems import Loc, shown_path
from sandhi_core.preflight.checks import check_base, check_model, check_pool
from sandhi_core.preflight.pool import task_folder_is_missing
from sandhi_core.records import Fingerprint, Split
from sandhi_core.words import size

# What a problem is about in the pool file, below its model's entry or at the top; others are about the whole.
_FIELDS: dict[str, tuple[str, ...]] = {
    "directory-missing": ("path",),
    "hub-not-cached": ("path",),
    "same-checkpoint": ("path",),
    "task": ("tasks",),
    "no-questions": ("tasks",),
    "budget-coarse": ("tasks",),
    "budget-too-fine": ("tasks",),
    "device-missing": ("evaluation", "device"),
}


class Findings(NamedTuple):
    """What is answered, what is stale, and of every stale node how many evaluations it takes at most."""

    document: dict[str, Any]
    schedule: Schedule
    evaluations: dict[Node, int]


def check(file: Path, root: Path, *, regroup: bool = False, headers_only: bool = False) -> dict[str, Any]:
    """All problems of all models of a pool at once, worst first, and the cost of building it.

    Every weight is read once; digests and statistics are kept, so that a build does not read them again. `regroup`:
    the cost of a build that forms the groups anew. `headers_only`: read no weights, and warn of it. Says on standard
    error what takes long.
    """
    return examine(file, root, regroup=regroup, headers_only=headers_only).document


def examine(file: Path, root: Path, *, regroup: bool = False, headers_only: bool = False) -> Findings:
    """As `check`, with the cost node by node."""
    settings = Settings.of_command(file, root)
    catalogue = load_catalogue([file], settings.placed)
    document = read_document(file)
    (pool,) = catalogue.pools.values()
    settings.artifacts().directory(SCRATCH)
    scans = settings.artifacts().directory("scans")
    files = [weight_bytes(entry) for entry in pool.models] + [weight_bytes(base) for base in pool.bases]
    reading = Reading(0 if headers_only else sum(files), sys.stderr)
    problems, fingerprints = _models(pool, scans, reading, deep=not headers_only)
    task_problems, questions = _questions(pool, settings.artifacts().directory("datasets"))
    problems += task_problems
    base_problems, bases = _bases(pool, scans, reading, deep=not headers_only)
    problems += base_problems
    problems += _unread(fingerprints, bases) if headers_only else ()
    elsewhere = ("device-missing",) if settings.cluster else ()
    problems += (p for p in check_pool(pool, fingerprints, questions, root, bases) if p.code not in elsewhere)
    problems += disturbed(pool, settings.artifacts())
    problems = [_placed(problem, file, document, pool) for problem in problems]
    problems.sort(key=lambda p: (p.severity != "error", rank(p.code), p.model or ""))
    schedule = Planner(catalogue, settings.artifacts()).schedule(catalogue.regrouped(regroup))
    stale = [*schedule.frontier, *schedule.waiting]  # what waits for something stale is counted as stale
    each = costs(catalogue, pool, fingerprints, stale)
    answer = {
        "ok": all(p.severity != "error" for p in problems),
        "problems": [p.model_dump(mode="json") for p in problems],
        "plan": _cost(catalogue, pool, fingerprints, each.values()),
    }
    return Findings(answer, schedule, {node: cost.evaluations for node, cost in each.items()})


def _placed(problem: Problem, file: Path, document: Document, pool: Pool) -> Problem:
    """The problem, with the pool file and line as its file where no other file is to blame."""
    if problem.file is not None:
        return problem
    models: dict[str, Loc] = {entry.name: ("models", at) for at, entry in enumerate(pool.models)}
    bases: dict[str, Loc] = {base.name: ("merging", "bases", at) for at, base in enumerate(pool.bases)}
    fields = () if problem.model in bases else _FIELDS.get(problem.code, ())
    line = document.line((*(models | bases).get(problem.model or "", ()), *fields))
    return problem.model_copy(update={"file": f"{shown_path(file)}:{line}"})


def _cost(
    catalogue: Catalogue, pool: Pool, fingerprints: dict[str, Fingerprint], each: Iterable[Cost]
) -> dict[str, Any]:
    """What the stale nodes would cost at most; models that cannot be read are in no group."""
    plan = forecast(catalogue, pool, fingerprints, each)
    groups = (g.model_copy(update={"models": tuple(m for m in g.models if m in fingerprints)}) for g in plan.groups)
    return plan.model_copy(update={"groups": tuple(g for g in groups if g.models)}).model_dump(mode="json")


def _models(pool: Pool, scans: Path, reading: Reading, *, deep: bool) -> tuple[list[Problem], dict[str, Fingerprint]]:
    problems: list[Problem] = []
    fingerprints: dict[str, Fingerprint] = {}
    many = len(pool.models)
    _say(f"reading the checkpoints of {many} models{reading}" if many > 1 else f"reading the checkpoint{reading}")
    for number, entry in enumerate(pool.models, 1):
        reading.about = f"{entry.name}, {number} of {many}"
        found, fingerprint = check_model(entry, scans, deep, reading.told)
        reading.passed()
        problems += found
        if fingerprint is not None:
            fingerprints[entry.name] = fingerprint
    return problems, fingerprints


def _bases(pool: Pool, scans: Path, reading: Reading, *, deep: bool) -> tuple[list[Problem], dict[str, Fingerprint]]:
    problems: list[Problem] = []
    fingerprints: dict[str, Fingerprint] = {}
    for base in pool.bases:
        reading.about = base.name
        found, fingerprint = check_base(base, scans, deep, reading.told)
        reading.passed()
        problems += found
        if fingerprint is not None:
            fingerprints[base.name] = fingerprint
    return problems, fingerprints


def _unread(*found: dict[str, Fingerprint]) -> Iterator[Problem]:
    nbytes = sum(f.nbytes for of in found for f in of.values())
    yield Problem(
        code="weights-unread",
        severity="warning",
        message=f"{size(nbytes)} of weights were not read: whether they are damaged, NaN or duplicates is unknown",
        remedy="leave out --headers-only; a build reads them in any case, and a check that did spares it that",
    )


def _questions(pool: Pool, cache: Path) -> tuple[list[Problem], dict[str, dict[str, dict[Split, int]]]]:
    """Per model and task the number of questions of each split. None where the folder of the tasks is missing,
    which is told of the pool."""
    problems: list[Problem] = []
    questions: dict[str, dict[str, dict[Split, int]]] = {}
    if task_folder_is_missing(pool):
        return problems, questions
    _say("building the tasks")
    for entry in pool.models:
        try:
            suite = load_tasks(entry, pool.evaluation, cache)
        except SandhiError as error:
            problems.append(error.problem.model_copy(update={"model": entry.name}))
            continue
        counts = {split: suite.questions(split) for split in SPLITS}
        questions[entry.name] = {t.task: {s: counts[s][t.task] for s in SPLITS} for t in entry.tasks}
    return problems, questions


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
