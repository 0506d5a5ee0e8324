"""The runtime of ``cuda`` devices in this process: NVIDIA's driver, or HIP on AMD's devices."""

from __future__ import annotations

import os

from unicoll.arrays.cuda import cuda_driver, hip_driver
from unicoll.arrays.device_runtime import DeviceRuntime

_AMD_KERNEL_DRIVER = "/dev/kfd"


def load() -> DeviceRuntime | str:
    """The initialised runtime: HIP if the program uses it, else the first that has a device; or the reason for none."""
    if hip_driver.in_use():
        return hip_driver.load()
    cuda = cuda_driver.load()
    if not isinstance(cuda, str):
        return cuda
    hip = hip_driver.load()
    if not isinstance(hip, str):
        return hip
    return f"{cuda}; {hip}" if os.path.exists(_AMD_KERNEL_DRIVER) else cuda
