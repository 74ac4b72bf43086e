"""The few functions of the CUDA driver that physical memory shared between processes takes, through ctypes.

Names, prototypes, layouts and numbers are those of cuda.h of CUDA 12.8 and 13.0, in which they are the same (headers of
nvidia-cuda-runtime-cu12 12.8.90 and nvidia-cuda-runtime 13.0.48; a C program compiled against each printed the offsets
and values below). Where the header maps a name to a versioned symbol (`#define cuMemcpyHtoD cuMemcpyHtoD_v2`), the
symbol is called.

Memory is created, exported as a file descriptor, imported, mapped and made accessible as the driver API reference says,
"Virtual Memory Management". Physical memory is counted there: it is freed when the last handle to it is released, the
last mapping of it gone and the last descriptor of it closed (cuMemRelease, cuMemUnmap), in whichever process.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_ushort, c_void_p
from typing import Any, Self

import torch
from torch import Tensor

from sandhi_core.errors import ServingError
from sandhi_core.serving.gpu import LIBRARY

# Enumerations of cuda.h; the comment names the type.
ALLOCATION_PINNED = 1  # CUmemAllocationType: CU_MEM_ALLOCATION_TYPE_PINNED
HANDLE_FILE_DESCRIPTOR = 1  # CUmemAllocationHandleType: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
LOCATION_DEVICE = 1  # CUmemLocationType: CU_MEM_LOCATION_TYPE_DEVICE
READ, READ_WRITE = 1, 3  # CUmemAccess_flags: CU_MEM_ACCESS_FLAGS_PROT_READ, ..._PROT_READWRITE
GRANULARITY_MINIMUM = 0  # CUmemAllocationGranularity_flags: CU_MEM_ALLOC_GRANULARITY_MINIMUM
CAN_MAP, CAN_EXPORT = 102, 103  # CUdevice_attribute: ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
# ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
OUT_OF_MEMORY = 2  # CUresult: CUDA_ERROR_OUT_OF_MEMORY


class Location(ctypes.Structure):
    """CUmemLocation: 8 bytes."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The last part of CUmemAllocationProp."""

    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes; type at 0, handle types at 4, location at 8, the pointer at 16, flags at 24."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc: 12 bytes; location at 0, flags at 8."""

    _fields_ = (("location", Location), ("flags", c_int))


ADDRESS, HANDLE, CONTEXT = c_uint64, c_uint64, c_void_p  # CUdeviceptr, CUmemGenericAllocationHandle, CUcontext
UUID_BYTES = c_ubyte * 16  # CUuuid: char bytes[16]

PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(UUID_BYTES), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(CONTEXT), c_int),
    "cuCtxPushCurrent_v2": (CONTEXT,),
    "cuCtxPopCurrent_v2": (POINTER(CONTEXT),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (POINTER(HANDLE), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemRelease": (HANDLE,),
    "cuMemExportToShareableHandle": (c_void_p, HANDLE, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(HANDLE), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(ADDRESS), c_size_t, c_size_t, ADDRESS, c_ulonglong),
    "cuMemAddressFree": (ADDRESS, c_size_t),
    "cuMemMap": (ADDRESS, c_size_t, c_size_t, HANDLE, c_ulonglong),
    "cuMemUnmap": (ADDRESS, c_size_t),
    "cuMemSetAccess": (ADDRESS, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemcpyHtoD_v2": (ADDRESS, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, ADDRESS, c_size_t),
}
"""Arguments of each function, by the symbol; all return CUresult, an int."""


class CudaError(ServingError):
    """A function of the driver failed; `status` is its CUresult."""

    def __init__(self, function: str, status: int, said: str, remedy: str) -> None:
        self.status = status
        super().__init__(f"{function} failed: {said}", remedy=remedy, code="cuda-failed")


def cuda_tensor(mapping: Any, device: int) -> Tensor:
    """What has a `__cuda_array_interface__` as a torch tensor that keeps it alive."""
    return torch.as_tensor(mapping, device=f"cuda:{device}")


class Driver:
    """The driver's library. `tensor` makes a torch tensor over a mapping on a device."""

    def __init__(self, library: Any, tensor: Callable[[Any, int], Tensor] = cuda_tensor) -> None:
        """Raises ServingError where a function is missing or there is no usable device."""
        self.tensor = tensor
        self._functions: dict[str, Any] = {}
        for name, arguments in PROTOTYPES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ServingError(
                    f"the CUDA driver here has no {name}",
                    file=LIBRARY,
                    remedy="install a driver for CUDA 12 or later",
                    code="cuda-missing",
                ) from None
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self.call("cuInit", 0)

    @classmethod
    def load(cls) -> Self:
        """The driver of this machine. Raises ServingError where there is none."""
        try:
            return cls(ctypes.CDLL(LIBRARY))
        except OSError as error:
            raise ServingError(
                f"there is no CUDA driver here: {error}",
                file=LIBRARY,
                remedy="run this where an NVIDIA driver is installed, in a container with its GPUs passed through",
                code="cuda-missing",
            ) from None

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function by its symbol. Raises CudaError unless it returns CUDA_SUCCESS."""
        if status := self._functions[name](*arguments):
            said = ": ".join(filter(None, (self._said(f"cuGetError{what}", status) for what in ("Name", "String"))))
            remedy = "see the driver's log (dmesg: NVRM, Xid); nothing was changed on the device"
            if status == OUT_OF_MEMORY:
                remedy = "free memory on the device, or start the owner before the engines"
            raise CudaError(name, status, said or str(status), remedy)

    def _said(self, function: str, status: int) -> str:
        text = c_char_p()
        known = self._functions[function](status, byref(text)) == 0 and text.value
        return text.value.decode(errors="replace") if known and text.value else ""
