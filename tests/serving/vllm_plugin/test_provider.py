"""Tensors as layers ask for them: views of the files or of what an owner holds, and no others."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sandhi_core.errors import CheckpointError, PreflightError
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.vllm_plugin.pieces import Piece, by_columns, by_rows
from sandhi_core.serving.vllm_plugin.provider import Files, Owner, Source, opened
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


def test_shared_tensors_are_views_of_the_files(model: MappedModel) -> None:
    source = Source(model, Files(model), CPU, torch.float32)
    (piece,) = by_rows([GATE], [source.shape(GATE)], [48], [24], 1, 2)
    found = source.weight(piece)
    assert torch.equal(found, model.tensor(GATE)[24:])
    assert found.data_ptr() == model.tensor(GATE)[24:].data_ptr()
    assert source.taken == {GATE}
    assert source.maps(GATE) and source.maps(UP) and not source.maps("model.layers.0.self_attn.q_proj.weight")


def test_what_is_added_is_divided_as_the_weight_is(model: MappedModel) -> None:
    source = Source(model, Files(model), CPU, torch.float32)
    stored = model.residual(GATE)
    assert stored is not None and stored.up is not None and stored.scale is not None
    found = source.residual(Piece(GATE, (0, 24), (0, 32)))
    assert found.up is not None and torch.equal(found.up, stored.up[:24])
    assert found.scale is not None and torch.equal(found.scale, stored.scale[:24])
    assert not source.residual(Piece(DOWN, (0, 32), (0, 48))).parts


def test_tensors_that_do_not_fit_are_refused_by_name(model: MappedModel) -> None:
    with pytest.raises(CheckpointError, match=r"model single .*tensor none\.weight: is missing"):
        Source(model, Files(model), CPU, torch.float32).shape("none.weight")
    with pytest.raises(CheckpointError, match=rf"tensor {GATE}: is torch.float32, the engine computes in"):
        Source(model, Files(model), CPU, torch.bfloat16).weight(Piece(GATE, (0, 48), (0, 32)))


def test_an_owner_hands_out_a_ranks_part_or_the_whole(model: MappedModel) -> None:
    whole = model.tensor(GATE)
    (piece,) = by_rows([GATE], [tuple(whole.shape)], [48], [24], 1, 2)
    for held in (whole, whole[24:]):
        assert torch.equal(Owner(model, Held(gate_proj=held)).tensor(piece), whole[24:])
    down = model.tensor(DOWN)
    piece = by_columns(DOWN, tuple(down.shape), 24, 1, 2)
    assert torch.equal(Owner(model, Held(down_proj=down[:, 24:])).tensor(piece), down[:, 24:])
    padded = torch.cat([whole, torch.zeros(16, 32)])
    assert torch.equal(Owner(model, Held(gate_proj=padded)).tensor(Piece(GATE, (0, 48), (0, 32))), whole)


def test_an_owner_for_another_number_of_ranks_is_refused(model: MappedModel) -> None:
    (piece,) = by_rows([GATE], [(48, 32)], [48], [24], 1, 2)
    held = Held(gate_proj=model.tensor(GATE)[:12])
    with pytest.raises(CheckpointError, match=r"the owner holds \[12, 32\].* needs \[24, 32\].*--tensor-parallel"):
        Owner(model, held).tensor(piece)


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
