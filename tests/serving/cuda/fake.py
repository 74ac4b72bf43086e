"""A CUDA driver whose devices are this machine's memory, at the boundary at which ctypes calls one.

Physical memory is a memfd, an address range is an mmap of nothing, a mapping is an mmap of the memfd over it, access is
mprotect: so descriptors, processes, counting of users and what happens at a forbidden write are the kernel's. Each
function has a C prototype of its own (ctypes callbacks), written after cuda.h and not after sandhi_core's.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sandhi_core.serving.cuda.driver import Driver

GRANULARITY = 2 << 20
TOTAL = 64 << 20
UUIDS = (bytes(range(16)), bytes(range(16, 32)))

INVALID, FULL, INVALID_DEVICE, UNSUPPORTED = 1, 2, 101, 801  # CUresult
_NONE, _READ, _WRITE = 0, 1, 2
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype, _libc.mmap.argtypes = c_void_p, (c_void_p, c_size_t, c_int, c_int, c_int, ctypes.c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)

_P = c_void_p  # any pointer
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, _P),
    "cuGetErrorString": (c_int, _P),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, c_int),
    "cuDeviceGetAttribute": (_P, c_int, c_int),
    "cuDeviceGetUuid_v2": (_P, c_int),
    "cuDevicePrimaryCtxRetain": (_P, c_int),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemGetAllocationGranularity": (_P, _P, c_int),
    "cuMemCreate": (_P, c_size_t, _P, c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemExportToShareableHandle": (_P, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (_P, _P, c_int),
    "cuMemAddressReserve": (_P, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, _P, c_size_t),
    "cuMemcpyHtoD_v2": (c_ulonglong, _P, c_size_t),
    "cuMemcpyDtoH_v2": (_P, c_ulonglong, c_size_t),
}
_KEPT = ctypes.create_string_buffer(b"CUDA_ERROR_FAKE")


class Fake:
    """`total`: bytes a device has. `attributes` that devices lack. `calls` are the names of what was called;
    `fail[name]` is the status that a function returns instead of doing anything."""

    def __init__(self, total: int = TOTAL, lacks: tuple[int, ...] = ()) -> None:
        self.total, self.lacks = total, lacks
        self.handles: dict[int, tuple[int, int]] = {}  # descriptor and size
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.contexts: list[int] = []
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}

    def library(self) -> SimpleNamespace:
        """What ctypes.CDLL gives of a real one."""
        made = {n: CFUNCTYPE(c_int, *types)(self._recorded(n)) for n, types in _SIGNATURES.items()}
        return SimpleNamespace(**made, keeps=self)

    @property
    def used(self) -> int:
        return sum(size for _, size in self.handles.values())

    def _recorded(self, name: str) -> Callable[..., int]:
        function = getattr(self, name.removesuffix("_v2"))

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name]
            if name.startswith("cuMem") and name != "cuMemGetAllocationGranularity" and not self.contexts:
                return 201  # CUDA_ERROR_INVALID_CONTEXT
            status = function(*arguments)
            return 0 if status is None else int(status)

        return call

    # --- devices ------------------------------------------------------------------------------------------------

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return INVALID if flags else 0

    def cuGetErrorName(self, status: int, text: int) -> None:  # noqa: N802
        c_void_p.from_address(text).value = ctypes.addressof(_KEPT)

    cuGetErrorString = cuGetErrorName  # noqa: N815

    def cuDeviceGetCount(self, count: int) -> None:  # noqa: N802
        c_int.from_address(count).value = len(UUIDS)

    def cuDeviceGet(self, device: int, ordinal: int) -> None:  # noqa: N802
        c_int.from_address(device).value = ordinal

    def cuDeviceGetAttribute(self, value: int, attribute: int, device: int) -> None:  # noqa: N802
        c_int.from_address(value).value = int(attribute in (102, 103) and attribute not in self.lacks)

    def cuDeviceGetUuid(self, uuid: int, device: int) -> None:  # noqa: N802
        ctypes.memmove(uuid, UUIDS[device], 16)

    def cuDevicePrimaryCtxRetain(self, context: int, device: int) -> None:  # noqa: N802
        c_void_p.from_address(context).value = 0x1000 + device

    def cuCtxPushCurrent(self, context: int) -> int:  # noqa: N802
        if not context:
            return INVALID
        self.contexts.append(context)
        return 0

    def cuCtxPopCurrent(self, context: int) -> None:  # noqa: N802
        c_void_p.from_address(context).value = self.contexts.pop()

    def cuCtxSynchronize(self) -> None:  # noqa: N802
        pass

    # --- memory -------------------------------------------------------------------------------------------------

    def cuMemGetInfo(self, free: int, total: int) -> None:  # noqa: N802
        c_size_t.from_address(free).value = self.total - self.used
        c_size_t.from_address(total).value = self.total

    def cuMemGetAllocationGranularity(self, size: int, properties: int, option: int) -> int:  # noqa: N802
        c_size_t.from_address(size).value = GRANULARITY
        return 0 if self._device_memory(properties) and option in (0, 1) else INVALID

    def cuMemCreate(self, handle: int, size: int, properties: int, flags: int) -> int:  # noqa: N802
        if not size or size % GRANULARITY or flags or not self._device_memory(properties):
            return INVALID
        if size > self.total - self.used:
            return FULL
        descriptor = os.memfd_create("device")
        os.ftruncate(descriptor, size)
        return self._hold(handle, descriptor, size)

    def cuMemRelease(self, handle: int) -> None:  # noqa: N802
        os.close(self.handles.pop(handle)[0])

    def cuMemExportToShareableHandle(self, shareable: int, handle: int, kind: int, flags: int) -> int:  # noqa: N802
        if kind != 1 or flags:
            return INVALID
        c_int.from_address(shareable).value = os.dup(self.handles[handle][0])
        return 0

    def cuMemImportFromShareableHandle(self, handle: int, shareable: int | None, kind: int) -> int:  # noqa: N802
        if kind != 1:
            return INVALID
        descriptor = os.dup(shareable or 0)
        return self._hold(handle, descriptor, os.fstat(descriptor).st_size)

    def cuMemAddressReserve(self, address: int, size: int, alignment: int, wanted: int, flags: int) -> int:  # noqa: N802
        found = _libc.mmap(None, size, _NONE, _PRIVATE | _ANONYMOUS, -1, 0)
        self.reserved[found] = size
        c_uint64.from_address(address).value = found
        return INVALID if flags or wanted or size % GRANULARITY else 0

    def cuMemAddressFree(self, address: int, size: int) -> int:  # noqa: N802
        if self.reserved.get(address) != size or address in self.mapped:
            return INVALID
        del self.reserved[address]
        return int(_libc.munmap(address, size))

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:  # noqa: N802
        descriptor, held = self.handles[handle]
        if self.reserved.get(address) != size or address in self.mapped or size != held or offset or flags:
            return INVALID
        self.mapped[address] = size
        return self._placed(_libc.mmap(address, size, _NONE, _SHARED | _FIXED, descriptor, 0), address)

    def cuMemUnmap(self, address: int, size: int) -> int:  # noqa: N802
        if self.mapped.pop(address, None) != size:
            return INVALID
        return self._placed(_libc.mmap(address, size, _NONE, _PRIVATE | _FIXED | _ANONYMOUS, -1, 0), address)

    def cuMemSetAccess(self, address: int, size: int, descriptions: int, count: int) -> int:  # noqa: N802
        kind, device, access = (c_int * 3).from_address(descriptions)
        if self.mapped.get(address) != size or count != 1 or kind != 1 or device not in (0, 1):
            return INVALID
        return int(_libc.mprotect(address, size, {1: _READ, 3: _READ | _WRITE}[access]))

    def cuMemcpyHtoD(self, to: int, source: int | None, size: int) -> None:  # noqa: N802
        ctypes.memmove(to, source or 0, size)

    def cuMemcpyDtoH(self, to: int, source: int, size: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, size)

    def _hold(self, handle: int, descriptor: int, size: int) -> int:
        self.handles[descriptor + 1000] = (descriptor, size)
        c_ulonglong.from_address(handle).value = descriptor + 1000
        return 0

    @staticmethod
    def _device_memory(properties: int) -> bool:
        """type, requestedHandleTypes, location.type, location.id; then a pointer and flags, all zero."""
        kind, handles, where, device = (c_int * 4).from_address(properties)
        rest = (c_ulonglong * 2).from_address(properties + 16)
        return (kind, handles, where) == (1, 1, 1) and device in (0, 1) and not any(rest)

    @staticmethod
    def _placed(found: int, address: int) -> int:
        return 0 if found == address else INVALID


def host_tensor(mapping: Any, device: int) -> Tensor:
    """What torch.as_tensor makes of a `__cuda_array_interface__` on a GPU, made of this machine's memory."""
    said = mapping.__cuda_array_interface__
    assert said["typestr"] == "|u1" and said["version"] == 3 and said["data"][1] is False
    buffer = (ctypes.c_ubyte * said["shape"][0]).from_address(said["data"][0])
    buffer.keeps = mapping  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


def driver(fake: Fake | None = None) -> Driver:
    return Driver((fake or Fake()).library(), host_tensor)
