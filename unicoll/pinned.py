"""Page-locked host memory that is used again: pinning costs more than copying."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from .streams import Cuda

__all__ = ["Pinned", "Pins"]

_LEAST = 4096
_KEPT = 64 << 20
"""Bytes that are kept for the next user; what is given back beyond that is freed."""


class Pinned:
    """A piece of page-locked memory.

    Attributes:
        ptr: its address.
        size: bytes.
        bytes: its memory as an array of uint8.
    """

    __slots__ = ("bytes", "ptr", "size")

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self.bytes: npt.NDArray[Any] = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ptr))


class Pins:
    """A process's page-locked memory for one purpose; any thread.

    Attributes:
        held: bytes that are in use or kept.
    """

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._lock = threading.Lock()
        self._free: dict[int, list[Pinned]] = {}
        self._kept = 0
        self._closed = False
        self.held = 0

    def take(self, nbytes: int) -> Pinned:
        """At least ``nbytes`` bytes."""
        size = _LEAST
        while size < nbytes:
            size *= 2
        with self._lock:
            free = self._free.get(size)
            if free:
                self._kept -= size
                return free.pop()
            self.held += size
        return Pinned(self._cuda.pin(size), size)

    def give(self, pinned: Pinned) -> None:
        """Nothing uses the memory any more."""
        with self._lock:
            if not self._closed and self._kept + pinned.size <= _KEPT:
                self._kept += pinned.size
                self._free.setdefault(pinned.size, []).append(pinned)
                return
            self.held -= pinned.size
        self._cuda.unpin(pinned.ptr)

    def close(self) -> None:
        """Give back what is not in use, now, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, {}
        for pinned in [p for several in free.values() for p in several]:
            self.held -= pinned.size
            self._cuda.unpin(pinned.ptr)
