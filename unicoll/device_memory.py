"""Memory of a GPU for backends whose library takes its addresses: pieces of arrays that can be sliced and copied.

A :class:`DeviceFlat` stands where the flat NumPy view of a host array would (:attr:`unicoll.buffers.Buffer.flat`), so a
backend treats both alike as long as it only slices, copies and passes on. Nothing here reads elements on the host.

Copies are done on a stream of the group, and the host waits for them: whoever gets the address next is a library that
knows nothing of streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import DistArgumentError
from .streams import on_device

if TYPE_CHECKING:
    from .buffers import Buffer
    from .call import Call
    from .dock import Dock
    from .streams import Cuda

__all__ = ["DeviceFlat", "DeviceMemory", "Rooms"]

_LEAST = 4096
_LARGEST_KEPT = 16 << 20
"""Bytes of the largest piece that is kept for the next user."""


class DeviceFlat:
    """Elements one behind the other in the memory of a device.

    Attributes:
        memory: of the call that it is used in.
        ptr: address of the first element.
        size: number of elements.
        dtype: their NumPy type; where NumPy lacks it, an unsigned integer of that width.
        owner: keeps the memory alive, for as long as anybody (MPI's requests, say) refers to this.
    """

    __slots__ = ("dtype", "memory", "owner", "ptr", "size")

    def __init__(self, memory: DeviceMemory, ptr: int, size: int, dtype: np.dtype[Any], owner: Any) -> None:
        self.memory = memory
        self.ptr = ptr
        self.size = size
        self.dtype = dtype
        self.owner = owner

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes, for libraries that take addresses (version 3 of the interface; no stream is to be waited for)."""
        return {
            "shape": (self.nbytes,), "typestr": "|u1", "data": (self.ptr, False), "strides": None, "version": 3,
            "stream": None,
        }  # fmt: skip

    def __getitem__(self, key: slice) -> DeviceFlat:
        start, stop, step = key.indices(self.size)
        if step != 1:
            raise DistArgumentError("device memory is cut into pieces without gaps only")
        size = max(0, stop - start)
        return DeviceFlat(self.memory, self.ptr + start * self.itemsize, size, self.dtype, self.owner)

    def view(self, dtype: Any) -> DeviceFlat:
        """The same bytes as elements of another type."""
        kind = np.dtype(dtype)
        return DeviceFlat(self.memory, self.ptr, self.nbytes // kind.itemsize, kind, self.owner)

    def overlaps(self, other: DeviceFlat) -> bool:
        """Whether the two have bytes in common."""
        apart = self.ptr + self.nbytes <= other.ptr or other.ptr + other.nbytes <= self.ptr
        return not apart and self.nbytes > 0 and other.nbytes > 0

    def __repr__(self) -> str:
        return f"<DeviceFlat {self.dtype}[{self.size}] at {self.ptr:#x}>"


class DeviceMemory:
    """The device of one call: where its arrays are copied within it, and where there is room to put them together.

    Args:
        dock: of the group.
        rooms: of the device.
        call: whose time the copies take.
        deadline: ``time.monotonic()`` at which it is over.

    Attributes:
        came: the message of a receive, as bytes, where it has come to the host's memory; else None.
    """

    def __init__(self, dock: Dock, rooms: Rooms, device: int, call: Call, deadline: float) -> None:
        self._dock = dock
        self._rooms = rooms
        self._device = device
        self._call = call
        self._deadline = deadline
        self.came: Any = None

    def bound(self) -> AbstractContextManager[None]:
        """Makes the device the thread's for a while: libraries that take its addresses want that."""
        return on_device(self._dock.cuda, self._device)

    def bind(self) -> None:
        """Make the device the thread's from now on."""
        self._dock.cuda.set_device(self._device)

    def flat(self, buffer: Buffer) -> DeviceFlat:
        """An array of the call."""
        return DeviceFlat(self, buffer.ptr, buffer.count, buffer.dtype.storage, buffer)

    def empty(self, count: int, dtype: np.dtype[Any]) -> DeviceFlat:
        """Room for ``count`` elements, which goes back when nobody refers to it any more."""
        room = self._rooms.take(count * dtype.itemsize)
        return DeviceFlat(self, room.ptr, count, dtype, room)

    def copy(self, pairs: Sequence[tuple[DeviceFlat, DeviceFlat]]) -> None:
        """Copy, for each (target, source), as many elements as these have; done when it returns.

        Raises:
            OperationTimeoutError: the device did not come to it in the call's time.
        """
        pairs = [(target, source) for target, source in pairs if source.nbytes and target.ptr != source.ptr]
        if not pairs:
            return
        dock, device = self._dock, self._device
        stream, event = dock.lanes(device).up, dock.event(device)
        rooms = []  # a device's copy is not meant for what overlaps
        for target, source in pairs:
            if target.overlaps(source):
                rooms.append(self.empty(source.size, source.dtype))
                dock.cuda.copy(rooms[-1].ptr, source.ptr, source.nbytes, stream)
                source = rooms[-1]
            dock.cuda.copy(target.ptr, source.ptr, source.nbytes, stream)
        dock.cuda.record(event, stream)
        try:
            dock.wait(event, self._call, max(self._deadline, time.monotonic()))
        except BaseException:
            owners = [each.owner for pair in (*pairs, rooms) for each in pair]
            dock.lose((), owners, device, (event,))
            raise
        dock.give((), device, (event,))


class _Room:
    """A piece of device memory that goes back with the last reference to it."""

    __slots__ = ("_give", "nbytes", "ptr")

    def __init__(self, ptr: int, nbytes: int, give: Callable[[int, int], None]) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self._give = give

    def __del__(self) -> None:
        self._give(self.ptr, self.nbytes)


class Rooms:
    """Memory of one device that is used again: allocating it waits for the device. Any thread.

    What is in use keeps itself: memory that MPI may still write to never comes back.

    Attributes:
        held: bytes that are in use or kept.
    """

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda = cuda
        self._device = device
        self._free: dict[
            int, deque[int]
        ] = {}  # no lock: what comes back may come back in the midst of anything
        self._closed = False
        self.held = 0

    def take(self, nbytes: int) -> _Room:
        """At least ``nbytes`` bytes."""
        size = _LEAST
        while size < nbytes:
            size *= 2
        try:
            ptr = self._free.setdefault(size, deque()).pop()
        except IndexError:
            ptr = self._cuda.allocate(self._device, size)
            self.held += size
        return _Room(ptr, size, self._give)

    def _give(self, ptr: int, size: int) -> None:
        if size > _LARGEST_KEPT:
            self._cuda.free(ptr)
            self.held -= size
            return
        self._free.setdefault(size, deque()).append(ptr)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Give back what is not in use, now, and the rest when nobody refers to it any more."""
        self._closed = True
        for size, free in list(self._free.items()):
            while free:
                self._cuda.free(free.pop())
                self.held -= size
