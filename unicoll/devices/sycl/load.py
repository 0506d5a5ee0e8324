"""The runtime of SYCL devices in this process: torch's if the program has imported a torch for XPU,
else dpctl's."""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module

from unicoll.devices.device_runtime import DeviceRuntime

_LEVEL_ZERO = "libze_loader.so.1"


def load() -> DeviceRuntime | str:
    """The runtime of torch or dpctl; or the reason why no SYCL device can be used.

    dpctl is imported if it is installed and the machine has Intel's driver for GPUs.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "xpu") and torch.xpu.is_available():
        from unicoll.devices.sycl.torch_runtime import TorchRuntime

        return TorchRuntime(torch)
    if "dpctl" not in sys.modules:
        try:
            ctypes.CDLL(_LEVEL_ZERO)
        except OSError as e:
            return f"Intel's driver for GPUs cannot be loaded: {e}"
    from unicoll.devices.sycl.dpctl_runtime import DpctlRuntime

    try:
        dpctl = import_module("dpctl")
    except ImportError as e:
        return f"arrays on SYCL devices need a torch for XPU, imported before, or dpctl: {e}"
    made = DpctlRuntime(dpctl)
    return made if made.device_count() else "dpctl finds no SYCL device"
