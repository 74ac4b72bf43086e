import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core import moments
from sandhi_core.moments import row_statistics_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@given(st.integers(1, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_rows_are_those_of_a_plain_computation(height: int, width: int, dtype: torch.dtype, seed: int) -> None:
    block = (torch.randn(height, width, generator=torch.Generator().manual_seed(seed)) * 3 + 1).to(dtype)
    found = row_statistics_of(block)
    wide = block.double()
    assert found.mean.dtype == found.std.dtype == torch.float32
    torch.testing.assert_close(found.mean, wide.mean(1).float(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.std, wide.std(1, correction=0).float(), rtol=1e-6, atol=1e-7)


@given(st.integers(2, 30), st.integers(1, 400), st.integers(1, 29), st.integers(1, 100), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_a_row_does_not_depend_on_the_block_it_comes_in(
    height: int, width: int, cut: int, piece: int, seed: int
) -> None:
    matrix = torch.randn(height, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "_PIECE", piece)  # rows longer than a piece, too
        whole = row_statistics_of(matrix)
        parts = [row_statistics_of(part) for part in (matrix[:cut], matrix[cut:])]
        alone = [row_statistics_of(row[None]) for row in matrix]
    for pieces in (parts, alone):
        assert torch.equal(whole.mean, torch.cat([p.mean for p in pieces]))
        assert torch.equal(whole.std, torch.cat([p.std for p in pieces]))


@pytest.mark.parametrize("threads", [1, 2])
def test_long_rows_and_threads_change_nothing(threads: int) -> None:
    row = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = row_statistics_of(torch.cat([row, row * 2]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.mean[:1], row_statistics_of(row).mean)
    assert torch.equal(found.std[:1], row_statistics_of(row).std)
    assert found.mean[0] == np.float32(row.double().mean().item())
    assert found.std[0] == np.float32(row.double().std(correction=0).item())


def test_strides_do_not_matter() -> None:
    matrix = torch.randn(33, 70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_statistics_of(matrix.t()).std, row_statistics_of(matrix.t().contiguous()).std)


def test_a_constant_row_has_no_spread_at_all() -> None:
    values = torch.tensor([0.1, -3.7, 1e-30, 65504.0])
    found = row_statistics_of(values[:, None].expand(4, 1000).contiguous())
    assert torch.equal(found.mean, values)
    assert torch.equal(found.std, torch.zeros(4))


def test_large_means_do_not_eat_small_spreads() -> None:
    row = torch.tensor([[1e8, 1e8 + 8, 1e8 - 8, 1e8]], dtype=torch.float32)
    assert row_statistics_of(row).std[0] == np.float32(np.sqrt(32))


def test_an_input_is_left_as_it_was() -> None:
    matrix = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    row_statistics_of(matrix)
    assert torch.equal(matrix, before)
