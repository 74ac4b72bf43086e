"""Where a rank's shared tensors lie in the owner's memory: pure, the same for every process that computes it.

One arena holds them all: one allocation, one file descriptor, one mapping a reader. An allocation a tensor would round
each up to the driver's granularity (2 MiB: the two megabytes of a 1024 x 1024 matrix take nothing more, a norm takes a
thousand times its size), and would hand out and map hundreds of descriptors; what it would allow, to free or to map a
single tensor, nobody needs, because an export never changes and a mapping costs addresses, not memory. It does mean
that a shared matrix cannot be mapped in between private ones, as parts of one fused matrix: engines multiply with each
part by itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from sandhi_core.checkpoints.safetensors_file import DTYPES
from sandhi_core.records import ExportedTensor
from sandhi_core.serving.slices import Slice, Slices

ALIGNMENT = 256
"""Bytes: of the start of every tensor, what cudaMalloc gives (CUDA C++ Programming Guide, "Device Memory Accesses") and
kernels with vector loads or TMA rely on."""


@dataclass(frozen=True, order=True)
class HeldSlice:
    """What is held once, whatever models and names have it: a tensor by its digest, and a slice of it."""

    digest: str
    slice: Slice


@dataclass(frozen=True)
class Place:
    """Bytes of the arena that are a tensor of this dtype (safetensors' spelling) and shape, row-major."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """`places` by slice, in the order of the arena; `names`: by model and tensor name which slice that is."""

    nbytes: int
    places: Mapping[HeldSlice, Place]
    names: Mapping[str, Mapping[str, HeldSlice]]

    def arena(self, granularity: int) -> int:
        """Size in bytes of the allocation that holds the plan."""
        return -(-self.nbytes // granularity) * granularity

    @property
    def held(self) -> int:
        """Bytes of tensors: the rest is alignment."""
        return sum(place.nbytes for place in self.places.values())


def plan(
    tensors: Mapping[str, Mapping[str, ExportedTensor]],
    shared: Mapping[str, Collection[str]],
    slices: Mapping[str, Slices],
) -> Plan:
    """Lay out the slices of every shared tensor, one after another in the order of their digests. All by model: the
    manifest's tensors, the names of the shared ones, the rank's slices.

    Raises ServingError as Slices.of does.
    """
    names = {
        m: {n: HeldSlice(tensors[m][n].digest, slices[m].of(n)) for n in sorted(shared[m])} for m in sorted(shared)
    }
    exported = {held: tensors[m][n] for m, found in names.items() for n, held in found.items()}
    places, end = {}, 0
    for held in sorted(exported):
        tensor = exported[held]
        shape = held.slice.shape(tensor.shape)
        place = Place(
            -(-end // ALIGNMENT) * ALIGNMENT, prod(shape) * DTYPES[tensor.dtype].itemsize, tensor.dtype, shape
        )
        places[held], end = place, place.offset + place.nbytes
    return Plan(end, places, names)
