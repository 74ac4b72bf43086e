from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandhi_core.errors import MergeError
from sandhi_core.merging import DTYPES, merge
from sandhi_core.records import Contributor, Recipe
from sandhi_core.scan import RowStatistics, row_statistics_of


def recipe(tensors: Sequence[Tensor], rescale: str = "none", dtype: str = "BF16") -> Recipe:
    return Recipe.model_validate(
        {
            "projection": "up",
            "shape": tuple(tensors[0].shape),
            "dtype": dtype,
            "method": "mean",
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


def test_a_mean_that_only_the_cast_makes_infinite_is_refused() -> None:
    tensors = random(2, (2, 4), "F16")
    wide = [RowStatistics(torch.zeros(2), torch.full((2,), 60_000.0)) for _ in tensors]
    with pytest.raises(MergeError, match="not finite"):
        merge(recipe(tensors, "common", "F16"), tensors, wide)
