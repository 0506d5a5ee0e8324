"""Arrays on a GPU over a backend whose library takes their addresses.

The library knows nothing of streams. So before it gets an address the host waits until the device has done all that
the caller's streams held when the call was made: for what produces the inputs, and for what still uses the outputs. The
wait is in the place that the call has in the group's order, so an asynchronous call returns at once.

When the library is done, so are the results: it completes on the host, not on a stream. Whatever is put on any stream
from then on comes after them, and ``wait()`` has nothing left to order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .backend import Backend
from .buffers import Buffer
from .call import Call, ProxyCall
from .device_memory import DeviceMemory, Rooms
from .dock import Dock
from .errors import DistError, GroupAbortedError
from .streams import await_event, on_device

__all__ = ["Direct"]

_BY_ADDRESS = -5
"""What stands in the signatures of calls by address; see also :mod:`unicoll.exchanged`."""


class Direct:
    """Calls on device arrays as calls that a backend does by address.

    Args:
        host: the backend; its collectives go through a :class:`~unicoll.lane.Lane`.
        dock: of the group.
        group: its name.
    """

    def __init__(self, host: Backend, dock: Dock, group: str) -> None:
        self._host = host
        self._dock = dock
        self._group = group
        self._lock = threading.Lock()
        self._rooms: dict[int, Rooms] = {}
        self._awaited: set[int] = set()  # events of calls whose turn has not come

    @property
    def held(self) -> int:
        """Bytes of device memory that are held."""
        return sum(rooms.held for rooms in self._rooms.values())

    def carrier(self, call: Call) -> Callable[[Callable[[Call], None]], None]:
        """What does a collective at its place in the group's order; the arrays are taken as they will be now.

        Raises:
            DistArgumentError: a stream records a graph.
        """
        device = self._dock.begin(call)
        event = self.mark(device)
        with self._lock:
            self._awaited.add(event)
        return partial(self._carry, call, device, event)

    def _carry(self, call: Call, device: int, event: int, execute: Callable[[Call], None]) -> None:
        call.carry = None
        deadline = time.monotonic() + call.timeout
        with self._lock:
            self._awaited.discard(event)
        with on_device(self._dock.cuda, device):
            try:
                self.await_producers(call, device, event, deadline)
            except BaseException as e:
                cause = e if isinstance(e, DistError) else GroupAbortedError(f"{e}", group=self._group)
                self._host.abort(cause)  # the call that the others are in will not come
                raise
            execute(self.by_address(call, device, deadline))

    def mark(self, device: int) -> int:
        """An event for all that the caller's streams hold, which :meth:`Dock.begin` has let ours wait for."""
        event = self._dock.event(device)
        with on_device(self._dock.cuda, device):
            self._dock.cuda.record(event, self._dock.lanes(device).down)
        return event

    def await_producers(self, call: Call, device: int, event: int, deadline: float) -> None:
        """Block the host until the device has done what was before a call.

        Raises:
            OperationTimeoutError: it has not by ``deadline``.
        """
        try:
            self._dock.wait(event, call, deadline)
        except BaseException:
            self._dock.lose((), (*call.inputs, *call.outputs), device, (event,))
            raise
        self._dock.give((), device, (event,))

    def unused(self, device: int) -> bool:
        """Whether the device has done already what was before a call; never blocks."""
        event = self.mark(device)
        done = await_event(self._dock.cuda, event, 0.0)
        self._dock.give((), device, (event,))
        return done

    def by_address(self, call: Call, device: int, deadline: float) -> Call:
        """A call on device arrays as the backend gets it: each has a flat of device memory."""
        memory = DeviceMemory(self._dock, self._rooms_on(device), device, call, deadline)
        made: dict[int, Buffer] = {}
        for buffer in (*call.inputs, *call.outputs):
            if id(buffer) not in made:
                flat: Any = memory.flat(buffer)
                made[id(buffer)] = Buffer(
                    buffer, buffer.dtype, buffer.shape, flat, buffer.writable, None, buffer.device, buffer.ptr
                )
        inputs = tuple(made[id(b)] for b in call.inputs)
        outputs = inputs if call.outputs is call.inputs else tuple(made[id(b)] for b in call.outputs)
        handed = ProxyCall(call, call.op, inputs, outputs, call.timeout, call.reduce, call.root)
        handed.in_counts, handed.out_counts, handed.even = call.in_counts, call.out_counts, call.even
        handed.signature = hash((call.signature, _BY_ADDRESS))  # a rank whose arrays are elsewhere calls MPI otherwise
        return handed

    def _rooms_on(self, device: int) -> Rooms:
        with self._lock:
            if device not in self._rooms:
                self._rooms[device] = Rooms(self._dock.cuda, device)
            return self._rooms[device]

    def close(self) -> None:
        """Give everything back; the backend has been closed."""
        with self._lock:
            awaited, self._awaited = self._awaited, set()
        for event in awaited:
            self._dock.cuda.destroy_event(event)
        for device, rooms in self._rooms.items():
            with on_device(self._dock.cuda, device):
                rooms.close()
