from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandhi_core.checkpoints.scan import RowStatistics, row_statistics_of
from sandhi_core.errors import MergeError
from sandhi_core.merging import DTYPES, merge, squared_distance
from sandhi_core.records import Contributor, Recipe
from sandhi_core.rungs.grams import Gram, GramSum, regmean


def recipe(tensors: Sequence[Tensor], rescale: str = "none", dtype: str = "BF16", method: str = "mean") -> Recipe:
    return Recipe.model_validate(
        {
            "projection": "up",
            "shape": tuple(tensors[0].shape),
            "dtype": dtype,
            "method": method,
            "rescale": rescale,
            "contributors": [
                Contributor(model=f"m{i}", layer=0, tensor="up.weight", digest=str(i)) for i, _ in enumerate(tensors)
            ],
        }
    )


def random(count: int, shape: tuple[int, int] = (37, 50), dtype: str = "BF16") -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [(torch.randn(shape, generator=generator) * 0.02).to(DTYPES[dtype]) for _ in range(count)]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def rows_of(tensors: Sequence[Tensor]) -> list[RowStatistics]:
    return [row_statistics_of(t) for t in tensors]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_mean_is_added_up_in_fp32_in_order_divided_once_and_cast_once(dtype: str, count: int) -> None:
    tensors = random(count, dtype=dtype)
    total = np.zeros((37, 50), np.float32)
    for tensor in tensors:
        total = total + tensor.float().numpy()
    expected = torch.from_numpy(total / np.float32(count)).to(DTYPES[dtype])
    assert raw(merge(recipe(tensors, dtype=dtype), tensors, None)) == raw(expected)


def test_the_originals_are_not_touched() -> None:
    for dtype in ("F32", "BF16"):
        tensors = random(3, dtype=dtype)
        before = [raw(t) for t in tensors]
        merge(recipe(tensors, "common", dtype), tensors, rows_of(tensors))
        assert [raw(t) for t in tensors] == before


def test_one_mean_in_fp32_keeps_what_steps_in_bf16_lose() -> None:
    tensors = random(8, (64, 64))
    exact = torch.stack([t.double() for t in tensors]).mean(0)
    stepwise = tensors[0]
    for i, tensor in enumerate(tensors[1:], start=2):
        stepwise = stepwise + (tensor - stepwise) / i
    ours = merge(recipe(tensors), tensors, None)
    assert (ours - exact).square().mean() < (stepwise - exact).square().mean() / 2


def test_common_rescale_gives_every_row_the_contributors_mean_statistics() -> None:
    tensors = random(4, (16, 400), "F32")
    found = row_statistics_of(merge(recipe(tensors, "common", "F32"), tensors, rows_of(tensors)))
    rows = rows_of(tensors)
    assert torch.allclose(found.mean, torch.stack([r.mean for r in rows]).mean(0), atol=1e-7)
    assert torch.allclose(found.std, torch.stack([r.std for r in rows]).mean(0), rtol=1e-5)
    plain = row_statistics_of(merge(recipe(tensors, dtype="F32"), tensors, None))
    assert (plain.std < 0.6 * found.std).all()


def test_a_constant_row_gets_its_mean_and_no_noise() -> None:
    tensors = random(2, (3, 8), "F32")
    for tensor, value in zip(tensors, (1.0, 3.0), strict=True):
        tensor[1] = value
    merged = merge(recipe(tensors, "common", "F32"), tensors, rows_of(tensors))
    assert torch.equal(merged[1], torch.full((8,), 2.0))
    # Rows that cancel out have no direction to stretch: their mean is all that is left.
    opposite = [tensors[0], -tensors[0]]
    cancelled = merge(recipe(opposite, "common", "F32"), opposite, rows_of(opposite))
    assert torch.equal(cancelled, torch.zeros_like(cancelled))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 300),
    st.sampled_from(["F32", "BF16", "F16"]),
    st.sampled_from(["none", "common"]),
    st.integers(1, 40_000),
)
def test_bytes_do_not_depend_on_the_block_size(
    count: int, height: int, width: int, dtype: str, rescale: str, block_bytes: int
) -> None:
    tensors = random(count, (height, width), dtype)
    made, rows = recipe(tensors, rescale, dtype), rows_of(tensors) if rescale == "common" else None
    whole = merge(made, tensors, rows, block_bytes=2**30)
    assert raw(merge(made, tensors, rows, block_bytes=block_bytes)) == raw(whole)


@pytest.mark.parametrize("shape", [(3, 70_001), (500, 300), (1, 200_000)])
def test_bytes_do_not_depend_on_the_number_of_threads(shape: tuple[int, int]) -> None:
    tensors = random(3, shape, "F32")
    made = recipe(tensors, "common", "F32")
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(raw(merge(made, tensors, rows_of(tensors))))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@given(st.permutations(range(4)))
def test_order_is_the_recipes_not_the_askers(order: list[int]) -> None:
    # The recipe sorts its contributors, so that whoever applies it adds them up alike.
    tensors = random(4)
    made = recipe(tensors)
    shuffled = [(made.contributors[i], tensors[i]) for i in order]
    again = sorted(shuffled, key=lambda pair: (pair[0].model, pair[0].layer))
    same = made.model_copy(update={"contributors": tuple(c for c, _ in again)})
    assert same.digest == made.digest
    assert raw(merge(same, [t for _, t in again], None)) == raw(merge(made, tensors, None))


def test_row_statistics_go_with_common_rescale_only() -> None:
    tensors = random(2)
    for made, rows in ((recipe(tensors, "common"), None), (recipe(tensors), rows_of(tensors))):
        with pytest.raises(ValueError, match="rescale: common"):
            merge(made, tensors, rows)


def test_a_slice_of_a_mapped_file_merges_like_a_copy() -> None:
    tensors = random(2, (8, 8))
    views = [torch.cat([t, t])[8:] for t in tensors]
    assert raw(merge(recipe(tensors), views, None)) == raw(merge(recipe(tensors), tensors, None))


@pytest.mark.parametrize("other", [torch.zeros(37, 51, dtype=torch.bfloat16), torch.zeros(37, 50)])
def test_a_contributor_that_is_not_as_recorded_is_named(other: Tensor) -> None:
    tensors = random(2)
    with pytest.raises(MergeError) as caught:
        merge(recipe(tensors), [tensors[0], other], None)
    assert caught.value.problem.model == "m1" and caught.value.problem.tensor == "up.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    tensors = random(2)
    tensors[1][36, 49] = bad
    with pytest.raises(MergeError, match="not finite"):
        merge(recipe(tensors), tensors, None)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 90)),
    st.sampled_from(["F64", "F32", "BF16", "F16"]),
    st.lists(st.tuples(st.integers(0, 809), st.sampled_from([float("nan"), float("inf"), -float("inf")])), max_size=2),
)
def test_one_number_that_is_not_finite_is_found_wherever_it_is(
    shape: tuple[int, int], dtype: str, bad: list[tuple[int, float]]
) -> None:
    (tensor,) = random(1, shape, dtype)
    tensor.view(-1)[0] = torch.finfo(torch.float32 if dtype == "F64" else DTYPES[dtype]).max  # finite, and stays so
    for at, value in bad:
        tensor.view(-1)[at % tensor.numel()] = value
    if tensor.isfinite().all():
        assert merge(recipe([tensor], dtype=dtype), [tensor], None).isfinite().all()
    else:
        with pytest.raises(MergeError, match="not finite"):
            merge(recipe([tensor], dtype=dtype), [tensor], None, block_bytes=300)


def test_a_mean_that_only_the_cast_makes_infinite_is_refused() -> None:
    tensors = random(2, (2, 4), "F16")
    wide = [RowStatistics(torch.zeros(2), torch.full((2,), 60_000.0)) for _ in tensors]
    with pytest.raises(MergeError, match="not finite"):
        merge(recipe(tensors, "common", "F16"), tensors, wide)


# --- other methods ------------------------------------------------------------------------------------------


def grams(count: int, width: int = 50, block: int = 4096) -> list[Gram]:
    sums = [GramSum(width, block) for _ in range(count)]
    for n, found in enumerate(sums):
        found.add(torch.randn(200, width, generator=torch.Generator().manual_seed(n)) * (n + 1.0))
    return [found.mean() for found in sums]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("block", [4096, 16])
def test_regmean_is_computed_in_float64_and_cast_once(dtype: str, block: int) -> None:
    tensors, moments = random(3, dtype=dtype), grams(3, block=block)
    found = merge(recipe(tensors, dtype=dtype, method="regmean"), tensors, None, moments)
    torch.testing.assert_close(found, regmean(tensors, moments).to(DTYPES[dtype]), rtol=1e-6, atol=1e-9)
    same = merge(recipe(tensors, dtype=dtype, method="regmean"), tensors, None, [moments[0]] * 3)
    torch.testing.assert_close(same, merge(recipe(tensors, dtype=dtype), tensors, None), rtol=1e-2, atol=1e-3)
    assert raw(found) != raw(same)


@pytest.mark.parametrize("shape", [(500, 300), (64, 700)])
def test_bytes_of_regmean_do_not_depend_on_the_number_of_threads(shape: tuple[int, int]) -> None:
    tensors, moments = random(3, shape, "F32"), grams(3, shape[1])
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(raw(merge(recipe(tensors, dtype="F32", method="regmean"), tensors, None, moments)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@given(st.permutations(range(4)))
def test_order_is_the_recipes_for_regmean_too(order: list[int]) -> None:
    tensors, moments = random(4, (6, 8)), grams(4, 8)
    made = recipe(tensors, method="regmean")
    again = sorted(((made.contributors[i], tensors[i], moments[i]) for i in order), key=lambda found: found[0].model)
    expected = merge(made, tensors, None, moments)
    assert raw(merge(made, [t for _, t, _ in again], None, [g for _, _, g in again])) == raw(expected)


@pytest.mark.parametrize("method", ["member", "base"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_what_is_taken_as_it_is_keeps_its_bytes(method: str, dtype: str) -> None:
    (own,) = random(1, dtype=dtype)
    own[0, 0] = -0.0
    made = recipe([own], dtype=dtype, method=method)
    assert raw(merge(made, [own], None)) == raw(own)
    assert made.taken == made.contributors[0].digest and recipe([own]).taken is None


def test_moments_go_with_regmean_only() -> None:
    tensors = random(2)
    for made, given_moments in ((recipe(tensors, method="regmean"), None), (recipe(tensors), grams(2))):
        with pytest.raises(ValueError, match="regmean"):
            merge(made, tensors, None, given_moments)


@pytest.mark.parametrize("method", ["regmean", "member", "base"])
def test_no_method_takes_what_is_not_as_recorded_or_not_finite(method: str) -> None:
    other, moments = torch.zeros(37, 51, dtype=torch.bfloat16), grams(1) if method == "regmean" else None
    with pytest.raises(MergeError, match="was formed for"):
        merge(recipe(random(1), method=method), [other], None, moments)
    if moments is not None:
        tensors = random(1)
        tensors[0][3, 3] = float("inf")
        with pytest.raises(MergeError, match="not finite"):
            merge(recipe(tensors, method=method), tensors, None, moments)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 500))
def test_distances_are_symmetric_to_the_last_bit_whatever_the_blocks(height: int, width: int, block: int) -> None:
    one, other = random(2, (height, width))
    found = squared_distance(one, other)
    assert found == squared_distance(other, one) == squared_distance(one, other, block_bytes=block)
    assert found == pytest.approx(float((one.double() - other.double()).square().sum())) and found > 0
    assert squared_distance(one, one) == 0.0
