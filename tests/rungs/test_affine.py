"""Scale and shift of rows: no others leave less error, and a layer answers with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from sandhi_core.rungs.allotment import nbytes
from sandhi_core.rungs.grams import Gram
from sandhi_core.rungs.residual import DTYPE, Residual, attach, cut, factors, spectrum, weighting
from tests.rungs.test_grams import drawn, gram_of

ROWS, WIDTH = 7, 6


def case(seed: int, block: int = 4096) -> tuple[torch.Tensor, torch.Tensor, Gram]:
    """Two matrices that are a little alike, and the moments of inputs that are not nought on average."""
    own = drawn(ROWS, WIDTH, seed=seed)
    shared = 0.5 * own + drawn(ROWS, WIDTH, seed=seed + 1)
    return own, shared, gram_of((drawn(40, WIDTH, seed=seed + 2) + 1.0) * (1.0 + torch.arange(WIDTH)), block)


def error(gram: Gram, own: torch.Tensor, given: torch.Tensor, shift: torch.Tensor) -> float:
    """Mean squared length of (own - given) x - shift under the damped moments. What damping adds to them has a mean of
    nought, and so have inputs about theirs."""
    damped, difference = gram.damped(), own.double() - given.double()
    scale = sum(float(block.diagonal().sum()) for block in gram.blocks) / gram.width
    return damped.centred().energy(difference) + float(
        (difference @ gram.centre.double() - shift).square().sum() / scale
    )


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    step=st.floats(0.03, 1.0),
    rank=st.integers(0, 3),
    block=st.sampled_from([4, 4096]),
)
def test_no_other_scale_and_shift_leave_less_error(seed: int, step: float, rank: int, block: int) -> None:
    own, shared, gram = case(seed, block)
    found = spectrum(own, shared, weighting(gram, affine=True)).truncated(rank)
    assert found.scale is not None and found.shift is not None
    added = linear(torch.eye(WIDTH), found.down.float()) @ found.up.float().T if rank else torch.zeros(WIDTH, ROWS)
    scale, shift = found.scale.double(), found.shift.double()
    best = error(gram, own, scale[:, None] * shared.double() + added.T, shift)
    moved = shift + step * drawn(ROWS, seed=seed + 4).double()
    rounding = 0.01  # of stored vectors, relative
    assert best <= error(gram, own, scale[:, None] * shared.double() + added.T, moved) * (1 + rounding) + 1e-6
    if rank == 0:  # beside a residual, which is fitted to it, it is the best of those without one
        other = scale + step * drawn(ROWS, seed=seed + 3).double()
        assert best <= error(gram, own, other[:, None] * shared.double(), moved) * (1 + rounding) + 1e-6
        plain = error(gram, own, shared, torch.zeros(ROWS, dtype=torch.float64))
        assert best <= plain * (1 + rounding) + 1e-6


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), rank=st.integers(0, 5))
def test_the_spectrum_says_what_error_is_left(seed: int, rank: int) -> None:
    own, shared, gram = case(seed)
    found, damped = spectrum(own, shared, weighting(gram, affine=True)), gram.damped()
    assert found.scale is not None and found.drift is not None
    given = found.scale.double()[:, None] * shared.double() + found.up[:, :rank] @ found.down[:rank]
    shift = (own.double() - given) @ gram.centre.double()
    left = error(gram, own, given, shift)
    assert left == pytest.approx(float(found.squares[rank:].sum()) * damped.energy(own), rel=1e-5, abs=1e-9)
    cutting = found.truncated(rank)
    assert cutting.shift is not None and cutting.nbytes == nbytes((ROWS, WIDTH), rank, affine=True)
    torch.testing.assert_close(cutting.shift.double(), shift, rtol=0.05, atol=0.1)


def test_rows_that_only_differ_in_scale_are_restored_exactly() -> None:
    shared = drawn(ROWS, WIDTH)
    scale = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 0.25, 4.0])
    own = scale[:, None] * shared
    _, _, gram = case(3)
    found = spectrum(own, shared, weighting(gram, affine=True))
    cutting = found.truncated(0)
    assert cutting.scale is not None and cutting.shift is not None and cutting.up is cutting.down is None
    assert torch.equal(cutting.scale.float(), scale)
    assert not found.squares.any() and not cutting.shift.any()


def test_inputs_that_never_vary_are_matched_by_the_shift_alone() -> None:
    own, shared, inputs = drawn(ROWS, WIDTH), drawn(ROWS, WIDTH, seed=1), drawn(1, WIDTH, seed=2)
    cutting = spectrum(own, shared, weighting(gram_of(inputs), affine=True)).truncated(0)
    assert cutting.scale is not None and cutting.shift is not None
    answered = cutting.scale.float() * linear(inputs, shared) + cutting.shift.float()
    torch.testing.assert_close(answered, linear(inputs, own), rtol=0.01, atol=0.02)


def test_a_row_of_noughts_is_not_scaled() -> None:
    own, shared, gram = case(5)
    shared[2] = 0.0
    own[4] = 0.0
    found = spectrum(own, shared, weighting(gram, affine=True))
    assert found.scale is not None and found.scale[2] == 1.0 and found.scale[4] == 0.0
    assert found.squares.isfinite().all()


def test_what_is_kept_is_cut_to_the_same_residuals() -> None:
    own, shared, gram = case(7)
    found = spectrum(own, shared, weighting(gram, affine=True))
    kept = found.kept(nbytes((ROWS, WIDTH), 4))
    assert len(kept["down"]) == 4
    for rank in range(5):
        one, other = cut(kept, rank).parts, found.truncated(rank).parts
        assert one.keys() == other.keys() == {"scale", "shift", *(("up", "down") if rank else ())}
        assert all(torch.equal(one[part], other[part]) for part in ("scale", *(("up", "down") if rank else ())))
        torch.testing.assert_close(one["shift"], other["shift"], rtol=0.01, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_layer_answers_with_its_vectors_until_they_are_removed(dtype: torch.dtype, bias: bool, rank: int) -> None:
    layer = torch.nn.Linear(WIDTH, ROWS, bias=bias, dtype=dtype)
    up, down = drawn(ROWS, rank, seed=1).to(DTYPE), drawn(rank, WIDTH, seed=2).to(DTYPE)
    scale, shift = drawn(ROWS, seed=3).to(DTYPE), drawn(ROWS, seed=4).to(DTYPE)
    residual = Residual(up, down, scale, shift) if rank else Residual(scale=scale, shift=shift)
    inputs = drawn(2, 3, WIDTH).to(dtype)
    plain, exact = layer(inputs), inputs.double()
    handle = attach(layer, residual)
    expected = scale.double() * (exact @ layer.weight.double().T) + shift.double()
    expected += exact @ down.double().T @ up.double().T
    expected += layer.bias.double() if bias else 0.0
    answered = layer(inputs)
    assert answered.dtype == dtype and len(factors(layer)) == len(residual.parts)
    torch.testing.assert_close(answered.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.1)
    assert not layer.state_dict().keys() - {"weight", "bias"}
    handle.remove()
    assert torch.equal(layer(inputs), plain) and not factors(layer)
