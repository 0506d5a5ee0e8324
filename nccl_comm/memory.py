"""Memory that NCCL allocates and registers with a communicator, for its symmetric kernels and zero-copy transports."""

from __future__ import annotations

import time
from math import prod
from typing import Any

from unicoll.errors import BackendUnavailableError
from unicoll.types import DType

from .api import IN_PROGRESS
from .communicator import Communicator
from .structs import version_text

__all__ = ["DeviceArray", "symmetric_array"]


class DeviceArray:
    """An array in memory of NCCL's; use it through CuPy or torch, which take ``__cuda_array_interface__``.

    Attributes:
        shape, dtype: of the array; types that NumPy lacks come as unsigned integers of their size.
        device: ordinal of its device.
    """

    def __init__(self, communicator: Communicator, ptr: int, window: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._communicator = communicator
        self._ptr = ptr
        self._window = window
        self.shape = shape
        self.dtype = dtype.storage
        self.device = communicator.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3: the memory is ordered by no stream yet."""
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self._ptr, False), "strides": None, "version": 3,
            "stream": None,
        }  # fmt: skip

    @property
    def ptr(self) -> int:
        """Where it is."""
        return self._ptr

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return prod(self.shape) * self.dtype.itemsize

    def deregister(self) -> None:
        """The communicator is about to end; the memory stays. Idempotent."""
        window, self._window = self._window, 0
        if window and self._communicator.handle:
            self._communicator.nccl.window_deregister(self._communicator.handle, window)

    def __del__(self) -> None:
        self.deregister()
        ptr, self._ptr = self._ptr, 0
        if ptr:
            self._communicator.nccl.mem_free(ptr)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on cuda:{self.device}, symmetric>"


def symmetric_array(communicator: Communicator, shape: tuple[int, ...], dtype: DType, timeout: float) -> DeviceArray:
    """Allocate and register; all members call this with the same size, on the communicator's device.

    Raises:
        BackendUnavailableError: this NCCL has no windows (they came with 2.27).
        DistBackendError: NCCL could not allocate or register.
    """
    nccl = communicator.nccl
    if not nccl.has("ncclCommWindowRegister"):
        raise BackendUnavailableError(
            f"symmetric_empty: NCCL {version_text(nccl.version)} has no windows, which came with 2.27"
        )
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    code, ptr = nccl.mem_alloc(max(nbytes, 1))
    if code:
        raise communicator.error(code, f"ncclMemAlloc of {nbytes} bytes", None)
    code, window = nccl.window_register(communicator.handle, ptr, max(nbytes, 1), True)
    try:
        if code == IN_PROGRESS:
            communicator.await_ready("ncclCommWindowRegister", time.monotonic() + timeout, None)
        elif code:
            raise communicator.error(code, "ncclCommWindowRegister", None)
    except BaseException:
        nccl.mem_free(ptr)
        raise
    return DeviceArray(communicator, ptr, window.value or 0, shape, dtype)
