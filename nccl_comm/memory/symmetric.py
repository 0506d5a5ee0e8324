"""Symmetric memory: NCCL allocates it and registers it with a communicator, for its symmetric kernels and zero-copy
transports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakSet

from nccl_comm.communicators.communicator import Communicator
from nccl_comm.in_flight import PendingWork
from nccl_comm.library.api import IN_PROGRESS
from nccl_comm.library.structs import version_text
from unicoll.arrays.buffer import current_streams
from unicoll.arrays.cuda import LEGACY_STREAM, CudaError, await_event, on_device
from unicoll.arrays.types import DType
from unicoll.errors import BackendUnavailableError

__all__ = ["DeviceArray", "SymmetricMemory"]

_REAP_S = 5.0


@dataclass(frozen=True)
class _Dropped:
    """Memory without references, and the work that may still use it."""

    ptr: int
    window: int
    operations: tuple[PendingWork, ...]
    events: tuple[int, ...]


class SymmetricMemory:
    """A group's symmetric memory, from its allocation until it is freed.

    ncclMemFree waits for nothing, and the last reference to an array may be dropped on any thread. So the memory is
    freed later, on a thread that NCCL allows (:meth:`reap`): after the group's operations that were in flight, and
    after the work that was then on the current streams of the thread that dropped the array.

    Args:
        comm: the group's communicator.
        operations: the group's operations in flight.
    """

    def __init__(self, comm: Communicator, operations: Iterable[PendingWork]) -> None:
        self._comm = comm
        self._operations = operations
        self._arrays: WeakSet[DeviceArray] = WeakSet()
        self._dropped: deque[_Dropped] = deque()
        self._ended = self._abandoned = False

    def allocate(self, shape: tuple[int, ...], dtype: DType, timeout: float) -> DeviceArray:
        """Allocate and register; all members call this with the same size, on the communicator's device.

        Raises:
            BackendUnavailableError: this NCCL has no windows (they came with 2.27).
            DistBackendError: NCCL could not allocate or register.
        """
        comm, nccl = self._comm, self._comm.nccl
        if not nccl.has("ncclCommWindowRegister"):
            raise BackendUnavailableError(
                f"symmetric_empty: NCCL {version_text(nccl.version)} has no windows, which came with 2.27"
            )
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        code, ptr = nccl.mem_alloc(max(nbytes, 1))
        if code:
            raise comm.error(code, f"ncclMemAlloc of {nbytes} bytes", None)
        code, window = nccl.window_register(comm.handle, ptr, max(nbytes, 1), True)
        try:
            if code == IN_PROGRESS:
                comm.await_ready("ncclCommWindowRegister", time.monotonic() + timeout, None)
            elif code:
                raise comm.error(code, "ncclCommWindowRegister", None)
        except BaseException:
            nccl.mem_free(ptr)
            raise
        made = DeviceArray(self, ptr, window.value or 0, shape, dtype, comm.device)
        self._arrays.add(made)
        return made

    def drop(self, ptr: int, window: int) -> None:
        """Take the memory of an array without references; any thread, since the garbage collector runs on any."""
        cuda, device, events = self._comm.cuda, self._comm.device, []
        if self._abandoned:
            return
        try:
            with on_device(cuda, device):
                for stream in current_streams(device):  # the user keeps a graph's arrays
                    if stream <= LEGACY_STREAM or not cuda.capturing(stream):
                        events.append(cuda.create_event(device))
                        cuda.record(events[-1], stream)
        except CudaError:  # the device has failed: the memory is not freed
            return
        self._dropped.append(_Dropped(ptr, window, tuple(self._operations), tuple(events)))
        if self._ended:
            self.reap(time.monotonic() + _REAP_S)

    @property
    def ready(self) -> bool:
        """True if :meth:`reap` can free memory."""
        return bool(self._dropped) and self._unused(self._dropped[0], 0.0)

    def _unused(self, one: _Dropped, deadline: float) -> bool:
        return all(work.done for work in one.operations) and all(
            await_event(self._comm.cuda, e, deadline) for e in one.events
        )

    def reap(self, deadline: float = 0.0) -> None:
        """Free the memory that the device no longer uses; no other thread is in NCCL with the communicator."""
        comm = self._comm
        while self._dropped and self._unused(self._dropped[0], deadline):
            one = self._dropped.popleft()
            window = one.window if comm.handle else 0  # windows end with their communicator
            if not window or not comm.nccl.window_deregister(comm.handle, window):
                comm.nccl.mem_free(one.ptr)
            for event in one.events:
                comm.cuda.destroy_event(event)

    @property
    def arrays(self) -> list[DeviceArray]:
        """The arrays that still have references."""
        return list(self._arrays)

    def deregister(self) -> None:
        """Deregister all windows before the communicator ends; nothing is in flight. The memory stays allocated."""
        self.reap(time.monotonic() + _REAP_S)
        for array in list(self._arrays):
            array.deregister(self._comm)

    def close(self, ended: bool) -> None:
        """Called after the communicator has ended, or with ``ended=False`` was abandoned: its kernels may still run."""
        self._ended, self._abandoned = True, not ended
        if ended:
            self.reap(time.monotonic() + _REAP_S)


class DeviceArray:
    """An array in symmetric memory; CuPy and torch use it through ``__cuda_array_interface__``.

    Its memory is freed after the group's operations in flight, and after the work on the current streams of the thread
    that drops the last reference. Wait for other streams that use the array before you drop it.

    Attributes:
        shape, dtype: of the array; a type that NumPy lacks is an unsigned integer type of its size.
        device: ordinal of its device.
    """

    def __init__(
        self, owner: SymmetricMemory, ptr: int, window: int, shape: tuple[int, ...], dtype: DType, device: int
    ) -> None:
        self._owner = owner
        self._ptr = ptr
        self._window = window
        self.shape = shape
        self.dtype = dtype.storage
        self.device = device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, with no stream to wait for."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    @property
    def ptr(self) -> int:
        """Device address."""
        return self._ptr

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def window(self) -> int:
        """NCCL's handle of the window; 0 if NCCL gave none, or the group has ended."""
        return self._window

    def deregister(self, comm: Communicator) -> None:
        """Deregister the window; the memory stays allocated."""
        window, self._window = self._window, 0
        if window and comm.handle:
            comm.nccl.window_deregister(comm.handle, window)

    def __del__(self) -> None:
        self._owner.drop(self._ptr, self._window)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on cuda:{self.device}, symmetric>"
