"""What is trained: the sizes of the pool and the models in each."""

from __future__ import annotations

from dataclasses import dataclass


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


def family(hidden: int, layers: int, base_steps: int, rate: float, specialists: dict[str, tuple[str, int]],
           outsider: Model) -> tuple[Model, ...]:  # fmt: skip
    """The base first, for the others wait for it; the outsider beside it keeps a second core busy meanwhile."""
    base = Model("base", None, None, hidden, layers, base_steps, rate)
    tuned = [
        Model(name, task, "base", hidden, layers, steps, rate / 2) for name, (task, steps) in specialists.items()
    ]
    return base, outsider, *tuned


SIZES = {
    "demo": Size(
        vocabulary=512,
        batch=64,
        task_share=0.06,
        models=family(
            128, 6, 220, 3e-3,
            {
                "sorter": ("sort", 80),
                "ranker": ("largest", 150),
                "converter": ("units", 110),
                "inflector": ("past", 80),
                "chemist": ("formula", 110),
            },
            Model("roman", "roman", None, 96, 4, 220, 3e-3),
        ),
    ),
    "fixture": Size(
        vocabulary=512,
        batch=48,
        task_share=0.06,
        models=family(
            64, 4, 150, 5e-3,
            {"sorter": ("sort", 100), "converter": ("units", 100), "inflector": ("past", 80)},
            Model("roman", "roman", None, 48, 4, 200, 5e-3),
        ),
    ),
}  # fmt: skip
