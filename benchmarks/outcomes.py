"""What a way of sharing saves and costs, as one row of a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.rows import seconds, table
from sandhi_core.cutoffs import EPSILON
from sandhi_core.pools.pool import ModelEntry
from sandhi_core.records import TaskResult
from sandhi_core.statistics import paired_interval
from sandhi_core.words import percent, points


@dataclass(frozen=True)
class Loss:
    """Of one model, its worst task: the drop on the holdout, the one-sided 95 % upper bound of it, the budget."""

    drop: float
    bound: float
    budget: float

    @property
    def held(self) -> bool:
        return self.drop <= self.budget + EPSILON

    @property
    def certified(self) -> bool:
        return self.bound <= self.budget + EPSILON


@dataclass
class Outcome:
    """One row. `net` and `whole` in bytes of checkpoints, exact duplicates counted as saved in every row alike."""

    name: str
    net: int
    whole: int
    losses: dict[str, Loss]
    evaluations: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    commit: str = ""  # what measured it

    @property
    def held(self) -> bool:
        return all(loss.held for loss in self.losses.values())

    @property
    def certified(self) -> bool:
        return all(loss.certified or loss.bound == 0.0 for loss in self.losses.values())


def loss(entry: ModelEntry, before: Mapping[str, TaskResult], after: Mapping[str, TaskResult]) -> Loss:
    """Of one model's answers to the holdout."""
    found = []
    for task in entry.tasks:
        a, b = before[task.task], after[task.task]
        drop = a.value - b.value if b.higher_is_better else b.value - a.value
        bound = 0.0 if a == b else -paired_interval(a.questions, b.questions, b.higher_is_better).bound
        found.append(Loss(drop, bound, task.budget))
    return max(found, key=lambda one: one.drop - one.budget)


def told(found: Sequence[Outcome]) -> str:
    """The rows as a table: a model's drop on the holdout and its one-sided 95 % bound, in points."""
    models = sorted(found[0].losses)
    head = ("way", "net bytes", "of all", "held", "certified", "evaluations", "s", "commit", *models)
    lines = [
        (
            *(o.name, f"{o.net:,}", percent(o.net, o.whole)),
            *("yes" if o.held else "NO", "yes" if o.certified else "no"),
            *(str(o.evaluations), seconds(o.seconds), o.commit),
            *(f"{points(o.losses[m].drop)} ({points(o.losses[m].bound)})" for m in models),
        )
        for o in found
    ]
    notes = [f"{o.name}: {note}" for o in found for note in o.notes]
    return "\n".join([table(head, lines), *notes])
