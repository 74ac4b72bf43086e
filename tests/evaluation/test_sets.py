"""Where hidden states live, and how many layers of them."""

import math

import pytest

from sandhi_core.evaluation.packing import TokenSequence
from sandhi_core.evaluation.sets import Hidden, PackedSets

TOKENS, WIDTH, LAYERS = 10, 8, 4
ONE = 4 * TOKENS * WIDTH * 2  # a layer: kept and tried, before and within it, in two bytes


def sequences(first: int) -> list[TokenSequence]:
    return [TokenSequence(tuple(range(first, first + TOKENS)), (1,))]


def sets(memory: dict[str, int]) -> PackedSets:
    return PackedSets(Hidden(WIDTH, 2, LAYERS), 64, math.inf, {place: ONE * layers for place, layers in memory.items()})


@pytest.mark.parametrize(
    ("memory", "device", "layers"),
    [
        ({"cuda": 4, "cpu": 4}, "cuda", [0, 1, 2, 3]),  # the model's own device, where it holds as many
        ({"cuda": 2, "cpu": 4}, "cpu", [0, 1, 2, 3]),
        ({"cuda": 2, "cpu": 1}, "cuda", [0, 2]),  # every second layer
        ({"cuda": 3}, "cuda", [0, 2]),
        ({"cuda": 0, "cpu": 0}, "cuda", []),
        ({}, "cpu", []),
    ],
)
def test_states_live_where_most_of_them_fit(memory: dict[str, int], device: str, layers: list[int]) -> None:
    found = sets(memory).lasting(sequences(0), alone=False)
    assert (found.cache.device, sorted(found.cache.layers)) == (device, layers)
    assert found.nbytes == ONE * len(layers)


def test_all_sets_together_keep_within_the_memory() -> None:
    several = sets({"cuda": 4, "cpu": 3})
    found = [several.lasting(sequences(100 * n), alone=False) for n in range(4)]
    assert [(s.cache.device, len(s.cache.layers)) for s in found] == [("cuda", 4), ("cpu", 2), ("cpu", 1), ("cuda", 0)]
    assert several.lasting(sequences(0), alone=False) is found[0]


def test_alone_means_instead_of_all_before() -> None:
    one = sets({"cpu": 4})
    first = one.lasting(sequences(0), alone=True)
    assert one.lasting(sequences(0), alone=True) is first
    assert len(one.lasting(sequences(100), alone=True).cache.layers) == 4 and len(one.kept) == 1


def test_a_passing_set_keeps_nothing() -> None:
    one = sets({"cpu": 4})
    asked = [TokenSequence((n, *range(100, 109)), (1,)) for n in range(12)]
    assert not one.passing(asked).cache.layers and not one.kept
    assert len(one.passing(asked, halved=True).packs) > len(one.passing(asked).packs)
