"""Numbers that break arithmetic: what is not finite fails with the tensor's name, and nothing else changes a byte."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sandhi_core.checkpoints.checkpoint import Checkpoint, tensor_digest
from sandhi_core.checkpoints.safetensors_file import raw_bytes
from sandhi_core.checkpoints.scan import fingerprint, row_statistics, row_statistics_of
from sandhi_core.errors import CheckpointError, EvaluationError, MergeError
from sandhi_core.evaluation.evaluator import Evaluator
from sandhi_core.evaluation.inputs import Inputs
from sandhi_core.evaluation.scorelog import ScoreLog
from sandhi_core.merging import DTYPES, merge
from sandhi_core.pools.pool import EvaluationSettings, ModelEntry, TaskBudget
from sandhi_core.profile import components, noise_weights
from sandhi_core.records import Contributor, Recipe
from tests.evaluation.local_tasks import choice_task
from tests.models import edit_tensors, tiny_llama

GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
LARGEST = {name: torch.finfo(dtype).max for name, dtype in DTYPES.items()}
SMALLEST = {name: torch.finfo(dtype).smallest_normal * 2.0**-4 for name, dtype in DTYPES.items()}  # a denormal


def recipe(count: int, dtype: str, shape: tuple[int, int], rescale: str) -> Recipe:
    contributors = tuple(Contributor(model=f"m{i}", layer=0, tensor=GATE, digest=f"{i}") for i in range(count))
    return Recipe(
        projection="gate", method="mean", rescale=rescale, dtype=dtype, shape=shape, contributors=contributors
    )


def merged(tensors: list[Tensor], dtype: str, rescale: str, block_bytes: int = 2**20) -> Tensor:
    rows = [row_statistics_of(t) for t in tensors] if rescale == "common" else None
    shape = (tensors[0].shape[0], tensors[0].shape[1])
    return merge(recipe(len(tensors), dtype, shape, rescale), tensors, rows, block_bytes=block_bytes)


def rows_of_kinds(dtype: str, seed: int) -> Tensor:
    """A row of each kind: nought, -0, constant, denormal, huge, one outlier, and plain."""
    drawn = torch.Generator().manual_seed(seed)
    noise = torch.randn(7, 24, generator=drawn, dtype=torch.float64)
    scale = torch.tensor([0.0, -0.0, 0.0, SMALLEST[dtype], LARGEST[dtype] / 64, 1.0, 1.0], dtype=torch.float64)
    made = noise * scale[:, None]
    made[1] = -0.0
    made[2] = 0.37
    made[5, 3] = LARGEST[dtype] / 64
    return made.to(DTYPES[dtype])


# --- merging ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rescale", ["none", "common"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rows_of_every_kind_are_merged_to_numbers(dtype: str, rescale: str) -> None:
    tensors = [rows_of_kinds(dtype, seed) for seed in range(3)]
    found = merged(tensors, dtype, rescale)
    assert found.isfinite().all()
    assert not found[0].any() and not found[1].any()
    assert torch.equal(found[2], tensors[0][2])  # constant, and the same in all
    wide = max(t.double().abs().max().item() for t in tensors) * (math.sqrt(24) if rescale == "common" else 1)
    assert found.double().abs().max() <= wide


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["BF16", "F16", "F32"]),
    st.sampled_from(["none", "common"]),
    st.lists(st.integers(0, 2**31), min_size=1, max_size=4),
    st.integers(1, 2**12),
    st.sampled_from([1, 2, 5]),
)
def test_no_chunk_and_no_thread_changes_a_byte_of_any_kind_of_row(
    dtype: str, rescale: str, seeds: list[int], block_bytes: int, threads: int
) -> None:
    tensors = [rows_of_kinds(dtype, seed) for seed in seeds]
    usual, whole = torch.get_num_threads(), raw_bytes(merged(tensors, dtype, rescale))
    torch.set_num_threads(threads)
    try:
        assert raw_bytes(merged(tensors, dtype, rescale, block_bytes)) == whole
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_row_that_hardly_varies_is_not_blown_up(dtype: str) -> None:
    """What cancels but for a denormal has no direction that its contributors' spread could be given to."""
    one = torch.tensor([[0.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.5]], dtype=torch.float64)
    other = -one
    one[0, 0] = other[0, 0] = SMALLEST[dtype]
    found = merged([one.to(DTYPES[dtype]), other.to(DTYPES[dtype])], dtype, "common")
    assert found.isfinite().all() and found.double().abs().max() <= 8.0


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("rescale", ["none", "common"])
def test_an_average_beyond_the_dtype_names_model_and_tensor(dtype: str, rescale: str) -> None:
    """fp32 adds up before it divides; a rescaled row may reach further than its contributors."""
    one = [[LARGEST[dtype], -LARGEST[dtype], LARGEST[dtype], -LARGEST[dtype]]]
    other = [[LARGEST[dtype], 0.0, 0.0, 0.0]]
    tensors = [torch.tensor(t, dtype=torch.float64).to(DTYPES[dtype]) for t in (one, other)]
    if (dtype, rescale) == ("F16", "none"):
        assert merged(tensors, dtype, rescale).isfinite().all()  # fp32 has room for the sum
        return
    with pytest.raises(MergeError, match="not finite") as refused:
        merged(tensors, dtype, rescale)
    assert (refused.value.problem.model, refused.value.problem.tensor) == ("m0", GATE)


# --- checkpoints --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_any_dtype_and_place(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    for name in (GATE, NORM):
        directory = tiny_llama(tmp_path / name, dtype=dtype)
        edit_tensors(directory, lambda tensors, name=name: tensors[name].view(-1)[-1:].fill_(value))
        with pytest.raises(CheckpointError) as refused:
            fingerprint(Checkpoint.open(directory, "m"), tmp_path / "scans")
        assert (refused.value.problem.code, refused.value.problem.tensor) == ("not-finite", name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_statistics_of_huge_and_denormal_weights_are_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 16

    def edit(tensors: dict[str, Tensor]) -> None:
        gate = tensors[GATE]
        gate[0] = largest
        gate[1] = -largest
        gate[2] = smallest
        gate[3, ::2], gate[3, 1::2] = largest, -largest

    directory = tiny_llama(tmp_path / "m", dtype=dtype)
    edit_tensors(directory, edit)
    checkpoint = Checkpoint.open(directory, "m")
    try:
        record = fingerprint(checkpoint, tmp_path / "scans")
    except CheckpointError as error:
        assert dtype == torch.float64 and error.problem.tensor == GATE  # beyond what statistics are kept in
        return
    info = record.tensor(GATE)
    assert math.isfinite(info.mean) and math.isfinite(info.std)
    assert info.digest == tensor_digest(info.dtype, info.shape, checkpoint.raw(GATE))
    rows = row_statistics(tmp_path / "scans", record, GATE)
    assert rows.mean.isfinite().all() and rows.std.isfinite().all()
    assert info.constant_rows == 3


def test_mixed_dtypes_never_meet_in_a_group(tmp_path: Path) -> None:
    """A slot's key has its dtype: float32 norms beside bf16 matrices are usual, and a matrix of another dtype is a
    slot of its own kind."""
    directory = tiny_llama(tmp_path / "m", dtype=torch.bfloat16)
    edit_tensors(directory, lambda tensors: tensors.update({GATE: tensors[GATE].float(), NORM: tensors[NORM].float()}))
    record = fingerprint(Checkpoint.open(directory, "m"), tmp_path / "scans")
    keys = {s.tensor: s.key for s in record.slots}
    assert keys[GATE] != keys[GATE.replace("layers.1", "layers.0")]
    assert keys[GATE.replace("gate", "down")] == keys[GATE.replace("gate", "down").replace("layers.1", "layers.0")]


# --- noise and moments --------------------------------------------------------------------------------------


def test_noise_beyond_the_dtype_names_the_tensor(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path / "m", dtype=torch.float16)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[GATE] = torch.where(tensors[GATE] > 0, 65504.0, -65504.0).half()

    edit_tensors(directory, edit)
    checkpoint = Checkpoint.open(directory, "m")
    record = fingerprint(checkpoint, tmp_path / "scans")
    weights = noise_weights(record, checkpoint, 1234, components(record)["mlp", 1])
    with pytest.raises(EvaluationError) as refused:
        weights.read(GATE)
    assert (refused.value.problem.model, refused.value.problem.tensor) == ("m", GATE)
    assert weights.read(GATE.replace("gate", "up")).isfinite().all()


def evaluator(folder: Path, directory: Path, threads: int = 1) -> tuple[Evaluator, Inputs]:
    choice_task(folder / "tasks")
    given = EvaluationSettings(include_path=str(folder / "tasks"), device="cpu", dtype="float32", threads=threads)
    entry = ModelEntry(name="m", path=str(directory), tasks=(TaskBudget(task="letters", metric="acc", budget=0.1),))
    found = fingerprint(Checkpoint.open(directory, "m"), folder / "scans")
    made = Evaluator(directory, found, entry, given, ScoreLog(folder / "log"), folder / "cache")
    return made, Inputs(folder / "inputs", found, made)


def test_inputs_too_large_to_be_squared_name_the_tensor(tmp_path: Path) -> None:
    """The answers are numbers still: the norm after it takes the size away."""
    directory = tiny_llama(tmp_path / "m", dtype=torch.float32)
    edit_tensors(directory, lambda tensors: tensors[NORM].fill_(1e25))
    _, inputs = evaluator(tmp_path, directory)
    with pytest.raises(EvaluationError) as refused:
        inputs.gram("model.layers.0.self_attn.q_proj.weight")
    assert refused.value.problem.model == "m"
    assert refused.value.problem.tensor or "NaN" in refused.value.problem.message
    assert not list((tmp_path / "inputs").rglob("*q_proj*"))


def test_no_number_of_threads_changes_what_is_known_of_inputs(tmp_path: Path) -> None:
    """Wide enough that several threads would split sums (they do in the answers themselves)."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    directory = tiny_llama(tmp_path / "m", dtype=torch.float32, **wide)
    usual, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            _, inputs = evaluator(tmp_path / str(threads), directory, threads)
            inputs.ready(importance=True)
            inputs.uses.of("model.norm.weight")
            assert torch.get_num_threads() == threads
            kept = sorted((tmp_path / str(threads) / "inputs").rglob("*.safetensors"))
            found.append({path.name: path.read_bytes() for path in kept})
    finally:
        torch.set_num_threads(usual)
    assert len(found[0]) > 8
    assert found[0] == found[1] == found[2]
