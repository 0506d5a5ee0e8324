"""The runtime of ``cuda`` devices in this process: NVIDIA's driver, or HIP on AMD's devices."""

from __future__ import annotations

import os

from unicoll.devices.cuda import cuda_driver, hip_driver
from unicoll.devices.device_runtime import DeviceRuntime


def load() -> DeviceRuntime | str:
    """The initialised runtime; or the reason why there is none.

    It is the one of CUDA and HIP that has a device. HIP comes first if the process has mapped it,
    as torch for ROCm does, or an MPI library that can use it; alone, if ``UNICOLL_HIP_LIBRARY``
    names it.
    """
    if os.environ.get(hip_driver.VARIABLE):
        return hip_driver.load()
    drivers = [cuda_driver.load, hip_driver.load]
    # Both are tried in either order: torch for ROCm has mapped HIP, but so has an MPI library that
    # is built for both kinds of devices.
    if hip_driver.FILE.mapped():
        drivers.reverse()
    reasons = []
    for driver in drivers:
        found = driver()
        if not isinstance(found, str):
            return found
        reasons.append(found)
    # On a machine without AMD's kernel driver the missing HIP runtime is no reason that helps the
    # user.
    if not hip_driver.is_expected():
        del reasons[drivers.index(hip_driver.load)]
    return "; ".join(reasons)
