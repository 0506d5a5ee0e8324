"""What torch's and dpctl's runtimes of SYCL devices have in common.

SYCL has no C API, so its calls go through a Python library. A stream is a ``sycl::queue``; its
handle is the queue's address, as in ``torch.xpu.Stream.sycl_queue`` and
``dpctl.SyclQueue.addressof_ref()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unicoll.devices.device_runtime import CAPTURE_MODE_RELAXED, DeviceError, DeviceRuntime
from unicoll.errors import DistError, DistTypeError


class SyclRuntime(DeviceRuntime):
    """Handles, and what SYCL does not have."""

    name = "SYCL"
    device_type = "xpu"
    visible_devices = "ZE_AFFINITY_MASK"

    def place_of(self, queue: Any) -> tuple[int, int]:
        """The ordinal of the device of a ``dpctl.SyclQueue``, and the stream's handle.

        Raises:
            DistTypeError: the runtime is not dpctl's, or does not have the device.
        """
        raise DistTypeError(
            "arrays of dpctl cannot be communicated in a process with a torch for XPU: make tensors"
            " of them with torch.from_dlpack"
        )

    def default_queue(self, number: int) -> Any:
        """dpctl's queue of arrays that are made without one, on the device with a number in DLPack.

        Raises:
            DistTypeError: as :meth:`place_of`.
        """
        return self.place_of(None)

    def capturing(self, stream: int) -> bool:
        return False

    def ignore_captures(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        return mode

    def allocation(self, ptr: int) -> int:
        return ptr

    def device_of(self, ptr: int) -> int:
        raise DeviceError("SYCL does not tell the device of an address without its context")


@contextmanager
def errors(function: str) -> Iterator[None]:
    """Raise the exceptions of torch and dpctl, which have no class of their own, as DeviceError."""
    try:
        yield
    except DistError:
        raise
    except Exception as e:
        raise DeviceError(f"{function}: {e}") from e
