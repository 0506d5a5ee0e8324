"""What torch's and dpctl's runtimes of SYCL devices have in common.

SYCL has no C API, so its calls go through a Python library. A stream is a ``sycl::queue``; its handle is the queue's
address, as in ``torch.xpu.Stream.sycl_queue`` and ``dpctl.SyclQueue.addressof_ref()``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from unicoll.arrays.device_runtime import DeviceRuntime


class SyclRuntime(DeviceRuntime):
    """What is common to both: handles, and what SYCL does not have."""

    name = "SYCL"
    device_type = "xpu"
    visible_devices = "ZE_AFFINITY_MASK"

    @abstractmethod
    def place_of(self, queue: Any) -> tuple[int, int]:
        """The ordinal of the device of a ``dpctl.SyclQueue``, and the stream's handle."""

    @abstractmethod
    def default_stream(self, device: int) -> int:
        """Handle of the stream of arrays whose library names none."""

    @abstractmethod
    def has_gpus(self) -> bool:
        """True if the devices are Intel's GPUs."""

    def capturing(self, stream: int) -> bool:
        return False

    def ignore_captures(self) -> None:
        pass

    def allocation(self, ptr: int) -> int:
        return ptr
