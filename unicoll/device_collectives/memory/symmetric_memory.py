"""Symmetric memory: the library allocates it and registers it with a communicator, for its
symmetric kernels and zero-copy transports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np

from unicoll.arrays.buffer import current_streams
from unicoll.arrays.types import Device, DType
from unicoll.device_collectives.communicators.communicator import Communicator
from unicoll.device_collectives.in_flight import InFlight, PendingWork
from unicoll.device_collectives.memory.window_agreement import Extent, agree_on_windows
from unicoll.devices.device_runtime import LEGACY_STREAM, DeviceError, backoff, on_device
from unicoll.errors import BackendUnavailableError, DistBackendError

_FREE_S = 5.0
"""Seconds to wait for the device before dropped memory is freed: when memory is short, and when the
group closes."""


@dataclass(frozen=True, eq=False)
class _Dropped:
    """Memory without references, and the work that may still use it."""

    number: int
    ptr: int
    window: int
    operations: tuple[PendingWork, ...]
    events: tuple[int, ...]


class SymmetricMemory:
    """A group's symmetric memory, from its allocation until it is freed.

    ncclMemFree waits for nothing, and the last reference to an array may be dropped on any thread,
    and on each rank at another time. So the memory is freed later: when the device has done the
    group's operations that were in flight, and the work that was then on the current streams of the
    thread that dropped the array; and when all members have dropped it, before they register
    another window (:func:`agree_on_windows`), or at the end of the group.
    """

    def __init__(self, comm: Communicator, in_flight: InFlight) -> None:
        self._comm = comm
        self._in_flight = in_flight
        self._agreements = self._count = 0
        self._arrays: WeakSet[DeviceArray] = WeakSet()
        self._dropped: deque[_Dropped] = deque()
        self._ended = self._abandoned = False

    def allocate(self, shape: tuple[int, ...], dtype: DType, deadline: float) -> DeviceArray:
        """Allocate and register; all members call this with the same size, on the communicator's
        device.

        Raises:
            BackendUnavailableError: the library has no windows (they came with NCCL 2.27).
            DistBackendError: the library could not allocate or register, on any rank.
            DistArgumentError, OperationTimeoutError, RankLostError: as :func:`agree_on_windows`.
        """
        comm, library = self._comm, self._comm.library
        if not library.has("window_register"):
            raise BackendUnavailableError(
                f"symmetric_empty: windows need {library.needed('window_register')}"
            )
        nbytes = max(prod(shape) * dtype.itemsize, 1)
        ptr = self._allocate(nbytes, deadline)
        # The number is taken before the registration, which may fail on some members only: numbers
        # have to stay equal on all members. If the registration fails, the memory is not freed,
        # because the library may still use it.
        self._count += 1
        window = comm.register_window(ptr, nbytes, deadline)
        made = DeviceArray(self, self._count, ptr, window, shape, dtype.storage, comm.device)
        self._arrays.add(made)
        return made

    def _allocate(self, nbytes: int, deadline: float) -> int:
        """Memory on all members; if it is short, dropped memory is waited for once."""
        comm, library, failed = self._comm, self._comm.library, ""
        for wait in (0.0, _FREE_S):
            code, ptr = library.mem_alloc(nbytes)
            what = f"{library.symbol('mem_alloc')} of {nbytes} bytes"
            failure = str(comm.error(code, what, None)) if code else ""
            agreed = False
            try:
                # Also a member without memory agrees: the others wait for it, and all of them then
                # give their memory back and try again.
                failed = self.agree("symmetric_empty", [Extent(nbytes)], failure, deadline, wait)
                agreed = not failed
            finally:
                # This is in a finally clause: the agreement raises on a deadline or a lost rank,
                # and the memory is not registered yet.
                if ptr and not agreed:
                    library.mem_free(ptr)
            if agreed:
                return ptr
        raise DistBackendError(f"symmetric_empty: {failed}", group=comm.context.name)

    def agree(
        self, call: str, extents: list[Extent], failure: str, deadline: float, wait: float = 0.0
    ) -> str:
        """Agree with the other members on the next windows, and free what all have dropped; a
        member's failure."""
        until = time.monotonic() + wait
        dropped = [one.number for one in list(self._dropped) if self._unused(one, until)]
        self._agreements += 1
        freed, failed = agree_on_windows(
            self._comm.context, self._agreements, call, extents, dropped, failure, deadline
        )
        self._free(freed)
        return failed

    def drop(self, number: int, ptr: int, window: int) -> None:
        """Take the memory of an array without references; any thread, since the garbage collector
        runs on any."""
        runtime, device, events = self._comm.runtime, self._comm.device, []
        if self._abandoned:
            return
        try:
            with on_device(runtime, device):
                for stream in current_streams(Device(runtime.device_type, device)):
                    # The user keeps the arrays of a graph, and an event that a graph records cannot
                    # be queried.
                    if stream <= LEGACY_STREAM or not runtime.capturing(stream):
                        events.append(runtime.create_event(device))
                        runtime.record(events[-1], stream)
        except DeviceError:
            # The device has failed: the memory is not freed.
            return
        # The operations in flight are noted, and not only waited for on the current streams: they
        # may run on the group's own stream.
        operations = tuple(self._in_flight.operations)
        self._dropped.append(_Dropped(number, ptr, window, operations, tuple(events)))
        # After the end of the group no agreement comes that would free the memory.
        if self._ended:
            self._free_unused()

    def _unused(self, one: _Dropped, deadline: float) -> bool:
        """True if the device no longer uses dropped memory; waits for that until the deadline."""
        for _ in backoff():
            if all(self._in_flight.is_done(work) for work in one.operations) and all(
                self._comm.runtime.event_done(event) for event in one.events
            ):
                return True
            if time.monotonic() >= deadline:
                break
        return False

    def _free_unused(self) -> None:
        """Free all dropped memory that the device no longer uses after some seconds."""
        until = time.monotonic() + _FREE_S
        # After an error of the device it is not known what still uses the memory.
        with suppress(DeviceError):
            self._free([one.number for one in list(self._dropped) if self._unused(one, until)])

    def _free(self, numbers: Container[int]) -> None:
        """Free dropped memory that the device no longer uses; no other thread uses the
        communicator."""
        comm = self._comm
        # The deque is copied: the garbage collector may append to the deque at any point.
        for one in [one for one in list(self._dropped) if one.number in numbers]:
            self._dropped.remove(one)
            # Windows end with their communicator. If a window cannot be deregistered, NCCL may
            # still use the memory, which is not freed then.
            window = one.window if comm.handle else 0
            if not window or not comm.library.window_deregister(comm.handle, window):
                comm.library.mem_free(one.ptr)
            for event in one.events:
                comm.runtime.destroy_event(event)

    @property
    def arrays(self) -> list[DeviceArray]:
        """The arrays that still have references."""
        return list(self._arrays)

    def deregister(self) -> None:
        """Deregister all windows before the communicator ends; nothing is in flight. The memory
        stays allocated."""
        self._free_unused()
        for array in list(self._arrays):
            array.deregister(self._comm)

    def close(self, ended: bool) -> None:
        """Called after the communicator has ended, or with ``ended=False`` was abandoned: its
        kernels may still run."""
        # This comes first: from now on drop() frees the memory of an array itself, or leaves it.
        self._ended, self._abandoned = True, not ended
        if ended:
            self._free_unused()


@dataclass(eq=False, repr=False)
class DeviceArray:
    """An array in symmetric memory; CuPy and torch use it through ``__cuda_array_interface__``.

    Its memory is freed once all ranks have dropped their last reference: before the next symmetric
    memory of the group, or at the group's end, after the group's operations in flight and the work
    on the current streams of the thread that dropped it. Wait for other streams that use the array
    before you drop it.

    Attributes:
        owner: the group's symmetric memory; number: of the array in it, equal on all ranks.
        ptr: device address.
        window: the library's handle of the window; 0 if it gave none, or the group has ended.
        shape, dtype: of the array; a type that NumPy lacks is an unsigned integer type of its size.
        device: ordinal of its device.
    """

    owner: SymmetricMemory
    number: int
    ptr: int
    window: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, with no stream to wait for."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return prod(self.shape) * self.dtype.itemsize

    def deregister(self, comm: Communicator) -> None:
        """Deregister the window; the memory stays allocated."""
        window, self.window = self.window, 0
        if window and comm.handle:
            comm.library.window_deregister(comm.handle, window)

    def __del__(self) -> None:
        self.owner.drop(self.number, self.ptr, self.window)

    def __repr__(self) -> str:
        return f"<DeviceArray {self.dtype.name}{list(self.shape)} on cuda:{self.device}, symmetric>"
