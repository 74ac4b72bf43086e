"""Gram matrices of inputs, and the shared tensor that is nearest to every model on its own inputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sandhi_core.rungs.grams import Gram, GramSum, regmean


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gram_of(inputs: torch.Tensor, block: int = 4096) -> Gram:
    found = GramSum(inputs.shape[-1], block)
    found.add(inputs)
    return found.mean()


def test_a_sum_is_the_mean_of_outer_products_however_inputs_come() -> None:
    inputs = drawn(30, 6)
    whole = gram_of(inputs)
    parts = GramSum(6)
    parts.add(inputs[:12].reshape(3, 4, 6))
    parts.add(inputs[12:])
    assert parts.tokens == 30
    torch.testing.assert_close(whole.blocks[0], inputs.T @ inputs / 30)
    torch.testing.assert_close(parts.mean().blocks[0], whole.blocks[0])
    with pytest.raises(ValueError, match="no input"):
        GramSum(6).mean()


def test_wide_inputs_have_blocks_along_the_diagonal() -> None:
    inputs = drawn(50, 10)
    found = gram_of(inputs, block=4)
    assert [(s.start, s.stop) for s in found.spans] == [(0, 4), (4, 8), (8, 10)] and found.width == 10
    whole = gram_of(inputs).blocks[0]
    for span, block in zip(found.spans, found.blocks, strict=True):
        torch.testing.assert_close(block, whole[span, span])


def test_energy_is_the_mean_squared_length_of_outputs() -> None:
    inputs, matrix = drawn(200, 8), drawn(5, 8, seed=1)
    assert gram_of(inputs).energy(matrix) == pytest.approx(float((inputs @ matrix.T).square().sum(1).mean()), rel=1e-5)


def test_damped_does_not_depend_on_scale_and_is_definite() -> None:
    inputs = drawn(3, 8)  # fewer than columns: singular
    one, large = gram_of(inputs).damped(), gram_of(1000.0 * inputs).damped()
    torch.testing.assert_close(one.blocks[0], large.blocks[0], rtol=1e-5, atol=1e-8)
    assert float(torch.linalg.eigvalsh(one.blocks[0]).min()) > 0
    assert float(torch.linalg.eigvalsh(gram_of(torch.zeros(4, 8)).damped().blocks[0]).min()) > 0


@pytest.mark.parametrize("block", [3, 4096])
def test_centred_is_the_covariance_damped_by_as_much(block: int) -> None:
    inputs = drawn(200, 8) + torch.arange(8.0)
    found = gram_of(inputs, block)
    torch.testing.assert_close(found.centre, inputs.mean(0))
    damped = found.damped()
    scale = float(inputs.square().mean())
    torch.testing.assert_close(damped.centre, inputs.mean(0).double() / scale**0.5, rtol=1e-6, atol=1e-9)
    covariance = torch.cov(inputs.double().T, correction=0) / scale
    moments = inputs.double().T @ inputs.double() / len(inputs) / scale
    for span, block_, whole in zip(damped.spans, damped.centred().blocks, damped.blocks, strict=True):
        added = whole - 0.9 * moments[span, span]
        torch.testing.assert_close(block_, 0.9 * covariance[span, span] + added, rtol=1e-4, atol=1e-6)


def test_centred_is_definite_where_inputs_do_not_vary() -> None:
    for inputs in (torch.ones(5, 8), 1000.0 * drawn(1, 8), torch.zeros(4, 8)):
        assert float(torch.linalg.eigvalsh(gram_of(inputs).damped().centred().blocks[0]).min()) > 0


def test_regmean_of_one_model_is_its_own_matrix() -> None:
    matrix = drawn(5, 8)
    torch.testing.assert_close(regmean([matrix], [gram_of(drawn(40, 8, seed=1))]), matrix.double())


def test_regmean_of_equal_inputs_is_the_mean() -> None:
    matrices = [drawn(5, 8, seed=n) for n in range(3)]
    gram = gram_of(drawn(40, 8, seed=9))
    torch.testing.assert_close(regmean(matrices, [gram] * 3), sum(m.double() for m in matrices) / 3)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), block=st.sampled_from([3, 4096]), step=st.floats(0.01, 0.5))
def test_no_step_from_regmean_brings_the_outputs_nearer(seed: int, block: int, step: float) -> None:
    """The damped objective sum_i E |W x - W_i x|^2 has its least value there."""
    matrices = [drawn(4, 6, seed=seed + n) for n in range(3)]
    grams = [gram_of(drawn(20, 6, seed=seed + 10 + n) * (n + 1), block) for n in range(3)]
    damped = [gram.damped() for gram in grams]
    found = regmean(matrices, grams)

    def loss(matrix: torch.Tensor) -> float:
        return sum(gram.energy(matrix - own.double()) for gram, own in zip(damped, matrices, strict=True))

    best = loss(found)
    assert best <= loss(sum(m.double() for m in matrices) / 3) + 1e-9
    assert best < loss(found + step * drawn(4, 6, seed=seed + 99).double())


def test_inputs_in_one_direction_give_that_model_the_say_there() -> None:
    """What RegMean is for: every model keeps its weights where only it has inputs."""
    first, second = torch.zeros(1, 2), torch.ones(1, 2)
    along = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    found = regmean([first, second], [gram_of(x) for x in along])
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0]], dtype=torch.float64), atol=1e-3, rtol=0)
