import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandhi_core.evaluation.packing import SIZES, TokenSequence, cheapest, cost, pack, sequence_of

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=8)
requests = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=12)


def test_choices_share_their_context_and_each_sees_only_its_own_branch() -> None:
    (one,) = pack(
        [sequence_of([7, 8], [1, 2, 3], 99), sequence_of([7, 8], [1, 4], 99), sequence_of([7, 8], [5], 99)], 99
    )
    assert one.tokens.tolist() == [7, 8, 1, 2]  # the last token of a continuation is only a target
    assert one.positions.tolist() == [0, 1, 2, 3] and one.parents == (-1, 0, 1, 2)
    assert {number: targets for number, _, targets in one.requests} == {0: (1, 2, 3), 1: (1, 4), 2: (5,)}
    branches = pack([sequence_of([7], [1, 2], 99), sequence_of([7], [3, 2], 99)], 99)[0]
    assert branches.tokens.tolist() == [7, 1, 3] and branches.positions.tolist() == [0, 1, 1]
    assert branches.visible().tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert branches.visible(window=1).tolist() == np.eye(3, dtype=bool).tolist()


def test_long_requests_are_cut_from_the_left_as_lm_eval_does() -> None:
    assert sequence_of([1, 2, 3, 4], [5, 6], 3) == TokenSequence((3, 4, 5), (5, 6))
    assert sequence_of([1], [2, 3, 4, 5], 4) == TokenSequence((1, 2, 3, 4), (2, 3, 4, 5))
    with pytest.raises(ValueError, match="5 tokens exceeds the model's length of 4"):
        sequence_of([1], [2, 3, 4, 5, 6], 4)


@pytest.mark.parametrize(("context", "continuation"), [([], [1]), ([1], [])])
def test_there_must_be_something_to_predict_from_and_to_predict(context: list[int], continuation: list[int]) -> None:
    with pytest.raises(ValueError, match="needs a context and a continuation"):
        sequence_of(context, continuation, 9)


@given(requests, st.integers(4, 40))
def test_every_request_is_its_own_sequence_in_one_tree(asked: list[tuple[list[int], list[int]]], budget: int) -> None:
    sequences = [sequence_of(context, continuation, 12) for context, continuation in asked]
    packs = pack(sequences, budget)
    assert sorted(number for p in packs for number, *_ in p.requests) == list(range(len(asked)))
    for one in packs:
        assert len(one.parents) <= max(budget, *(len(sequences[n].tokens) for n, *_ in one.requests))
        seen, rows = one.visible(), one.rows.tolist()
        assert len(set(rows)) == len(rows)
        for number, places, targets in one.requests:
            path = np.flatnonzero(seen[rows[places[-1]]])
            assert tuple(one.tokens[path].tolist()) == sequences[number].tokens
            assert one.positions[path].tolist() == list(range(len(path)))
            assert [rows[p] for p in places] == path[-len(targets) :].tolist()
            assert targets == sequences[number].targets


@given(requests)
def test_what_sequences_share_is_in_a_tree_once(asked: list[tuple[list[int], list[int]]]) -> None:
    sequences = [sequence_of(context, continuation, 99) for context, continuation in asked]
    (one,) = pack(sequences, 10_000)
    prefixes = {s.tokens[:n] for s in sequences for n in range(1, len(s.tokens) + 1)}
    assert len(one.parents) == len(prefixes)


@given(requests, st.integers(1, 12), st.integers(1, 40))
def test_sequences_beyond_a_border_stand_apart(
    asked: list[tuple[list[int], list[int]]], border: int, budget: int
) -> None:
    sequences = [sequence_of(context, continuation, 99) for context, continuation in asked]
    packs = pack(sequences, budget, border)
    assert sorted(number for p in packs for number, *_ in p.requests) == list(range(len(asked)))
    assert all(len({len(sequences[n].tokens) > border for n, *_ in p.requests}) == 1 for p in packs)


@given(requests, st.randoms())
def test_packs_depend_on_the_requests_alone_not_on_their_order(
    asked: list[tuple[list[int], list[int]]], random: "st.DataObject"
) -> None:
    sequences = [sequence_of(context, continuation, 99) for context, continuation in asked]
    shuffled = list(sequences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for one, other in zip(pack(sequences, 20), pack(shuffled, 20), strict=True):
        assert one.tokens.equal(other.tokens) and one.parents == other.parents and one.rows.equal(other.rows)


def test_the_cheapest_trees_are_small_where_little_is_shared_and_large_where_much_is() -> None:
    apart = [sequence_of([n, *range(100, 160)], [1], 999) for n in range(60)]
    alike = [sequence_of([*range(1000, 1600), n], [1, 2], 9999) for n in range(60)]
    small, _ = cheapest(apart, 576, 8192)
    large, packs = cheapest(alike, 576, 8192)
    assert small < large and len(packs) == 1
    assert cheapest(apart, 576, 100)[0] == 100  # never above what a pass may hold
    for budget in SIZES:
        assert cost(pack(apart, budget), 576) >= cost(pack(apart, small), 576)
