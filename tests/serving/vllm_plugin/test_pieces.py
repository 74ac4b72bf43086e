"""What ranks hold of a matrix: together they answer as one, whatever is fused, repeated or added."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from sandhi_core.rungs.residual import Residual, added, moved
from sandhi_core.serving.vllm_plugin.pieces import Piece, by_columns, by_rows, of_vocabulary, stored_names

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
sizes = st.integers(1, 5)
rank_counts = st.sampled_from([1, 2, 4])


def whole(residual: Residual, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    output = linear(x, weight)
    if residual.scale is not None and residual.shift is not None:
        output = moved(output, residual.scale, residual.shift, None)
    if residual.down is not None and residual.up is not None:
        output = added(output, x, residual.down, residual.up)
    return output


def drawn(rows: int, columns: int, parts: tuple[bool, bool], seed: int) -> tuple[torch.Tensor, Residual, torch.Tensor]:
    """Small whole numbers: sums of their products are exact in any order."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=random).double()

    factors, vectors = parts
    residual = Residual(
        up=numbers(rows, 2) if factors else None,
        down=numbers(2, columns) if factors else None,
        scale=numbers(rows) if vectors else None,
        shift=numbers(rows) if vectors else None,
    )
    return numbers(rows, columns), residual, numbers(3, columns)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("model.layers.0.self_attn.qkv_proj", ["model.layers.0.self_attn.q_proj.weight", "k", "v"]),
        ("model.layers.3.mlp.gate_up_proj", ["model.layers.3.mlp.gate_proj.weight", "up"]),
        ("model.layers.3.mlp.down_proj", ["model.layers.3.mlp.down_proj.weight"]),
        ("lm_head", ["lm_head.weight"]),
        ("qkv_proj", ["q_proj.weight", "k", "v"]),
    ],
)
def test_fused_layers_are_made_of_stored_ones(layer: str, expected: list[str]) -> None:
    names = stored_names(layer, FUSED)
    assert names[0] == expected[0] and len(names) == len(expected)
    assert all(name.endswith(f"{part}_proj.weight") for name, part in zip(names[1:], expected[1:], strict=True))


@given(rows=sizes, columns=sizes, ranks=rank_counts, parts=st.tuples(st.booleans(), st.booleans()), seed=sizes)
def test_outputs_of_ranks_that_share_rows_lie_side_by_side(
    rows: int, columns: int, ranks: int, parts: tuple[bool, bool], seed: int
) -> None:
    weight, residual, x = drawn(rows * ranks, columns, parts, seed)
    outputs = []
    for rank in range(ranks):
        (piece,) = by_rows(["w"], [weight.shape], [rows * ranks], [rows], rank, ranks)
        part = piece.of(weight)
        assert part.shape == piece.shape and part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        outputs.append(whole(piece.of_residual(residual), part, x))
    assert torch.equal(torch.cat(outputs, dim=1), whole(residual, weight, x))


@given(rows=sizes, columns=sizes, ranks=rank_counts, parts=st.tuples(st.booleans(), st.booleans()), seed=sizes)
def test_outputs_of_ranks_that_share_columns_add_up(
    rows: int, columns: int, ranks: int, parts: tuple[bool, bool], seed: int
) -> None:
    weight, residual, x = drawn(rows, columns * ranks, parts, seed)
    total = torch.zeros(3, rows).double()
    for rank in range(ranks):
        piece = by_columns("w", weight.shape, columns, rank, ranks)
        total += whole(piece.of_residual(residual), piece.of(weight), x[:, slice(*piece.columns)])
    assert torch.equal(total, whole(residual, weight, x))


@given(heads=st.sampled_from([1, 2, 4]), ranks=st.sampled_from([1, 2, 4, 8]), size=sizes, queries=sizes)
def test_heads_are_shared_or_repeated(heads: int, ranks: int, size: int, queries: int) -> None:
    names, shapes = ["q", "k", "v"], [(queries * ranks * size, 3), (heads * size, 3), (heads * size, 3)]
    held = max(heads // ranks, 1) * size
    for rank in range(ranks):
        q, k, v = by_rows(names, shapes, [0, 0, 0], [queries * size, held, held], rank, ranks)
        assert q.rows == (rank * queries * size, (rank + 1) * queries * size)
        assert k.rows == v.rows and k.rows[0] == rank * heads // ranks * size and k.shape == (held, 3)
        assert (k.name, k.start, k.first) == ("k", 0, True)


@given(ranks=rank_counts, first=sizes, second=sizes)
def test_matrices_that_are_stored_as_one_are_cut_apart(ranks: int, first: int, second: int) -> None:
    """Over all ranks and both, every row of the stored matrix occurs once; a rank's rows are one after another in what
    an owner would hold for it."""
    logical = [first * ranks, second * ranks]
    stored = torch.arange(sum(logical)).double()[:, None]
    seen = []
    for rank in range(ranks):
        pieces = by_rows(["qkv"], [stored.shape], logical, [first, second], rank, ranks)
        held = torch.cat([piece.of(stored) for piece in pieces])
        assert all(torch.equal(piece.of_slice(held), piece.of(stored)) for piece in pieces)
        seen.append(held)
    assert sorted(torch.cat(seen).flatten().tolist()) == list(range(sum(logical)))


@given(tokens=st.integers(1, 40), ranks=st.sampled_from([1, 2]), columns=sizes)
def test_a_vocabulary_is_shared_without_its_padding(tokens: int, ranks: int, columns: int) -> None:
    padded = -(-tokens // 8) * 8 // ranks
    stored = torch.arange(tokens * columns).reshape(tokens, columns)
    ranges = [(min(rank * padded, tokens), min((rank + 1) * padded, tokens)) for rank in range(ranks)]
    if any(start == end for start, end in ranges):
        with pytest.raises(ValueError, match="leaves a rank without any"):
            [of_vocabulary("w", stored.shape, tokens, held) for held in ranges]
    else:
        pieces = [of_vocabulary("w", stored.shape, tokens, held) for held in ranges]
        assert torch.equal(torch.cat([piece.of(stored) for piece in pieces]), stored)


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ValueError, match="6 rows cannot be 4 of each of 2 ranks"):
        by_rows(["w"], [(6, 2)], [6], [4], 0, 2)
    with pytest.raises(ValueError, match="4 rows cannot be 8 of each of 2 ranks"):
        by_rows(["w"], [(4, 2)], [4], [8], 0, 2)
    with pytest.raises(ValueError, match="6 rows cannot be 2 of each of 2 ranks"):
        by_rows(["w"], [(6, 2)], [6], [2], 0, 2)
    with pytest.raises(ValueError, match="has 5 rows, the layer has 6"):
        by_rows(["qkv"], [(5, 2)], [4, 2], [4, 2], 0, 1)
    with pytest.raises(ValueError, match="made of 3 matrices, 2 are stored"):
        by_rows(["a", "b"], [(2, 2), (2, 2)], [2, 2, 2], [2, 2, 2], 0, 1)
    with pytest.raises(ValueError, match="6 columns cannot be 2 of each of 2 ranks"):
        by_columns("w", (4, 6), 2, 0, 2)
    with pytest.raises(ValueError, match="has 9 rows, the vocabulary has 10 tokens"):
        of_vocabulary("w", (9, 2), 10, (0, 9))
    assert Piece("w", (0, 2), (1, 4)).shape == (2, 3)
