"""Tensors as layers ask for them: views of the files or of what an owner holds, and no others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandhi_core.errors import CheckpointError, PreflightError
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import Slices, matrices
from sandhi_core.serving.vllm_plugin.pieces import Piece, pieces
from sandhi_core.serving.vllm_plugin.provider import Files, OwnerMemory, Source, external_bytes, opened
from tests.exported import DOWN, GATE, RANKS, UP, VECTORS, make_case, make_models

CPU = torch.device("cpu")


class Held:
    """What an owner holds for one rank."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name.split(".")[-2]]


@pytest.fixture
def model(tmp_path: Path) -> MappedModel:
    root, _ = make_case(tmp_path, make_models(tmp_path / "models"), RANKS, VECTORS).exported()
    return MappedModel.open(root / "single")


def source_of(model: MappedModel, dtype: torch.dtype = torch.float32, size: int = 1, rank: int = 0) -> Source:
    return Source(model, Files(model), slices(model, size, rank), CPU, dtype)


def slices(model: MappedModel, size: int, rank: int) -> Slices:
    return Slices(model.model, opened(model.directory)[1], size, rank)


def test_shared_tensors_are_views_of_the_files(model: MappedModel) -> None:
    source = source_of(model, size=2, rank=1)
    (piece,) = source.pieces(GATE)
    found = source.weight(piece)
    assert torch.equal(found, model.tensor(GATE)[24:])
    assert found.data_ptr() == model.tensor(GATE)[24:].data_ptr()
    assert source.taken == {GATE}
    assert source.maps(GATE) and source.maps(UP) and not source.maps("model.layers.0.self_attn.q_proj.weight")


def test_what_is_added_is_divided_as_the_weight_is(model: MappedModel) -> None:
    source = source_of(model)
    stored = model.residual(GATE)
    assert stored is not None and stored.up is not None and stored.scale is not None
    found = source.residual(Piece(GATE, (0, 24), (0, 32)))
    assert found.up is not None and torch.equal(found.up, stored.up[:24])
    assert found.scale is not None and torch.equal(found.scale, stored.scale[:24])
    assert not source.residual(Piece(DOWN, (0, 32), (0, 48))).parts


def test_tensors_that_do_not_fit_are_refused_by_name(model: MappedModel) -> None:
    with pytest.raises(CheckpointError, match=r"model single .*tensor none\.weight: is missing"):
        source_of(model).pieces("none.weight")
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}: is torch.float32, the engine computes in"):
        source_of(model, torch.bfloat16).weight(Piece(GATE, (0, 48), (0, 32)))


@pytest.mark.parametrize("size", [1, 2])
def test_an_owner_hands_out_what_it_holds_for_a_rank(model: MappedModel, size: int) -> None:
    for rank in range(size):
        held = slices(model, size, rank)
        for name, tensor in ((GATE, model.tensor(GATE)), (DOWN, model.tensor(DOWN))):
            (piece,) = pieces(name, tuple(tensor.shape), held.of(name))
            owner = OwnerMemory(model, Held(**{name.split(".")[-2]: held.of(name).of(tensor)}))
            assert torch.equal(owner.tensor(piece), piece.of(tensor))


def test_an_owner_holds_each_shared_matrix_once(model: MappedModel) -> None:
    """What vLLM takes off its own memory is no more than the owner has: norms are the engine's."""
    held = matrices(model.tensors, model.shared())
    assert external_bytes(model, 1) == sum({t.digest: t.nbytes for t in held.values()}.values()) > 0
    assert external_bytes(model, 2) == external_bytes(model, 1) // 2
    assert all("norm" not in name for name in held)


def test_an_owner_for_another_number_of_ranks_is_refused(model: MappedModel) -> None:
    (piece,) = pieces(GATE, (48, 32), slices(model, 2, 1).of(GATE))
    held = Held(gate_proj=model.tensor(GATE)[:12])
    with pytest.raises(CheckpointError, match=r"the owner holds \[12, 32\].* needs \[24, 32\].*--tensor-parallel"):
        OwnerMemory(model, held).tensor(piece)


def test_a_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """The manifest agrees with the files, so only the configuration tells."""
    root, _ = make_case(tmp_path, make_models(tmp_path / "models"), RANKS, VECTORS).exported()
    assert opened(root / "single")[1]["model_type"] == "llama"
    said = json.loads((root / "sandhi.json").read_text())
    lost = "model.layers.0.self_attn.q_proj.weight"
    file = root / "sharded" / said["models"]["sharded"]["tensors"].pop(lost)["file"]
    kept = {name: tensor.clone() for name, tensor in load_file(file).items() if name != lost}
    file.unlink()
    save_file(kept, file)
    (root / "sandhi.json").write_text(json.dumps(said))
    with pytest.raises(PreflightError, match=rf"model sharded .*{lost}"):
        opened(root / "sharded")


def test_a_configuration_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    root, _ = make_case(tmp_path, make_models(tmp_path / "models")).exported()
    (root / "tied" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model tied file \S+config\.json: is missing"):
        opened(root / "tied")
