"""An export's shared tensors in the memory of a device: read, held to their digests, copied there once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sandhi_core.checkpoints.checkpoint import tensor_digest
from sandhi_core.checkpoints.safetensors_file import raw_bytes
from sandhi_core.disk import RESTORE
from sandhi_core.errors import ProofError, ServingError
from sandhi_core.layout import read_manifest
from sandhi_core.serving.cuda.driver import READ_WRITE
from sandhi_core.serving.cuda.memory import Device, DeviceMapping, Memory
from sandhi_core.serving.cuda.plan import HeldSlice, Plan, plan
from sandhi_core.serving.cuda.protocol import Ask, Given, Lent
from sandhi_core.serving.mapped import MappedModel
from sandhi_core.serving.slices import Slices, matrices


@dataclass(frozen=True)
class Wanted:
    """What one rank of an export shares, and where it shall lie: all that is known before a device is touched."""

    models: dict[str, MappedModel]
    plan: Plan
    manifest: str
    size: int
    rank: int

    @classmethod
    def of(cls, root: Path, size: int, rank: int) -> Self:
        """Read the manifest, every config.json and the headers of all files of an export.

        Raises ProofError and CheckpointError as MappedModel.open does, ServingError where ranks do not divide the
        models or nothing is shared.
        """
        manifest = read_manifest(root)
        models = {mapped.model: mapped for mapped in MappedModel.each(root, manifest)}
        slices = {name: Slices(name, model.config(), size, rank) for name, model in models.items()}
        shared = {name: matrices(model.tensors, model.shared()) for name, model in models.items()}
        if not any(shared.values()):
            raise ServingError(
                "its models share no matrix",
                file=str(root),
                remedy="serve the models without an owner",
                code="nothing-shared",
            )
        planned = plan({name: model.tensors for name, model in models.items()}, shared, slices)
        return cls(models, planned, manifest.digest, size, rank)


class DeviceHolding:
    """An export's shared tensors in the memory of a device, until `close`. Once it is made, neither they nor the files
    are mapped in this process any more."""

    def __init__(self, wanted: Wanted, device: Device) -> None:
        """Raises ServingError where the device has not enough memory free, ProofError for the first tensor that is not
        what was exported."""
        self.plan, self.manifest, self.size, self.rank = wanted.plan, wanted.manifest, wanted.size, wanted.rank
        self.device = device
        self.nbytes = wanted.plan.arena(device.granularity)
        if (free := device.free()) < self.nbytes:
            raise ServingError(
                f"device {device.ordinal} has {free} bytes free, the shared tensors take {self.nbytes}",
                remedy="start the owner before the engines, or divide the models among more ranks",
                code="device-full",
            )
        self._parts: dict[HeldSlice, str] = {}
        self._memory: Memory = device.create(self.nbytes)
        try:
            mapping = self._memory.map(READ_WRITE)
            try:
                self._fill(mapping, wanted.models)
            finally:
                mapping.unmap()
            self.descriptor = self._memory.export()
        except BaseException:
            self._memory.release()
            raise

    def given(self, ask: Ask) -> Given:
        """What an engine asked for. Raises ServingError where it is not here."""
        for what, code, asked, held in (
            ("manifest", "manifest-differs", ask.manifest, self.manifest),
            ("device", "device-differs", ask.device, self.device.uuid),
            ("tensor-parallel size", "ranks-differ", ask.size, self.size),
            ("rank", "rank-differs", ask.rank, self.rank),
        ):
            if asked != held:
                raise ServingError(
                    f"the owner was started for {what} {held}, the engine asks for {asked}",
                    model=ask.model,
                    remedy="start one owner for each export, device and rank, each with a socket of its own",
                    code=code,
                )
        if ask.model not in self.plan.names:
            raise ServingError(
                f"the owner's export has no model {ask.model}",
                remedy=f"ask for one of {', '.join(self.plan.names)}",
                code="model-unknown",
            )
        tensors = {name: self._lent(held) for name, held in self.plan.names[ask.model].items()}
        return Given(manifest=self.manifest, device=self.device.uuid, nbytes=self.nbytes, tensors=tensors)

    def close(self) -> None:
        """Release the memory: it is free as soon as no reader maps it any more."""
        os.close(self.descriptor)
        self._memory.release()

    def _lent(self, held: HeldSlice) -> Lent:
        place = self.plan.places[held]
        return Lent(digest=held.digest, part=self._parts[held], **vars(place))

    def _fill(self, mapping: DeviceMapping, models: dict[str, MappedModel]) -> None:
        holders = {p: (m, n) for m, found in self.plan.names.items() for n, p in found.items()}
        for held, place in self.plan.places.items():
            model, name = holders[held]
            tensor = models[model].tensor(name)
            found = tensor_digest(place.dtype, tensor.shape, raw_bytes(tensor))
            if found != held.digest:
                raise ProofError(
                    f"is not what was exported: its digest is {found}, {held.digest} is expected",
                    model=model,
                    file=str(models[model].file(name)[0]),
                    tensor=name,
                    remedy=RESTORE,
                )
            part = held.slice.of(tensor).contiguous()
            self._parts[held] = found if part is tensor else tensor_digest(place.dtype, part.shape, raw_bytes(part))
            mapping.write(place.offset, part)
