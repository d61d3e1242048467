"""Say which GPU this machine has, asking the CUDA driver; None where there is no driver or no GPU.

Not verified on hardware: the answers of a driver were only imitated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from edge_engines.compile.frames import DeviceFacts

DRIVER = "libcuda.so.1"
# CUdevice_attribute in the CUDA driver API
_MAJOR, _MINOR = 75, 76
_NAME_BYTES = 100


def read_device(load: Callable[[str], Any] = ctypes.CDLL) -> DeviceFacts | None:
    """Return name, compute capability and driver of device 0; `load` opens the driver's library."""
    try:
        cuda = load(DRIVER)
    except OSError:
        return None
    device, version = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0) or cuda.cuDriverGetVersion(ctypes.byref(version)):
        return None
    name = ctypes.create_string_buffer(_NAME_BYTES)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    return DeviceFacts(
        name=name.value.decode(errors="replace"),
        compute_capability=f"{_attribute(cuda, _MAJOR, device)}.{_attribute(cuda, _MINOR, device)}",
        driver=f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def _attribute(cuda: Any, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value
