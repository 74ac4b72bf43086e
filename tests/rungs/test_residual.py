"""Low-rank residuals: the least error of the outputs for their rank, and what they cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.rungs.residual import Spectrum, nbytes, spectrum
from tests.rungs.test_grams import drawn, gram_of


def case(seed: int = 0, block: int = 4096) -> tuple[torch.Tensor, torch.Tensor, Spectrum]:
    own, shared = drawn(7, 6, seed=seed), drawn(7, 6, seed=seed + 1)
    inputs = drawn(40, 6, seed=seed + 2) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.2, 0.1])
    return own, shared, spectrum(own, shared, gram_of(inputs, block))


@pytest.mark.parametrize("block", [4, 4096])
def test_full_rank_restores_the_models_own_matrix(block: int) -> None:
    own, shared, found = case(block=block)
    torch.testing.assert_close(found.up @ found.down, (own - shared).double())
    stored = found.truncated(6)
    assert (stored.rank, stored.nbytes) == (6, nbytes((7, 6), 6))
    torch.testing.assert_close(stored.added(shared), own, atol=0.05, rtol=0.05)  # bfloat16 factors


def test_rank_nought_is_the_shared_tensor_alone() -> None:
    _, shared, found = case()
    stored = found.truncated(0)
    assert (stored.rank, stored.nbytes) == (0, 0)
    assert torch.equal(stored.added(shared), shared)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), rank=st.integers(0, 5), block=st.sampled_from([4, 4096]))
def test_truncation_leaves_the_error_that_the_spectrum_says_and_no_rank_leaves_less(
    seed: int, rank: int, block: int
) -> None:
    own, shared = drawn(7, 6, seed=seed), drawn(7, 6, seed=seed + 1)
    gram = gram_of(drawn(40, 6, seed=seed + 2) * (1.0 + torch.arange(6.0)), block)
    found, damped = spectrum(own, shared, gram), gram.damped()
    left = (own - shared).double() - found.up[:, :rank] @ found.down[:rank]
    error = damped.energy(left)
    assert error == pytest.approx(float(found.squares[rank:].sum()), rel=1e-6, abs=1e-9)
    other = (own - shared).double() - drawn(7, rank, seed=seed + 3).double() @ drawn(rank, 6, seed=seed + 4).double()
    plain_up, values, plain_down = torch.linalg.svd((own - shared).double(), full_matrices=False)
    plain = (own - shared).double() - (plain_up[:, :rank] * values[:rank]) @ plain_down[:rank]
    assert error <= damped.energy(plain) + 1e-9
    assert error <= damped.energy(other) + 1e-9


@given(error=st.floats(0.0, 2.0))
def test_the_rank_for_an_error_is_the_smallest_that_keeps_it(error: float) -> None:
    _, _, found = case()
    rank = found.rank(error)
    assert float(found.squares[rank:].sum()) <= error * found.whole
    assert rank == 0 or float(found.squares[rank - 1 :].sum()) > error * found.whole


def test_equal_matrices_need_no_residual() -> None:
    own = drawn(7, 6)
    found = spectrum(own, own.clone(), gram_of(drawn(40, 6, seed=1)))
    assert found.rank(0.0) == 0 and found.gain(0) == 0.0 and found.gain(99) == 0.0


def test_a_residual_is_stored_in_two_bytes_an_element() -> None:
    assert nbytes((100, 50), 3) == 3 * 150 * 2
