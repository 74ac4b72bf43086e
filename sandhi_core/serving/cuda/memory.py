"""Memory of a GPU that several processes map: made, exported, imported, mapped. See driver for what is called."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any
from uuid import UUID
from weakref import finalize

from torch import Tensor

from sandhi_core.errors import ServingError
from sandhi_core.serving.cuda import driver as cuda
from sandhi_core.serving.cuda.driver import Driver


class Device:
    """One GPU by its number in this process (CUDA_VISIBLE_DEVICES renumbers them): what it is, and memory on it."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Raises ServingError where there is no device of that number, or it cannot share memory."""
        self.driver, self.ordinal = driver, ordinal
        count, handle, uuid, size = c_int(), c_int(), cuda.UUID_BYTES(), c_size_t()
        driver.call("cuDeviceGetCount", byref(count))
        if not 0 <= ordinal < count.value:
            raise ServingError(
                f"there is no device {ordinal}: this process sees {count.value}",
                remedy="devices count from 0; CUDA_VISIBLE_DEVICES decides which a process sees",
                code="device-invalid",
            )
        driver.call("cuDeviceGet", byref(handle), ordinal)
        self.handle = handle.value
        driver.call("cuDeviceGetUuid_v2", byref(uuid), self.handle)
        self.uuid = str(UUID(bytes=bytes(uuid)))
        """The same in every process that sees the GPU, or the MIG instance, under whatever number."""
        for attribute, what in ((cuda.CAN_MAP, "map memory"), (cuda.CAN_EXPORT, "export memory as a descriptor")):
            can = c_int()
            driver.call("cuDeviceGetAttribute", byref(can), attribute, self.handle)
            if not can.value:
                raise ServingError(
                    f"device {ordinal} ({self.uuid}) cannot {what}",
                    remedy="serve from another device, or without sharing",
                    code="device-unsupported",
                )
        driver.call("cuMemGetAllocationGranularity", byref(size), byref(self._properties()), cuda.GRANULARITY_MINIMUM)
        self.granularity = size.value
        """What sizes of allocations are a multiple of, in bytes: 2 MiB on GPUs to date."""
        self._context = cuda.CONTEXT()  # held for the life of the process: with its last holder it would end
        driver.call("cuDevicePrimaryCtxRetain", byref(self._context), self.handle)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver with the device's primary context current, the one that torch uses too."""
        self.driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            self.driver.call(name, *arguments)
        finally:
            self.driver.call("cuCtxPopCurrent_v2", byref(cuda.CONTEXT()))

    def free(self) -> int:
        """Bytes that all processes together leave free on the device."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def create(self, nbytes: int) -> "Memory":
        """New physical memory, a multiple of the granularity, that can be exported."""
        handle = cuda.HANDLE()
        self.call("cuMemCreate", byref(handle), nbytes, byref(self._properties()), 0)
        return Memory(self, handle.value, nbytes)

    def imported(self, descriptor: int, nbytes: int) -> "Memory":
        """Physical memory that another process exported; the descriptor stays the caller's, to be closed."""
        handle = cuda.HANDLE()
        # The number itself goes where other kinds of handles have a pointer ("void *osHandle").
        given = c_void_p(descriptor)
        self.call("cuMemImportFromShareableHandle", byref(handle), given, cuda.HANDLE_FILE_DESCRIPTOR)
        return Memory(self, handle.value, nbytes)

    def _properties(self) -> cuda.AllocationProperties:
        # Everything else is zero: no compression, no RDMA; win32_handle_metadata is required to be.
        where = cuda.Location(cuda.LOCATION_DEVICE, self.handle)
        return cuda.AllocationProperties(cuda.ALLOCATION_PINNED, cuda.HANDLE_FILE_DESCRIPTOR, where)


class Memory:
    """A handle to physical memory, held until `release`; mappings outlive it."""

    def __init__(self, device: Device, handle: int, nbytes: int) -> None:
        self.device, self.handle, self.nbytes = device, handle, nbytes
        self.release = _once(self, device.call, "cuMemRelease", handle)

    def export(self) -> int:
        """A file descriptor that stands for the memory, for another process to import."""
        found = c_int(-1)
        call = self.device.call
        call("cuMemExportToShareableHandle", byref(found), self.handle, cuda.HANDLE_FILE_DESCRIPTOR, 0)
        return found.value

    def map(self, access: int) -> "DeviceMapping":
        """All of it in this process's addresses on the device, to READ or READ_WRITE. (A part would not do: "offset ...
        currently must be zero", cuMemMap.)"""
        call, nbytes, address = self.device.call, self.nbytes, cuda.ADDRESS()
        call("cuMemAddressReserve", byref(address), nbytes, 0, 0, 0)
        try:
            call("cuMemMap", address, nbytes, 0, self.handle, 0)
            try:
                where = cuda.Location(cuda.LOCATION_DEVICE, self.device.handle)
                call("cuMemSetAccess", address, nbytes, byref(cuda.AccessDescription(where, access)), 1)
            except BaseException:
                call("cuMemUnmap", address, nbytes)
                raise
        except BaseException:
            call("cuMemAddressFree", address, nbytes)
            raise
        return DeviceMapping(self.device, address.value, nbytes)


class DeviceMapping:
    """Memory at `address`: mapped until `unmap`, or until nothing refers to it any more."""

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.device, self.address, self.nbytes = device, address, nbytes
        self.unmap = _once(self, _unmap, device, address, nbytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of numba's CUDA array interface: so many bytes. torch refuses its read-only flag (the False), so it
        does not know: a kernel that writes into such a tensor fails with an illegal address."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "stream": None}

    def bytes(self) -> Tensor:
        """What is mapped, as a uint8 tensor on the device; it and its views keep this mapped. Raises ServingError where
        torch makes a copy instead."""
        made = self.device.driver.tensor(self, self.device.ordinal)
        if made.data_ptr() != self.address:
            raise ServingError(
                f"torch copied the owner's memory, from device {self.device.ordinal} to {made.device}",
                remedy="give the number of the device as torch has it in this process",
                code="device-differs",
            )
        return made

    def write(self, offset: int, data: Tensor) -> None:
        """Copy a contiguous CPU tensor to `offset`. It is there for others only once this is unmapped: a copy from
        pageable memory may return while the device still works on it (CUDA, "API synchronization behavior")."""
        self.device.call("cuMemcpyHtoD_v2", self.address + offset, data.data_ptr(), data.nbytes)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """A copy of bytes on the host."""
        held = bytearray(nbytes)
        if nbytes:
            into = (ctypes.c_char * nbytes).from_buffer(held)
            self.device.call("cuMemcpyDtoH_v2", ctypes.addressof(into), self.address + offset, nbytes)
        return held


def _unmap(device: Device, address: int, nbytes: int) -> None:
    try:
        device.call("cuCtxSynchronize")  # kernels that read it may still run, and copies into it
    finally:
        device.call("cuMemUnmap", address, nbytes)
        device.call("cuMemAddressFree", address, nbytes)


def _once(owner: object, function: Callable[..., None], *arguments: Any) -> "finalize[Any, Any]":
    """Run when called, or when its owner is forgotten; not at the process's end, which frees everything anyway and at
    which the driver may be gone already."""
    undo = finalize(owner, function, *arguments)
    undo.atexit = False
    return undo
