"""Memory that NCCL allocates and registers with a communicator, for its symmetric kernels and zero-copy transports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakSet

from unicoll.buffers import current_streams
from unicoll.errors import BackendUnavailableError
from unicoll.streams import LEGACY_STREAM, CudaError, await_event, on_device
from unicoll.types import DType

from .api import IN_PROGRESS
from .communicator import Communicator
from .flights import Flight
from .structs import version_text

__all__ = ["DeviceArray", "SymmetricMemory"]

_PATIENCE_S = 5.0


@dataclass(frozen=True)
class _Dropped:
    """Memory that nobody refers to any more, and what the device may still do with it."""

    ptr: int
    window: int
    flights: tuple[Flight, ...]
    events: tuple[int, ...]


class SymmetricMemory:
    """What a group has of NCCL's memory, from its allocation until it goes back.

    ncclMemFree waits for nothing, and nobody knows on which thread the last reference to an array goes. So the memory
    goes back later, on a thread that NCCL allows (:meth:`reap`): behind the group's operations that were under way, and
    behind what the current streams of the thread that dropped the array had then.

    Args:
        comm: the group's communicator.
        flights: the group's operations under way.
    """

    def __init__(self, comm: Communicator, flights: Iterable[Flight]) -> None:
        self._comm = comm
        self._flights = flights
        self._arrays: WeakSet[DeviceArray] = WeakSet()
        self._dropped: deque[_Dropped] = deque()
        self._ended = self._lost = False

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
        """Nobody refers to an array any more; any thread, wherever garbage is collected."""
        cuda, device, events = self._comm.cuda, self._comm.device, []
        if self._lost:
            return
        try:
            with on_device(cuda, device):
                for stream in current_streams(device):  # a graph's arrays are its maker's to keep
                    if stream <= LEGACY_STREAM or not cuda.capturing(stream):
                        events.append(cuda.create_event(device))
                        cuda.record(events[-1], stream)
        except CudaError:  # the device is out of order: it keeps the memory
            return
        self._dropped.append(_Dropped(ptr, window, tuple(self._flights), tuple(events)))
        if self._ended:
            self.reap(time.monotonic() + _PATIENCE_S)

    @property
    def ready(self) -> bool:
        """Whether there is something for :meth:`reap`."""
        return bool(self._dropped) and self._unused(self._dropped[0], 0.0)

    def _unused(self, one: _Dropped, deadline: float) -> bool:
        return all(f.done for f in one.flights) and all(
            await_event(self._comm.cuda, e, deadline) for e in one.events
        )

    def reap(self, deadline: float = 0.0) -> None:
        """Give back what the device has done with; no other thread is in NCCL with the communicator."""
        comm = self._comm
        while self._dropped and self._unused(self._dropped[0], deadline):
            one = self._dropped.popleft()
            registered = one.window if comm.handle else 0  # windows end with their communicator
            if not registered or not comm.nccl.window_deregister(comm.handle, registered):
                comm.nccl.mem_free(one.ptr)
            for event in one.events:
                comm.cuda.destroy_event(event)

    @property
    def arrays(self) -> list[DeviceArray]:
        """Those that somebody refers to."""
        return list(self._arrays)

    def leave(self) -> None:
        """The communicator is about to end, and nothing of it is under way: its windows end, the memory stays."""
        self.reap(time.monotonic() + _PATIENCE_S)
        for array in list(self._arrays):
            array.deregister(self._comm)

    def end(self, over: bool) -> None:
        """The communicator has ended; without ``over`` it was left behind, and its kernels may use the memory."""
        self._ended, self._lost = True, not over
        if over:
            self.reap(time.monotonic() + _PATIENCE_S)


class DeviceArray:
    """An array in memory of NCCL's; use it through CuPy or torch, which take ``__cuda_array_interface__``.

    Its memory goes back behind what the group's operations, and the current streams of the thread that drops it, have
    still to do with it. Before it is dropped, other streams that use it have to be waited for.

    Attributes:
        shape, dtype: of the array; types that NumPy lacks come as unsigned integers of their size.
        device: ordinal of its device.
    """

    def __init__(
        self, home: SymmetricMemory, ptr: int, window: int, shape: tuple[int, ...], dtype: DType, device: int
    ) -> None:
        self._home = home
        self._ptr = ptr
        self._window = window
        self.shape = shape
        self.dtype = dtype.storage
        self.device = device

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

    @property
    def window(self) -> int:
        """NCCL's window; 0 if NCCL has given none, or the group has ended."""
        return self._window

    def deregister(self, comm: Communicator) -> None:
        """The communicator is about to end; the memory stays."""
        window, self._window = self._window, 0
        if window and comm.handle:
            comm.nccl.window_deregister(comm.handle, window)

    def __del__(self) -> None:
        self._home.drop(self._ptr, self._window)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on cuda:{self.device}, symmetric>"
