"""Device memory for backends whose library accepts device addresses: flat arrays that can be sliced and copied.

A :class:`DeviceFlat` replaces the flat NumPy view of a host array (:attr:`unicoll.arrays.buffer.Buffer.flat`). A
backend that only slices, copies and passes on flat arrays works with both. No element is read on the host.

Copies run on a stream of the group, and the host waits for them, since the library that gets the address next does not
use streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unicoll.arrays.device_runtime import on_device
from unicoll.errors import DistArgumentError

if TYPE_CHECKING:
    from unicoll.arrays.buffer import Buffer
    from unicoll.arrays.device_runtime import DeviceRuntime
    from unicoll.backend.call import Call
    from unicoll.staging.copier import HostCopier

_MIN_BLOCK_BYTES = 4096
_MAX_POOLED_BYTES = 16 << 20
"""Largest block that is kept for reuse."""


@dataclass(slots=True, eq=False, repr=False)
class DeviceFlat:
    """A contiguous 1-D array in device memory.

    Attributes:
        memory: the device memory of the call that uses it.
        ptr: address of the first element.
        size: number of elements.
        dtype: their NumPy type; for types that NumPy lacks, an unsigned integer of the same width.
        owner: keeps the memory alive while this object is referenced (by an MPI request, for example).
    """

    memory: DeviceMemory
    ptr: int
    size: int
    dtype: np.dtype[Any]
    owner: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory as bytes (version 3 of the interface; ``stream`` is None: no synchronisation needed)."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.ptr, False),
            "strides": None,
            "version": 3,
            "stream": None,
        }

    def __getitem__(self, key: slice) -> DeviceFlat:
        start, stop, step = key.indices(self.size)
        if step != 1:
            raise DistArgumentError("slices of device memory must have step 1")
        size = max(0, stop - start)
        return DeviceFlat(self.memory, self.ptr + start * self.itemsize, size, self.dtype, self.owner)

    def view(self, dtype: Any) -> DeviceFlat:
        """The same bytes as elements of another dtype."""
        kind = np.dtype(dtype)
        return DeviceFlat(self.memory, self.ptr, self.nbytes // kind.itemsize, kind, self.owner)

    def overlaps(self, other: DeviceFlat) -> bool:
        """True if the two have bytes in common."""
        disjoint = self.ptr + self.nbytes <= other.ptr or other.ptr + other.nbytes <= self.ptr
        return not disjoint and self.nbytes > 0 and other.nbytes > 0

    def __repr__(self) -> str:
        return f"<DeviceFlat {self.dtype}[{self.size}] at {self.ptr:#x}>"


class DeviceMemory:
    """Copies and temporary memory on the device of one call.

    Args:
        call: the call; it accounts for the time of the copies.
        deadline: ``time.monotonic()`` at which the call times out.

    Attributes:
        received: the bytes of a received message that arrived in host memory; else None.
    """

    def __init__(
        self, copier: HostCopier, pool: DeviceMemoryPool, device: int, call: Call, deadline: float
    ) -> None:
        self._copier = copier
        self._pool = pool
        self._device = device
        self._call = call
        self._deadline = deadline
        self.received: Any = None

    def bound(self) -> AbstractContextManager[None]:
        """Context in which the device is the thread's current one, which libraries that take device addresses need."""
        return on_device(self._copier.runtime, self._device)

    def bind(self) -> None:
        """Make the device the thread's current one."""
        self._copier.runtime.set_device(self._device)

    def flat(self, buffer: Buffer) -> DeviceFlat:
        """The memory of an array of the call."""
        return DeviceFlat(self, buffer.ptr, buffer.count, buffer.dtype.storage, buffer)

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceFlat:
        """Uninitialised memory for ``count`` elements; it returns to the pool with its last reference."""
        block = self._pool.allocate(count * dtype.itemsize)
        return DeviceFlat(self, block.ptr, count, dtype, block)

    def copy(self, pairs: Sequence[tuple[DeviceFlat, DeviceFlat]]) -> None:
        """Copy each source to its target, which has the same size; the copies are complete on return.

        Raises:
            OperationTimeoutError: the copies were not complete by the call's deadline.
        """
        pairs = [(target, source) for target, source in pairs if source.nbytes and target.ptr != source.ptr]
        if not pairs:
            return
        copier, device = self._copier, self._device
        stream, event = copier.streams(device).to_device, copier.event(device)
        temporaries = []  # device copies do not support overlapping memory
        for target, source in pairs:
            if target.overlaps(source):
                temporaries.append(self.empty(source.size, source.dtype))
                copier.runtime.copy(temporaries[-1].ptr, source.ptr, source.nbytes, stream)
                source = temporaries[-1]
            copier.runtime.copy(target.ptr, source.ptr, source.nbytes, stream)
        copier.runtime.record(event, stream)
        try:
            copier.wait(event, self._call, max(self._deadline, time.monotonic()))
        except BaseException:
            owners = [each.owner for pair in (*pairs, temporaries) for each in pair]
            copier.retain((), owners, device, (event,))
            raise
        copier.release((), device, (event,))


@dataclass(slots=True, eq=False)
class _PooledBlock:
    """A block of device memory that returns to its pool with its last reference."""

    ptr: int
    nbytes: int
    release: Callable[[int, int], None]

    def __del__(self) -> None:
        self.release(self.ptr, self.nbytes)


# Not with PinnedPool as a base: a block returns in __del__, so there is no lock, and any number of small ones is kept.
class DeviceMemoryPool:
    """A pool of blocks on one device, since allocation waits for the device. Thread-safe.

    A block in use is kept by its references: memory that MPI may still write to is never reused.

    Attributes:
        held: bytes in use or pooled.
    """

    def __init__(self, cuda: DeviceRuntime, device: int) -> None:
        self._cuda = cuda
        self._device = device
        # without a lock: __del__ may release a block at any point, also within this class
        self._free: dict[int, deque[int]] = {}
        self._closed = False
        self.held = 0

    def allocate(self, nbytes: int) -> _PooledBlock:
        """A block of at least ``nbytes`` bytes."""
        size = _MIN_BLOCK_BYTES
        while size < nbytes:
            size *= 2
        try:
            ptr = self._free.setdefault(size, deque()).pop()
        except IndexError:
            ptr = self._cuda.allocate(self._device, size)
            self.held += size
        return _PooledBlock(ptr, size, self._release)

    def _release(self, ptr: int, size: int) -> None:
        if size > _MAX_POOLED_BYTES:
            self._cuda.free(ptr)
            self.held -= size
            return
        self._free.setdefault(size, deque()).append(ptr)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Free all unused blocks now, and each block in use with its last reference."""
        self._closed = True
        for size, free in list(self._free.items()):
            while free:
                self._cuda.free(free.pop())
                self.held -= size
