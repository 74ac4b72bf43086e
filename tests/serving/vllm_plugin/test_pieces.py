"""What ranks hold of a matrix: together they answer as one, whatever is fused, repeated or added."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from sandhi_core.rungs.residual import Residual, added, moved
from sandhi_core.serving.slices import WHOLE, Slice
from sandhi_core.serving.vllm_plugin.pieces import Piece, pieces, stored_names

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
        (piece,) = pieces("w", weight.shape, Slice(0, ((rank * rows, (rank + 1) * rows),)))
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
        held = Slice(1, ((rank * columns, (rank + 1) * columns),), first=rank == 0)
        (piece,) = pieces("w", weight.shape, held)
        total += whole(piece.of_residual(residual), piece.of(weight), x[:, slice(*piece.columns)])
    assert torch.equal(total, whole(residual, weight, x))


@given(ranks=rank_counts, first=sizes, second=sizes)
def test_matrices_that_are_stored_as_one_are_cut_apart(ranks: int, first: int, second: int) -> None:
    """Over all ranks and both, every row of the stored matrix occurs once; a rank's rows are one after another in what
    an owner holds for it."""
    stored = torch.arange((first + second) * ranks).double()[:, None]
    seen = []
    for rank in range(ranks):
        start = first * ranks
        ranges = ((rank * first, (rank + 1) * first), (start + rank * second, start + (rank + 1) * second))
        found = pieces("qkv", stored.shape, Slice(0, ranges))
        held = Slice(0, ranges).of(stored)
        assert all(torch.equal(piece.of_slice(held), piece.of(stored)) for piece in found)
        seen += [piece.of(stored) for piece in found]
    assert sorted(torch.cat(seen).flatten().tolist()) == list(range(len(stored)))


def test_what_is_whole_is_one_piece() -> None:
    assert pieces("w", (4, 6), WHOLE) == (Piece("w", (0, 4), (0, 6)),)
    assert Piece("w", (0, 2), (1, 4)).shape == (2, 3)
