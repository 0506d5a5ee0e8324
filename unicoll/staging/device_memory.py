"""The device memory of one call, for a backend that gets device addresses: copies, temporary
arrays, and their pool.

Copies run on a stream of the group, and the host waits for them, since the library that gets the
address next does not use streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.device_flat import DeviceFlat, DeviceMemory
from unicoll.calls.call import Call
from unicoll.devices.device_runtime import DeviceRuntime, on_device
from unicoll.staging.copier import HostCopier

_MIN_BLOCK_BYTES = 4096
_MAX_POOLED_BYTES = 16 << 20
"""Largest block that is kept for reuse."""


class CallMemory(DeviceMemory):
    """Copies and temporary memory on the device of one call.

    Args:
        call: the call; it accounts for the time of the copies.
        deadline: ``time.monotonic()`` at which the call times out.
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
        return on_device(self._copier.runtime, self._device)

    def bind(self) -> None:
        self._copier.runtime.set_device(self._device)

    def flat(self, buffer: Buffer) -> DeviceFlat:
        return DeviceFlat(self, buffer.ptr, buffer.count, buffer.dtype.storage, buffer)

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceFlat:
        block = self._pool.allocate(count * dtype.itemsize)
        return DeviceFlat(self, block.ptr, count, dtype, block)

    def copy(self, pairs: Sequence[tuple[DeviceFlat, DeviceFlat]]) -> None:
        pairs = [
            (target, source)
            for target, source in pairs
            if source.nbytes and target.ptr != source.ptr
        ]
        if not pairs:
            return
        copier, device = self._copier, self._device
        stream, event = copier.streams(device).to_device, copier.event(device)
        # Copies of the device do not support overlapping memory, so such a pair goes through a
        # temporary array.
        temporaries = []
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
            # The copies may still run, and a temporary block returns to the pool with its last
            # reference.
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


# PinnedPool is no base of this class: here a block returns in __del__, so there is no lock, and any
# number of small blocks is kept.
class DeviceMemoryPool:
    """A pool of blocks on one device, since allocation waits for the device. Thread-safe.

    A block in use is kept by its references: memory that MPI may still write to is never reused.

    Attributes:
        held: bytes in use or pooled.
    """

    def __init__(self, cuda: DeviceRuntime, device: int) -> None:
        self._cuda = cuda
        self._device = device
        # This is used without a lock: __del__ may release a block at any point, also within this
        # class, where a lock would be held by the same thread.
        self._free: dict[int, deque[int]] = {}
        self._closed = False
        self.held = 0

    def allocate(self, nbytes: int) -> _PooledBlock:
        """A block of at least ``nbytes`` bytes."""
        size = _MIN_BLOCK_BYTES
        while size < nbytes:
            size *= 2
        try:
            # Another thread may take the last block between a test and the pop, so there is no
            # test.
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
        # A block that was in use when the pool was closed is freed with its last reference.
        if self._closed:
            self.close()

    def close(self) -> None:
        """Free all unused blocks now, and each block in use with its last reference."""
        self._closed = True
        for size, free in list(self._free.items()):
            while free:
                self._cuda.free(free.pop())
                self.held -= size
