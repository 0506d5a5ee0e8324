"""Arrays on a GPU over a backend whose library takes device addresses.

The library does not use streams. Before it gets an address the host therefore waits until the
device has done the work that the caller's streams held when the call was made: the work that
produces the inputs, and the work that still uses the outputs. The wait is in the place of the call
in the group's order, so an asynchronous call returns at once.

The library completes on the host, not on a stream, and the results are then there. Work enqueued on
any stream from then on comes after them, and ``wait()`` has nothing to order.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from unicoll.arrays.conversion import Buffer
from unicoll.backend.host import Execute, HostBackend
from unicoll.calls.call import Call, ProxyCall
from unicoll.devices.device_runtime import await_event, on_device
from unicoll.staging.copier import HostCopier
from unicoll.staging.device_memory import CallMemory, DeviceMemoryPool

_BY_ADDRESS = -5
"""Marks the signatures of calls by address; see also :mod:`unicoll.backend.host.size_agreement`."""


class DirectCalls:
    """Calls on device arrays as calls that a backend does by address."""

    def __init__(self, host: HostBackend, copier: HostCopier) -> None:
        self._host = host
        self._copier = copier
        self._lock = threading.Lock()
        self._pools: dict[int, DeviceMemoryPool] = {}
        # The events of calls that are not executed yet. A group that fails never executes them.
        self._queued: set[int] = set()

    @property
    def held(self) -> int:
        """Bytes of device memory held."""
        return sum(pool.held for pool in self._pools.values())

    def executor(self, call: Call) -> Execute:
        """The function that executes a collective; the arrays are used as they are on their streams
        now.

        Raises:
            DistArgumentError: a stream records a graph.
        """
        device = self._copier.begin(call)
        event = self.mark(device)
        with self._lock:
            self._queued.add(event)
        return partial(self._execute, device, event)

    def _execute(self, device: int, event: int, call: Call) -> None:
        deadline = time.monotonic() + call.timeout
        with self._lock:
            # From here on await_producers() returns the event.
            self._queued.discard(event)
        with on_device(self._copier.runtime, device):
            try:
                self.await_producers(call, device, event, deadline)
            except BaseException as e:
                # The other ranks wait in this call, of which the backend does not know yet.
                self._host.give_up(call, e)
                raise
            self._host.perform(self.by_address(call, device, deadline))

    def mark(self, device: int) -> int:
        """An event after the work on the caller's streams, after which :meth:`HostCopier.begin` has
        ordered ours."""
        event = self._copier.event(device)
        with on_device(self._copier.runtime, device):
            self._copier.runtime.record(event, self._copier.streams(device).to_host)
        return event

    def await_producers(self, call: Call, device: int, event: int, deadline: float) -> None:
        """Block the host until the device has done the work that precedes a call.

        Raises:
            OperationTimeoutError: it has not by ``deadline``.
        """
        try:
            self._copier.wait(event, call, deadline)
        except BaseException:
            self._copier.retain((), (*call.inputs, *call.outputs), device, (event,))
            raise
        self._copier.release((), device, (event,))

    def unused(self, device: int) -> bool:
        """True if the device has done the work that precedes a call; never blocks."""
        event = self.mark(device)
        done = await_event(self._copier.runtime, event, 0.0)
        self._copier.release((), device, (event,))
        return done

    def by_address(self, call: Call, device: int, deadline: float) -> Call:
        """A call on device arrays as the backend gets it: each buffer's ``flat`` is device
        memory."""
        memory = CallMemory(self._copier, self._pool(device), device, call, deadline)
        made: dict[int, Buffer] = {}
        for buffer in (*call.inputs, *call.outputs):
            if id(buffer) not in made:
                flat: Any = memory.flat(buffer)
                made[id(buffer)] = Buffer(
                    buffer,
                    buffer.dtype,
                    buffer.shape,
                    flat,
                    buffer.writable,
                    None,
                    buffer.device,
                    buffer.ptr,
                )
        inputs = tuple(made[id(b)] for b in call.inputs)
        outputs = (
            inputs if call.outputs is call.inputs else tuple(made[id(b)] for b in call.outputs)
        )
        proxy = ProxyCall(call, call.op, inputs, outputs, call.timeout, call.reduce, call.root)
        proxy.in_counts, proxy.out_counts, proxy.even = call.in_counts, call.out_counts, call.even
        # The signature differs from that of a call with host arrays, because a rank with host
        # arrays makes other calls of MPI.
        proxy.signature = hash((call.signature, _BY_ADDRESS))
        return proxy

    def _pool(self, device: int) -> DeviceMemoryPool:
        with self._lock:
            if device not in self._pools:
                self._pools[device] = DeviceMemoryPool(self._copier.runtime, device)
            return self._pools[device]

    def close(self) -> None:
        """Release everything; the backend has been closed."""
        with self._lock:
            queued, self._queued = self._queued, set()
        for event in queued:
            self._copier.runtime.destroy_event(event)
        for device, pool in self._pools.items():
            with on_device(self._copier.runtime, device):
                pool.close()
