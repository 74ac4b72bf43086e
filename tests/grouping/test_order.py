from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.grouping.order import Place, reference_order, spaced, wide_order
from sandhi_core.records import Contributor, Group, Recipe, Slot
from tests.synthetic import PROJECTIONS, SHAPES


def test_spaced_starts_in_the_middle_and_keeps_neighbours_apart() -> None:
    assert spaced(dict.fromkeys(range(6), 0.0), 2.5) == [2, 4, 0, 3, 1, 5]
    assert spaced({0: 1.0, 1: 1.0, 2: 5.0, 3: 1.0, 4: 1.0}, 0.0) == [2, 0, 4, 1, 3]


@given(st.dictionaries(st.integers(0, 12), st.floats(0, 9), max_size=13), st.floats(0, 12))
def test_spaced_is_a_permutation_and_never_takes_a_neighbour_needlessly(
    weights: dict[int, float], middle: float
) -> None:
    order = spaced(weights, middle)
    assert sorted(order) == sorted(weights)
    for at, layer in enumerate(order):
        taken = set(order[:at])
        if {layer - 1, layer + 1} & taken:
            assert all({n - 1, n + 1} & taken for n in order[at:])


def test_wide_takes_large_savings_first_and_disturbed_components_last() -> None:
    mlp: list[Place] = [("mlp", n) for n in range(4)]
    attn: list[Place] = [("attn", n) for n in range(4)]
    nbytes = dict.fromkeys(mlp, 300) | dict.fromkeys(attn, 100) | {("attn", 3): 300}
    drops = dict.fromkeys([*mlp, *attn], 0.0) | {("mlp", 1): 0.3, ("attn", 0): 0.06, ("attn", 1): 0.05}
    assert wide_order(nbytes, drops, 0.05, 1.5) == [
        ("mlp", 2),
        ("mlp", 0),
        ("mlp", 3),
        ("attn", 3),
        ("attn", 1),
        ("attn", 2),
        ("attn", 0),
        ("mlp", 1),
    ]


def group(stage: int, projection: str, *slots: tuple[str, int], joined: tuple[tuple[str, int], ...] = ()) -> Group:
    recipe = Recipe(
        projection=projection,
        shape=SHAPES[projection],
        dtype="BF16",
        method="mean",
        rescale="none",
        contributors=tuple(Contributor(model=m, layer=n, tensor="t", digest=m) for m, n in slots),
    )
    members = tuple(
        Slot(
            model=m,
            layer=n,
            projection=projection,
            component=PROJECTIONS[projection],
            tensor=f"{n}.{projection}",
            digest=m,
            nbytes=2,
            key=projection,
        )
        for m, n in (*slots, *joined)
    )
    return Group.model_validate({"recipe": recipe, "members": members, "stage": stage})


def order(groups: list[Group], model: str) -> list[tuple[int, str, int, str]]:
    return [
        (group.stage, slot.component, slot.layer, "".join(s.projection[0] for _, s in block))
        for block in reference_order(groups, model, 15.5)
        for group, slot in block[:1]
    ]


def test_reference_goes_by_what_a_layer_shares_in_all_models() -> None:
    groups = [
        group(1, "up", ("a", 3), ("b", 3)),
        group(1, "down", ("a", 3), ("b", 3)),
        group(1, "up", ("a", 9), ("b", 9)),
        group(1, "up", ("b", 20), ("c", 20)),
        group(1, "gate", ("b", 20), ("c", 20)),
        group(1, "down", ("b", 20), ("c", 20)),
        group(1, "q", ("a", 15), ("b", 15)),
        group(2, "up", ("a", 9), ("b", 20)),
        group(2, "gate", ("a", 9), ("b", 4)),
        group(2, "k", ("a", 1), ("b", 2)),
    ]
    assert order(groups, "a") == [
        (1, "mlp", 3, "ud"),
        (1, "mlp", 9, "u"),
        (1, "attn", 15, "q"),
        (2, "mlp", 9, "ug"),  # up is a place of stage 1; gate is new there, comes next, and so joins the step
        (2, "attn", 1, "k"),
    ]
    assert order(groups, "b") == [
        (1, "mlp", 20, "ugd"),
        (1, "mlp", 3, "ud"),
        (1, "mlp", 9, "u"),
        (1, "attn", 15, "q"),
        (2, "mlp", 20, "u"),
        (2, "mlp", 4, "g"),
        (2, "attn", 2, "k"),
    ]


def test_reference_order_of_linked_models_ignores_a_joined_model_and_unlinked_groups() -> None:
    before = [group(1, "up", ("a", 3), ("b", 3)), group(1, "up", ("a", 9), ("b", 9))]
    after = [
        group(1, "up", ("a", 3), ("b", 3), joined=(("c", 3),)),
        group(1, "up", ("a", 9), ("b", 9)),
        group(1, "down", ("c", 3), ("d", 3)),
    ]
    assert order(before, "a") == order(after, "a") == [(1, "mlp", 9, "u"), (1, "mlp", 3, "u")]
    assert order(after, "c") == [(1, "mlp", 3, "ud")]
