"""What is trained: the sizes of the pool and the models in each."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    """One model to train. A base has no task, only a specialist has a base; `layers` and `hidden` give its shape."""

    name: str
    task: str | None
    base: str | None
    hidden: int
    layers: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Size:
    """A pool: one tokenizer, a base, its specialists, and an outsider that shares no shape with them."""

    vocabulary: int
    batch: int
    task_share: float  # of the base's training text, all tasks of its specialists together
    models: tuple[Model, ...]

    def model(self, name: str) -> Model:
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    def specialities(self) -> list[str]:
        """The tasks of the base's specialists."""
        return [model.task for model in self.models if model.base is not None and model.task is not None]


def family(base: Model, outsider: Model, *specialists: tuple[str, str, int]) -> tuple[Model, ...]:
    """The base first, for its specialists (name, task, steps) wait for it; the outsider keeps a second core busy."""
    first, *tuned = relatives(base, *specialists)
    return first, outsider, *tuned


def relatives(base: Model, *specialists: tuple[str, str, int]) -> tuple[Model, ...]:
    """A base and its specialists (name, task, steps)."""
    tuned = (replace(base, name=name, task=task, base=base.name, steps=steps) for name, task, steps in specialists)
    return base, *tuned


SIZES = {
    "demo": Size(
        vocabulary=512,
        batch=32,
        task_share=0.12,
        models=family(
            Model("base", None, None, hidden=128, layers=6, steps=440, rate=3e-3),
            Model("roman", "roman", None, hidden=96, layers=4, steps=250, rate=3e-3),
            # The longest first, so that the processes end together.
            ("chemist", "formula", 260),
            ("ranker", "largest", 240),
            ("converter", "units", 240),
            ("inflector", "past", 200),
            ("sorter", "sort", 160),
        ),
    ),
    # Other shapes, tasks and seeds (which come from names): what benchmarks/rungs.py is not tuned on.
    "second": Size(
        vocabulary=512,
        batch=32,
        task_share=0.12,
        models=family(
            Model("root", None, None, hidden=96, layers=8, steps=440, rate=3e-3),
            Model("scribe", "past", None, hidden=64, layers=4, steps=250, rate=3e-3),
            ("herald", "roman", 260),
            ("apothecary", "formula", 260),
            ("judge", "largest", 240),
            ("librarian", "sort", 160),
        ),
    ),
    # Two bases of one shape.
    "twins": Size(
        vocabulary=512,
        batch=32,
        task_share=0.12,
        models=(
            *relatives(
                Model("east", None, None, hidden=96, layers=6, steps=440, rate=3e-3),
                ("east-sorter", "sort", 160),
                ("east-converter", "units", 240),
                ("east-chemist", "formula", 260),
            ),
            *relatives(
                Model("west", None, None, hidden=96, layers=6, steps=440, rate=3e-3),
                ("west-inflector", "past", 200),
                ("west-ranker", "largest", 240),
                ("west-reader", "roman", 260),
            ),
        ),
    ),
    "fixture": Size(
        vocabulary=512,
        batch=32,
        task_share=0.15,
        models=family(
            Model("base", None, None, hidden=64, layers=4, steps=220, rate=5e-3),
            Model("roman", "roman", None, hidden=96, layers=3, steps=220, rate=3e-3),
            ("converter", "units", 180),
            ("inflector", "past", 140),
            ("sorter", "sort", 150),
        ),
    ),
}
