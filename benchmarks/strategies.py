"""Ways to search the same rungs, at about equal evaluations: how many net bytes each saves where its budgets hold.

Every way is one number a model that says which slots share and with what rank; the ladder looks for the boldest number
that holds, and the holdout has the last word. So the ways differ only in what the number is about.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.lines import LADDER, Sections, built, varied
from benchmarks.rows import table
from benchmarks.ways import say
from resources.bench import Bench
from sandhi_core.artifacts import Artifacts
from sandhi_core.assignment import Assignment, assignment_at
from sandhi_core.catalogue import load_catalogue
from sandhi_core.cutoffs import cutoff_set
from sandhi_core.evaluation.evaluator import merged_weights
from sandhi_core.holdout import walk_holdout
from sandhi_core.pools.pool import ModelEntry, Pool, load_pool
from sandhi_core.records import Evaluation, Fingerprint, HoldoutScore, Plan, Profile, Quality, Split, Trajectory
from sandhi_core.rungs.allotment import PRICES, Bid, Candidate, Ranks, distinct, nbytes
from sandhi_core.rungs.ladder import ladder
from sandhi_core.savings import savings
from sandhi_core.words import percent

Rungs = list[tuple[float, Ranks]]
Candidates = Mapping[str, Candidate]

LEAST_SENSITIVITY = 0.1
"""Of the mean sensitivity: noise that happens to cost nothing does not make a component free."""


@dataclass(frozen=True)
class Model:
    """One model of a pool that was built: what its slots may take, and how it is scored."""

    entry: ModelEntry
    fingerprint: Fingerprint
    profile: Profile
    plan: Plan
    candidates: Candidates  # errors as parts of the slots' outputs
    importance: Callable[[str], float]
    assigned: Callable[[Ranks], Assignment]
    score: Callable[[Split, Assignment], Evaluation]
    tolerance: Mapping[str, float]


def by_answers(model: Model) -> Rungs:
    """What Sandhi does: one price, the error that a MiB must take off; errors count by what the answers depend on."""
    return _weighted(model, model.importance)


def by_outputs(model: Model) -> Rungs:
    """One price, with all errors as parts of their own slot's outputs."""
    return distinct(model.candidates, PRICES)


def one_rank(model: Model) -> Rungs:
    """Adapters as they are usually made: the same rank in every slot, down to none."""
    most = max((candidate.limit for candidate in model.candidates.values()), default=0)
    return _each_once(
        (rank, {n: _ranked(c, rank) for n, c in model.candidates.items()}) for rank in range(most, -1, -1)
    )


def one_error(model: Model) -> Rungs:
    """The same error in every slot, as a part of its outputs."""
    limits = [2.0 ** (n / 4) for n in range(-80, 9)]
    return _each_once((limit, {n: _within(c, limit) for n, c in model.candidates.items()}) for limit in limits)


def by_noise(model: Model) -> Rungs:
    """One price; errors count by what noise in their component cost the model."""
    drops = {(s.component, s.layer): max(s.drop, 0.0) for s in model.profile.sensitivities}
    mean = sum(drops.values()) / len(drops) or 1.0
    component = {slot.tensor: (slot.component, slot.layer) for slot in model.fingerprint.slots}
    return _weighted(model, lambda name: max(drops[component[name]] / mean, LEAST_SENSITIVITY))


def _weighted(model: Model, counts: Callable[[str], float]) -> Rungs:
    weighted = {n: replace(c, squares=c.squares * counts(n)) for n, c in model.candidates.items()}
    return distinct(weighted, PRICES)


BY_NOISE = "one price, errors by noise profile"
WAYS: Mapping[str, Callable[[Model], Rungs]] = {
    "one price, errors by answers": by_answers,
    "one price, errors by outputs": by_outputs,
    BY_NOISE: by_noise,
    "one error": one_error,
    "one rank": one_rank,
}


def _ranked(candidate: Candidate, rank: int) -> int | None:
    rank = min(rank, candidate.limit)
    return rank if nbytes(candidate.shape, rank) < candidate.spared else None


def _within(candidate: Candidate, limit: float) -> int | None:
    tails = candidate.squares[::-1].cumsum()[::-1]  # the error at each rank
    rank = int((tails > limit).sum())
    return rank if rank <= candidate.limit and nbytes(candidate.shape, rank) < candidate.spared else None


def _each_once(assignments: Iterator[tuple[float, dict[str, int | None]]]) -> Rungs:
    found: Rungs = []
    for number, chosen in assignments:
        ranks = {name: Bid(rank) for name, rank in chosen.items() if rank is not None}
        if ranks and (not found or ranks != found[-1][1]):
            found.append((float(number), ranks))
    return found


@dataclass(frozen=True)
class Climbed:
    """What one way found for one model."""

    trajectory: Trajectory
    holdouts: Mapping[Quality, HoldoutScore]

    def deployed(self, quality: Quality) -> Assignment:
        return assignment_at(self.trajectory, self.holdouts[quality].steps)


def climbed(model: Model, pool: Pool, rungs: Rungs) -> Climbed:
    """The ladder and both walks of the holdout."""
    baseline = model.score("search", Assignment())
    score = partial(model.score, "search")
    trajectory = ladder(model.plan, model.tolerance, baseline, rungs, model.assigned, score)
    cutoffs = cutoff_set(trajectory, model.plan, {task.task: task.budget for task in model.entry.tasks})
    look = partial(model.score, "holdout")
    qualities: tuple[Quality, ...] = ("point", "certified")
    return Climbed(
        trajectory, {q: walk_holdout(pool.name, model.entry, cutoffs, trajectory, look, q) for q in qualities}
    )


def opened(pool: Pool, bench: Bench, entry: ModelEntry) -> Model:
    """A model of a pool that was built in the bench's root."""
    evaluator, fingerprint = bench.evaluator(pool, entry), bench.fingerprint(entry.name)
    plan = bench.artifacts.load(Plan, "plan", f"{pool.name}.{entry.name}")
    offering = bench.offers(pool, entry, evaluator)
    offers = offering.of(plan)
    return Model(
        entry,
        fingerprint,
        bench.artifacts.load(Profile, "profile", entry.name),
        plan,
        {name: offer.candidate for name, offer in offers.items()},
        bench.inputs(entry.name).importance.of,
        partial(offering.assigned, offers),
        lambda split, assignment: evaluator.evaluate(split, merged_weights(fingerprint, assignment, bench.store)),
        pool.tolerance(entry),
    )


def compared(pool: Pool, bench: Bench) -> str:
    """The table of all ways over a pool; a model is in memory only while its ways are searched."""
    found: dict[str, dict[str, Climbed]] = defaultdict(dict)
    for entry in pool.models:
        model = opened(pool, bench, entry)
        for way, rungs in WAYS.items():
            say(f"{pool.name}: {entry.name}: {way}")
            found[way][entry.name] = climbed(model, pool, rungs(model))
    fingerprints = bench.fingerprints(pool.name)
    lines = []
    for way, models in found.items():
        shares = []
        for quality in ("point", "certified"):
            saved = savings({name: one.deployed(quality) for name, one in models.items()}, fingerprints)
            shares.append(percent(saved.net, saved.checkpoint_bytes))
        evaluations = sum(one.trajectory.evaluations for one in models.values())
        profiled = sum(2 * f.layers for f in fingerprints.values()) if way == BY_NOISE else 0
        lines.append((way, *shares, str(evaluations), str(profiled)))
    return table(("one number a model", "point", "certified", "evaluations", "of a noise profile"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.strategies", description=__doc__)
    parser.add_argument("pool", type=Path, metavar="POOL.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where strategies-POOL.txt is kept")
    options = parser.parse_args(arguments)
    pool = load_pool(options.pool)
    sections: Sections = {
        **LADDER,
        "profile": {"noise": True},
        "search": {"strategy": "ladder", "errors": "outputs"},
        "holdout": {"quality": "point"},
    }
    with tempfile.TemporaryDirectory(prefix="sandhi-strategies-") as name:
        folder = Path(name)
        built("ladder", pool, sections, folder)
        file = varied(pool, sections, folder / "pool.yaml")
        catalogue = load_catalogue([file])
        bench = Bench(catalogue, Artifacts(folder / "root"), lambda model, seconds: None)
        text = compared(catalogue.pools[pool.name], bench)
    if options.out is not None:
        (options.out / f"strategies-{pool.name}.txt").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
