"""A pool of pinned (page-locked) host memory: pinning costs more than copying."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.devices.device_runtime import DeviceRuntime

_LEAST = 4096
_KEPT = 64 << 20
"""Bytes that are kept for reuse; blocks that are given back beyond that are freed."""


class PinnedBlock:
    """A block of pinned memory.

    Attributes:
        ptr: its address.
        size: bytes.
        bytes: its memory as an array of uint8.
    """

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self.bytes: npt.NDArray[Any] = np.ctypeslib.as_array(
            (ctypes.c_uint8 * size).from_address(ptr)
        )


# DeviceMemoryPool is no base of this class: here users return a block, because __del__ cannot take
# a lock, and the bytes that are kept are limited.
class PinnedPool:
    """Pinned memory of a group; any thread.

    Attributes:
        held: bytes in use or kept.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._free: dict[int, list[PinnedBlock]] = {}
        self._kept = 0
        self._closed = False
        self.held = 0

    def take(self, nbytes: int) -> PinnedBlock:
        """A block of at least ``nbytes`` bytes."""
        size = _LEAST
        while size < nbytes:
            size *= 2
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept -= size
                return free.pop()
            self.held += size
        # The lock is released before, because pinning takes long.
        return PinnedBlock(self._runtime.pin(size), size)

    def give(self, pinned: PinnedBlock) -> None:
        """Return a block that nothing uses any more."""
        with self._lock:
            if not self._closed and self._kept + pinned.size <= _KEPT:
                self._kept += pinned.size
                self._free.setdefault(pinned.size, []).append(pinned)
                return
            self.held -= pinned.size
        self._runtime.unpin(pinned.ptr)

    def close(self) -> None:
        """Free the blocks that are not in use now, and the others when they are given back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, {}
        for pinned in [p for several in free.values() for p in several]:
            self.held -= pinned.size
            self._runtime.unpin(pinned.ptr)
