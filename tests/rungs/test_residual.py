"""Low-rank residuals: the least error of the outputs for their rank, and what applies them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.rungs.allotment import PRICES, Bid, Candidate, distinct, nbytes
from sandhi_core.rungs.residual import DTYPE, Residual, Spectrum, attach, spectrum, weighting
from tests.rungs.test_grams import drawn, gram_of


def case(seed: int = 0, block: int = 4096) -> tuple[torch.Tensor, torch.Tensor, Spectrum]:
    own, shared = drawn(7, 6, seed=seed), drawn(7, 6, seed=seed + 1)
    inputs = drawn(40, 6, seed=seed + 2) * torch.tensor([5.0, 3.0, 1.0, 0.5, 0.2, 0.1])
    return own, shared, spectrum(own, shared, weighting(gram_of(inputs, block)))


@pytest.mark.parametrize("affine", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(affine: bool) -> None:
    own, shared, gram = drawn(300, 200, seed=1), drawn(300, 200, seed=2), gram_of(drawn(400, 200, seed=3), 4096)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(spectrum(own, shared, weighting(gram, affine)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for part in ("up", "down", "squares"):
            assert torch.equal(getattr(found[0], part), getattr(other, part))


@pytest.mark.parametrize("block", [4, 4096])
def test_full_rank_restores_the_models_own_matrix(block: int) -> None:
    own, shared, found = case(block=block)
    torch.testing.assert_close(found.up @ found.down, (own - shared).double())
    stored = found.truncated(6)
    assert (stored.rank, stored.nbytes) == (6, nbytes((7, 6), 6))
    restored = shared + stored.up.float() @ stored.down.float()
    torch.testing.assert_close(restored, own, atol=0.05, rtol=0.05)  # bfloat16 factors


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), rank=st.integers(0, 5), block=st.sampled_from([4, 4096]))
def test_truncation_leaves_the_error_that_the_spectrum_says_and_no_rank_leaves_less(
    seed: int, rank: int, block: int
) -> None:
    own, shared = drawn(7, 6, seed=seed), drawn(7, 6, seed=seed + 1)
    gram = gram_of(drawn(40, 6, seed=seed + 2) * (1.0 + torch.arange(6.0)), block)
    found, damped = spectrum(own, shared, weighting(gram)), gram.damped()
    left = (own - shared).double() - found.up[:, :rank] @ found.down[:rank]
    error = damped.energy(left)
    assert error == pytest.approx(float(found.squares[rank:].sum()) * damped.energy(own), rel=1e-6, abs=1e-9)
    other = (own - shared).double() - drawn(7, rank, seed=seed + 3).double() @ drawn(rank, 6, seed=seed + 4).double()
    plain_up, values, plain_down = torch.linalg.svd((own - shared).double(), full_matrices=False)
    plain = (own - shared).double() - (plain_up[:, :rank] * values[:rank]) @ plain_down[:rank]
    assert error <= damped.energy(plain) + 1e-9
    assert error <= damped.energy(other) + 1e-9


def test_equal_matrices_leave_no_error_and_a_matrix_of_nought_takes_none() -> None:
    own, on = drawn(7, 6), weighting(gram_of(drawn(40, 6, seed=1)))
    assert not spectrum(own, own.clone(), on).squares.any()
    assert not spectrum(torch.zeros(7, 6), torch.zeros(7, 6), on).squares.any()
    zero = spectrum(torch.zeros(7, 6), own, on)
    with_none, with_any = (Candidate(zero.squares.numpy(), (7, 6), 7 * 6 * 4.0, limit) for limit in (0, 6))
    assert distinct({"w": with_none}, PRICES) == []
    assert all(ranks == {"w": Bid(6)} for _, ranks in distinct({"w": with_any}, PRICES))


@pytest.mark.parametrize(("limit", "rank"), [(0, 0), (nbytes((7, 6), 2), 2), (nbytes((7, 6), 3) - 1, 2), (10**6, 6)])
def test_no_more_directions_are_kept_than_may_be_worth_it(limit: int, rank: int) -> None:
    _, _, found = case()
    kept = found.kept(limit)
    assert (kept["up"].shape, kept["down"].shape, len(kept["squares"])) == ((7, rank), (rank, 6), 6)
    assert torch.equal(kept["up"][:, :1], found.up[:, : min(rank, 1)].to(DTYPE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_answers_with_its_residual_until_that_is_removed(dtype: torch.dtype, bias: bool) -> None:
    layer = torch.nn.Linear(6, 7, bias=bias, dtype=dtype)
    inputs, residual = drawn(3, 6).to(dtype), Residual(drawn(7, 2, seed=1).to(DTYPE), drawn(2, 6, seed=2).to(DTYPE))
    plain = layer(inputs)
    handle = attach(layer, residual)
    expected = plain + (inputs @ residual.down.to(dtype).T) @ residual.up.to(dtype).T
    torch.testing.assert_close(layer(inputs), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.1)
    assert not torch.equal(layer(inputs), plain)
    handle.remove()
    assert torch.equal(layer(inputs), plain)
