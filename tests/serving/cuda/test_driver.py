"""What is said to the driver, and what of it is undone."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch

from sandhi_core.errors import ServingError
from sandhi_core.serving.cuda import driver as cuda
from sandhi_core.serving.cuda.driver import READ, READ_WRITE, CudaError, Driver
from sandhi_core.serving.cuda.memory import Device
from tests.serving.cuda.fake import GRANULARITY, TOTAL, Fake, driver


def device(fake: Fake) -> Device:
    return Device(driver(fake), 0)


def test_layouts_are_those_of_the_header() -> None:
    """As a C program compiled against cuda.h of 12.8 and 13.0 prints them (x86-64)."""
    properties, flags, access = cuda.AllocationProperties, cuda.AllocationFlags, cuda.AccessDescription
    assert ctypes.sizeof(cuda.Location) == 8
    assert ctypes.sizeof(properties) == 32
    assert (properties.type.offset, properties.requested_handle_types.offset, properties.location.offset) == (0, 4, 8)
    assert (properties.win32_handle_metadata.offset, properties.flags.offset) == (16, 24)
    assert (flags.compression_type.offset, flags.gpu_direct_rdma_capable.offset) == (0, 1)
    assert (flags.usage.offset, flags.reserved.offset) == (2, 4)
    assert ctypes.sizeof(access) == 12 and (access.location.offset, access.flags.offset) == (0, 8)


def test_memory_goes_from_one_mapping_to_another() -> None:
    fake = Fake()
    gpu = device(fake)
    memory = gpu.create(GRANULARITY)
    written = memory.map(READ_WRITE)
    written.write(512, torch.arange(100, dtype=torch.uint8))
    descriptor = memory.export()
    imported = gpu.imported(descriptor, GRANULARITY)
    os.close(descriptor)
    read = imported.map(READ)
    imported.release()
    assert read.read(512, 100) == bytes(range(100)) and read.read(0, 0) == b""
    assert read.bytes()[512:612].tolist() == list(range(100))
    written.unmap()
    memory.release()
    assert not fake.handles and read.bytes()[611].item() == 99  # who maps it keeps it


def test_a_tensor_keeps_the_mapping_and_its_end_unmaps() -> None:
    fake = Fake()
    memory = device(fake).create(GRANULARITY)
    tensor = memory.map(READ).bytes()[:16].view(torch.float32)
    memory.release()
    gc.collect()
    assert fake.mapped and tensor.tolist() == [0.0] * 4
    del tensor
    gc.collect()
    assert not fake.mapped and not fake.reserved
    assert [c for c in fake.calls if c.startswith(("cuMemUn", "cuCtxS"))] == ["cuCtxSynchronize", "cuMemUnmap"]


def test_what_is_called_is_called_in_the_devices_context() -> None:
    fake = Fake()
    memory = device(fake).create(GRANULARITY)
    memory.map(READ).unmap()
    memory.release()
    assert not fake.contexts and not fake.handles and not fake.reserved
    assert fake.calls.count("cuDevicePrimaryCtxRetain") == 1


@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_mapping_that_fails_leaves_nothing(name: str) -> None:
    fake = Fake()
    memory = device(fake).create(GRANULARITY)
    fake.fail[name] = 801
    with pytest.raises(CudaError, match=f"cuda-failed: {name} failed: CUDA_ERROR_FAKE: CUDA_ERROR_FAKE") as caught:
        memory.map(READ)
    assert caught.value.status == 801
    assert not fake.mapped and not fake.reserved


def test_a_device_without_enough_memory() -> None:
    with pytest.raises(CudaError, match="free memory on the device, or start the owner before the engines"):
        device(Fake()).create(TOTAL + GRANULARITY)


def test_devices_that_cannot_be_used() -> None:
    with pytest.raises(ServingError, match="device-invalid: there is no device 2: this process sees 2"):
        Device(driver(), 2)
    for attribute, what in ((102, "map memory"), (103, "export memory as a descriptor")):
        with pytest.raises(ServingError, match=f"device 0 .* cannot {what}"):
            Device(driver(Fake(lacks=(attribute,))), 0)
    assert Device(driver(), 0).uuid == "00010203-0405-0607-0809-0a0b0c0d0e0f" != Device(driver(), 1).uuid


def test_a_driver_that_is_too_old_or_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = Fake().library()
    del library.cuMemCreate
    with pytest.raises(ServingError, match="the CUDA driver here has no cuMemCreate"):
        Driver(library)
    monkeypatch.setattr(cuda, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(ServingError, match=r"cuda-missing: file .*libcuda\.so\.1: there is no CUDA driver here"):
        Driver.load()


def test_torch_must_not_copy() -> None:
    gpu = Device(Driver(Fake().library(), lambda mapping, number: torch.zeros(mapping.nbytes)), 0)
    with pytest.raises(ServingError, match="torch copied"):
        gpu.create(GRANULARITY).map(READ).bytes()
