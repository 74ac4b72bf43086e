"""What load() makes of an export in memory: shared tensors read-only and once, private ones the model's own."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.safetensors_file import read_header
from sandhi_core.errors import ProofError
from sandhi_core.serving.census import unmapped_bytes
from sandhi_core.serving.load import load
from sandhi_core.serving.mapped import MappedModel
from tests.aliased import BARE, HEAD, NAMES, make_aliased
from tests.exported import EMBED, GATE, MODELS, NORM, RANKS, UP, Case, make_case, make_models, stock
from tests.measured import measure

TOKENS = torch.arange(40)[None] % 64
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Without residuals."""
    models = make_models(tmp_path_factory.mktemp("models"), request.param)
    return make_case(tmp_path_factory.mktemp("case"), models)


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def aliased(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_aliased(tmp_path_factory.mktemp("aliased"), request.param)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


def flags(tensor: torch.Tensor) -> str:
    """How the memory of a tensor is mapped, as /proc/self/maps has it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return mode
    raise AssertionError("not mapped at all")


@pytest.mark.parametrize("name", MODELS)
def test_stock_transformers_and_load_answer_alike_to_the_bit(case: Case, name: str) -> None:
    root, _ = case.exported()
    ours, theirs = load(root / name), stock(root / name)
    assert ours.dtype == theirs.dtype == next(iter(case.merged.values())).dtype
    assert torch.equal(logits(ours), logits(theirs))
    assert torch.equal(logits(ours), logits(case.swapped(name)))
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert {n: b.dtype for n, b in ours.named_buffers()} == {n: b.dtype for n, b in theirs.named_buffers()}
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.name_or_path == theirs.name_or_path and ours.config.to_dict() == theirs.config.to_dict()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_another_dtype_it_answers_as_stock_transformers_too(case: Case, dtype: torch.dtype) -> None:
    root, _ = case.exported()
    ours = load(root / "tied", dtype)
    theirs = AutoModelForCausalLM.from_pretrained(root / "tied", dtype=dtype, local_files_only=True).eval()
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("ranks", [{}, RANKS], ids=["plain", "residuals"])
@pytest.mark.parametrize("name", MODELS)
def test_exactly_what_is_shared_is_read_only(tmp_path: Path, ranks: dict[tuple[str, str], int], name: str) -> None:
    root, _ = make_case(tmp_path, make_models(tmp_path / "models", torch.bfloat16), ranks).exported()
    model = load(root / name)
    shared = MappedModel.open(root / name).shared()
    assert UP in shared and NORM not in shared
    assert {n for n, p in model.named_parameters() if flags(p) == "r--s"} == shared
    assert unmapped_bytes(model, root / name) == 0
    with torch.no_grad():
        model.get_parameter(NORM).fill_(2.0)  # its own: the file stays as it is
    assert not torch.equal(load(root / name).get_parameter(NORM), model.get_parameter(NORM))


def test_the_next_model_of_a_process_has_the_same_memory(case: Case) -> None:
    root, _ = case.exported()
    single, sharded, tied = (load(root / name) for name in ("single", "sharded", "tied"))
    assert len({model.get_parameter(UP).data_ptr() for model in (single, sharded, tied)}) == 1
    assert single.get_parameter(EMBED).data_ptr() == sharded.get_parameter(EMBED).data_ptr()
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight


WRITE = """
import sys, torch
from sandhi_core.serving.load import load
model = load(sys.argv[1], writable=sys.argv[2] == "writable")
print("loaded", flush=True)
with torch.no_grad():
    model.get_parameter(sys.argv[3])[0, 0] = 1.0
print("written")
"""


@pytest.mark.parametrize(
    ("how", "said", "status"), [("shared", ["loaded"], -signal.SIGSEGV), ("writable", ["loaded", "written"], 0)]
)
def test_writing_into_what_is_shared_ends_the_process(case: Case, how: str, said: list[str], status: int) -> None:
    root, manifest = case.exported()
    path = root / "single" / manifest.models["single"].tensors[GATE].file
    before = path.read_bytes()
    command = [sys.executable, "-c", WRITE, root / "single", how, GATE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.stdout.split(), run.returncode) == (said, status)
    assert path.read_bytes() == before


# --- aliases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_aliases_change_no_answer(aliased: Case, name: str) -> None:
    root, _ = aliased.exported()
    assert torch.equal(logits(load(root / name)), logits(stock(root / name)))


def test_equal_bytes_are_in_memory_once_whatever_they_are_called(aliased: Case) -> None:
    root, manifest = aliased.exported()
    bare, other, twice = (load(root / name) for name in NAMES)
    holders = [(twice, EMBED), (twice, HEAD), (other, EMBED), (bare, EMBED)]
    assert len({model.get_parameter(name).data_ptr() for model, name in holders}) == 1
    assert bare.get_parameter(UP).data_ptr() == twice.get_parameter(UP).data_ptr()
    assert BARE in manifest.models["bare"].tensors  # transformers gives it the prefix
    assert twice.get_input_embeddings().weight is not twice.get_output_embeddings().weight
    assert [unmapped_bytes(model, root / name) for model, name in zip((bare, other, twice), NAMES, strict=True)] == [
        0
    ] * 3


def test_memory_of_aliases_is_counted_where_it_is(aliased: Case) -> None:
    root, _ = aliased.exported()
    found = measure({name: root / name for name in NAMES})
    assert all(process.unmapped == 0 and process.private_dirty == 0 for process in found)
    distinct = {path.stat().st_ino: path.stat().st_size for path in root.glob("*/*.safetensors")}
    assert 0 < sum(process.pss for process in found) <= sum(distinct.values()) + 4096 * len(distinct)


# --- digests ------------------------------------------------------------------------------------------------


def test_digests_are_held_to_as_much_as_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, manifest = make_case(tmp_path, make_models(tmp_path / "models")).exported()
    tensors = manifest.models["single"].tensors
    asked: list[str] = []
    real = MappedModel._digest
    with monkeypatch.context() as patch:
        patch.setattr(MappedModel, "_digest", lambda self, name: asked.append(name) or real(self, name))
        MappedModel.open(root / "single").check("sampled")
    (sampled,) = asked
    other = next(name for name, tensor in tensors.items() if tensor.file != tensors[sampled].file)
    for name, finding in ((other, ["full"]), (sampled, ["full", "sampled"])):
        path = root / "single" / tensors[name].file
        sound = path.read_bytes()
        path.chmod(0o644)
        place = read_header(path)[name]
        path.write_bytes(sound[: place.end - 1] + bytes([sound[place.end - 1] ^ 1]) + sound[place.end :])
        for how in ("off", "sampled", "full"):
            if how in finding:
                with pytest.raises(
                    ProofError, match=f"model single file {path} tensor {name}: is not what was exported"
                ):
                    load(root / "single", digests=how)
            else:
                load(root / "single", digests=how)
        path.write_bytes(sound)


def test_a_directory_that_lies_alone_is_an_ordinary_checkpoint(case: Case, tmp_path: Path) -> None:
    root, _ = case.exported()
    (tmp_path / "single").mkdir()
    for path in (root / "single").iterdir():
        if path.is_file():
            (tmp_path / "single" / path.name).hardlink_to(path)
    alone = load(tmp_path / "single", digests="full")
    assert torch.equal(logits(alone), logits(load(root / "single")))
    assert flags(alone.get_parameter(UP)) == "rw-p"
    Checkpoint.open(tmp_path / "single", "single")
