"""Which tensors are changed and to what: noise as the profile makes it, another model to merge with, small noise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from demo.seeds import seed
from sandhi_core.checkpoints.checkpoint import Checkpoint
from sandhi_core.checkpoints.scan import fingerprint
from sandhi_core.grouping.order import Place
from sandhi_core.pools.pool import ProfileSettings
from sandhi_core.profile import components, noise_weights
from sandhi_core.records import Fingerprint, Slot

SEED = ProfileSettings().seeds[0]


@dataclass(frozen=True)
class Source:
    """A checkpoint and its components."""

    directory: Path
    scans: Path  # where its fingerprint may leave files

    @property
    def name(self) -> str:
        return self.directory.name

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.directory, self.name)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.checkpoint, self.scans)

    @cached_property
    def components(self) -> Mapping[Place, Sequence[Slot]]:
        """All of them, in the profile's order."""
        return components(self.fingerprint)

    def noise(self, place: Place) -> tuple[Mapping[str, str], Callable[[str], Tensor]]:
        """The tensors of a component to what names them with noise in it, and the bytes: those of the profile."""
        weights = noise_weights(self.fingerprint, self.checkpoint, SEED, self.components[place])
        return weights.tensors, cast(Callable[[str], Tensor], weights.read)  # noise adds nothing beside


def near(tensor: Tensor, share: float, *names: str) -> Tensor:
    """`tensor` with noise of `share` of its own standard deviation, by the names alone."""
    wide = tensor.float()
    drawn = np.random.default_rng(seed(*names)).standard_normal(tuple(tensor.shape), dtype=np.float32)
    return (wide + share * wide.std() * torch.from_numpy(drawn)).to(tensor.dtype)
