"""Where the tensors that a model maps come from: its files on the CPU, their owner's memory on a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sandhi_core.assignment import factors_among
from sandhi_core.disk import RESTORE
from sandhi_core.errors import CheckpointError
from sandhi_core.rungs.residual import Residual
from sandhi_core.serving.gpu import RANK
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import Slices, matrices
from sandhi_core.serving.vllm_plugin.pieces import Piece, pieces
from sandhi_core.serving.vllm_plugin.refuse import Options, require_whole


def opened(directory: Path) -> tuple[MappedModel, dict[str, Any]]:
    """A whole model of an export, and its config.json. Raises SandhiError where it is none."""
    model = MappedModel.open(directory)
    config = model.config()
    require_whole(model.model, config, model.tensors)
    return model, config


class Provider(Protocol):
    """Hands out shared tensors, which nobody may write to."""

    def tensor(self, piece: Piece) -> Tensor:
        """A piece of a shared matrix, without a copy. Raises CheckpointError where what is held does not fit."""


class Files:
    """The mapped files of a model, on the CPU."""

    def __init__(self, model: MappedModel) -> None:
        self._model = model

    def tensor(self, piece: Piece) -> Tensor:
        return piece.of(self._model.tensor(piece.name))


class OwnerMemory:
    """What the owner of a GPU holds, mapped read-only; it has divided the matrices among ranks already."""

    def __init__(self, model: MappedModel, held: Any) -> None:
        """`held.tensor(name)` is what the owner holds for this rank."""
        self._model = model
        self._held = held

    def tensor(self, piece: Piece) -> Tensor:
        held: Tensor = self._held.tensor(piece.name)
        found = piece.of_slice(held)
        if tuple(found.shape) != piece.shape:
            raise CheckpointError(
                f"the owner holds {list(held.shape)} of it, of which this rank needs {list(piece.shape)}",
                model=self._model.model,
                tensor=piece.name,
                remedy="start the owner with the same --tensor-parallel as the engine, and one for each rank",
            )
        return found


def external_bytes(model: MappedModel, ranks: int) -> int:
    """Bytes on a rank's GPU that the owner has allocated for this model."""
    return sum({t.digest: t.nbytes for t in matrices(model.tensors, model.shared()).values()}.values()) // ranks


def attached(
    model: MappedModel, options: Options, device: int, rank: int, ranks: int, died: Callable[[], None]
) -> OwnerMemory:
    """The owner of a GPU; `died` is called when it is gone. Raises what attaching to an owner raises."""
    from sandhi_core.serving.cuda.client import attach  # only where there is a GPU

    held = attach(
        Path(str(options.owner).replace(RANK, str(rank))),
        model.manifest.digest,
        model.model,
        {name: tensor.digest for name, tensor in matrices(model.tensors, model.shared()).items()},
        device=device,
        size=ranks,
        rank=rank,
        check=options.digests,
        died=died,
    )
    return OwnerMemory(model, held)


class Source:
    """All tensors of one model, as the layers of an engine ask for them: shared ones from the provider, its own from
    the files. Keeps count of what was asked for, so that what nobody took is noticed."""

    def __init__(
        self, model: MappedModel, shared: Provider, slices: Slices, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.model = model
        self.shared_names = model.shared()
        self.added = frozenset(factors_among(model.tensors).values())
        self.taken: set[str] = set()
        self._shared = shared
        self._slices = slices
        self._device = device
        self._dtype = dtype

    def maps(self, name: str) -> bool:
        """Whether a tensor is shared, or something is added to it."""
        return name in self.shared_names or name in self.added

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """What this rank works with of a matrix. Raises CheckpointError where the model has no such tensor."""
        if name not in self.model.tensors:
            raise self.wrong(name, "is missing, the engine's model has it")
        return pieces(name, self.model.tensors[name].shape, self._slices.of(name))

    def weight(self, piece: Piece) -> Tensor:
        """A piece of a matrix on the engine's device, a view where its memory is shared.

        Raises CheckpointError where it is of another dtype than the engine computes in.
        """
        self.taken.add(piece.name)
        found = self._shared.tensor(piece) if piece.name in self.shared_names else self._own(piece)
        if found.dtype != self._dtype:
            raise self.wrong(piece.name, f"is {found.dtype}, the engine computes in {self._dtype}")
        return found

    def residual(self, piece: Piece) -> Residual:
        """What the model adds to a piece, as it is stored, on the engine's device."""
        found = self.model.residual(piece.name) or Residual()
        parts = piece.of_residual(found).parts
        return Residual(**{name: part.to(self._device) for name, part in parts.items()})

    def _own(self, piece: Piece) -> Tensor:
        return piece.of(self.model.tensor(piece.name)).to(self._device)

    def wrong(self, tensor: str, message: str) -> CheckpointError:
        return CheckpointError(message, model=self.model.model, tensor=tensor, remedy=RESTORE)
