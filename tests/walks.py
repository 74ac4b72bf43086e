"""Plans, trajectories and cutoff sets with given scores, for tests of what is made from them."""

from hypothesis import strategies as st

from sandhi_core.cutoffs import cutoff_set
from sandhi_core.records import Component, CutoffSet, Plan, PlannedMerge, PlannedStep, Recipe, Step, Trajectory

MLP: Component = "mlp"


def trajectory(model: str, scores: list[float | None], rejected: frozenset[int] = frozenset()) -> Trajectory:
    """A walk from 0.9 whose step i writes the layer's up matrix; None: accepted without a score of its
    own."""
    return Trajectory(
        pool="pool",
        model=model,
        plan="",
        baseline={"task": 0.9},
        higher_is_better={"task": True},
        tolerance={"task": 1.0},
        questions={"task": 100},
        evaluations=len(scores),
        steps=tuple(
            Step(
                index=i,
                component=MLP,
                layer=i,
                decision="rejected" if i in rejected else "accepted",
                scores=None if score is None else {"task": score},
                tensors={name(i): f"shared-{i}"},
            )
            for i, score in enumerate(scores)
        ),
    )


def name(layer: int) -> str:
    return f"model.layers.{layer}.up_proj.weight"


def plan(model: str, steps: int) -> Plan:
    recipe = Recipe(projection="up", shape=(96, 64), dtype="BF16", method="mean", rescale="none", contributors=())
    common = {"projection": "up", "nbytes": 12288, "recipe": recipe}
    merges = [PlannedMerge.model_validate({"tensor": name(i), **common}) for i in range(steps)]
    return Plan(
        pool="pool",
        model=model,
        fingerprint="",
        steps=tuple(PlannedStep(component=MLP, layer=i, merges=(m,)) for i, m in enumerate(merges)),
    )


def cutoffs(walk: Trajectory, budget: float = 0.02) -> CutoffSet:
    return cutoff_set(walk, plan(walk.model, len(walk.steps)), {"task": budget})


walks = st.lists(st.one_of(st.none(), st.floats(0.0, 1.0)), max_size=12)
