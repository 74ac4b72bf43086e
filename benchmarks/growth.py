"""How the seconds of one full pass grow with layers, questions and choices, against growing in proportion."""

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import truncated
from benchmarks.questions import SPLIT, TASKS, shortened, suite, write
from benchmarks.rows import seconds, table
from benchmarks.ways import resident, say
from sandhi_core.evaluation.resident import Resident
from sandhi_core.evaluation.tasks import Suite

NO_CACHE = "0.000001MB"  # one byte: no state of any layer fits, every pass is a full one


@dataclass(frozen=True)
class Curve:
    """(size, seconds), the smallest first."""

    by: str
    points: tuple[tuple[int, float], ...]

    def ratios(self) -> list[float]:
        """Seconds to what they would be in proportion to the smallest size."""
        (size, first), *_ = self.points
        return [spent / (first * n / size) for n, spent in self.points]

    def __str__(self) -> str:
        lines = [
            (str(size), seconds(spent), f"{ratio:.2f}")
            for (size, spent), ratio in zip(self.points, self.ratios(), strict=True)
        ]
        return table((self.by, "seconds", "to linear"), lines)


def growth(directory: Path, layers: int, folder: Path, questions: int, shots: int, threads: int) -> list[Curve]:
    """Full packed passes: of copies with fewer layers, of fewer questions a task, of fewer choices a question."""
    whole = suite(write(folder / "tasks", questions, shots=shots), TASKS, folder / "cache")
    by_layers = []
    for count in sorted({max(1, layers * part // 4) for part in (1, 2, 3, 4)}):
        copy = truncated(directory, folder / f"{directory.name}-{count}", count)
        by_layers.append((count, _pass(resident(copy, threads, NO_CACHE), whole)))
    held = resident(directory, threads, NO_CACHE)
    by_questions = [
        (len(TASKS) * count, _pass(held, shortened(whole, count)))
        for count in sorted({max(1, questions * part // 4) for part in (1, 2, 3, 4)})
    ]
    by_choices = []
    for count in (1, 2, 3, 4):
        files = write(folder / f"tasks-{count}", questions, count, shots=shots)
        by_choices.append((count, _pass(held, suite(files, TASKS, folder / "cache"))))
    say("growth: done")
    names = ("layers", "questions", "choices a question")
    return [
        Curve(name, tuple(points)) for name, points in zip(names, (by_layers, by_questions, by_choices), strict=True)
    ]


def _pass(held: Resident, asked: Suite) -> float:
    """Seconds of one, the questions packed already: the lesser of two."""
    held.answers(shortened(asked, 2), SPLIT)  # warm, and held to lm-eval's numbers
    spent = []
    for _ in range(2):
        begun = time.perf_counter()
        held.answers(asked, SPLIT)
        spent.append(time.perf_counter() - begun)
    return min(spent)


def plot(curves: list[Curve], title: str, path: Path) -> None:
    """The curves side by side, each with the straight line of its smallest size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(11, 3.4), layout="constrained")
    for axis, curve in zip(axes, curves, strict=True):
        sizes, spent = zip(*curve.points, strict=True)
        axis.plot(sizes, [spent[0] * n / sizes[0] for n in sizes], "--", color="grey", label="in proportion")
        axis.plot(sizes, spent, "o-", label="measured")
        axis.set(xlabel=curve.by, ylabel="seconds of a full pass", xlim=(0, None), ylim=(0, None))
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
