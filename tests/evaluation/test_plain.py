"""The error of a shared tensor without a residual is that of its outputs, computed the long way."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandhi_core.evaluation import plain
from sandhi_core.evaluation.plain import plain_squares
from sandhi_core.evaluation.uses import Use
from sandhi_core.rungs.grams import RIDGE, GramSum

seeds = st.integers(0, 2**16)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths(rows: Tensor) -> float:
    return float(rows.square().sum())


@given(seeds, st.sampled_from([0.0, 1.0]))
def test_a_norm_errs_as_its_scaled_inputs_do(seed: int, offset: float) -> None:
    own, shared, inputs = drawn(seed, 6), drawn(seed + 1, 6), drawn(seed + 2, 50, 6)
    z = inputs / inputs.square().mean(dim=1, keepdim=True).sqrt()
    (found,) = plain_squares(own, shared, Use(rows=z.square().mean(dim=0)), offset)
    wanted = lengths(z * (offset + own) - z * (offset + shared)) / lengths(z * (offset + own))
    assert float(found) == pytest.approx(wanted, rel=10 * RIDGE)


@given(seeds)
def test_embeddings_err_as_the_tokens_that_are_used(seed: int) -> None:
    own, shared = drawn(seed, 9, 4), drawn(seed + 1, 9, 4)
    tokens = torch.randint(0, 7, (200,), generator=torch.Generator().manual_seed(seed))  # the last two never occur
    frequency = torch.bincount(tokens, minlength=9) / 200
    (found,) = plain_squares(own, shared, Use(rows=frequency))
    wanted = lengths(own[tokens] - shared[tokens]) / lengths(own[tokens])
    assert float(found) == pytest.approx(wanted, rel=0.02)
    unseen = own.clone()
    unseen[8] += 1.0
    (little,) = plain_squares(own, unseen, Use(rows=frequency))
    assert 0 < float(little) < RIDGE


@given(seeds, st.sampled_from([1, 8, 2**24]))
def test_a_head_errs_as_its_outputs_and_a_tied_table_at_both_ends(seed: int, block: int) -> None:
    own, shared, inputs = drawn(seed, 9, 4), drawn(seed + 1, 9, 4), drawn(seed + 2, 50, 4)
    total = GramSum(4)
    total.add(inputs)
    gram, frequency = total.mean(), torch.full((9,), 1 / 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "_BLOCK", block)
        (found,) = plain_squares(own, shared, Use(gram=gram))
        both = plain_squares(own, shared, Use(rows=frequency, gram=gram))
    damped = gram.damped()
    assert float(found) == pytest.approx(damped.energy(own - shared) / damped.energy(own))
    flat = lengths(own - shared) / lengths(own)
    assert both.tolist() == pytest.approx(sorted([float(found), flat], reverse=True))


def test_a_bias_errs_as_a_part_of_what_it_is_added_to() -> None:
    own, shared = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert plain_squares(own, shared, Use(whole=torch.tensor([16.0]))).tolist() == [0.25]


@pytest.mark.parametrize("use", [Use(rows=torch.ones(3)), Use(rows=torch.zeros(3)), Use(whole=torch.tensor([0.0]))])
def test_what_is_equal_errs_nought_and_what_was_nought_errs_without_limit(use: Use) -> None:
    nought = torch.zeros(3)
    assert plain_squares(nought, nought, use).tolist() == [0.0]
    assert plain_squares(nought, torch.ones(3), use).tolist() == [math.inf]
