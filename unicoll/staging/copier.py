"""Copies of device arrays to pinned host memory and back: streams, events and pinned memory of a
group."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from unicoll.arrays.conversion import Buffer
from unicoll.calls.call import Call
from unicoll.devices.device_runtime import (
    LEGACY_STREAM,
    PER_THREAD_STREAM,
    DeviceError,
    DeviceRuntime,
    await_event,
    on_device,
)
from unicoll.errors import DistArgumentError, OperationTimeoutError
from unicoll.staging.pinned_pool import PinnedBlock, PinnedPool

_SETTLE_S = 5.0
"""How long closing waits for the device."""


@dataclass(frozen=True)
class CopyStreams:
    """Streams of a device for both directions, and an event that orders them after the producers'
    streams."""

    to_host: int
    to_device: int
    produced: int


@dataclass(frozen=True)
class _RetainedMemory:
    """Memory of a call that ended before the device was done with it.

    Attributes:
        memory: on the host; empty if the backend may use it until the process ends.
        buffers: on the device.
        events: recorded after the last use.
    """

    memory: Sequence[PinnedBlock]
    buffers: Sequence[Buffer]
    device: int
    events: Sequence[int]


class HostCopier:
    """Copies of a group between devices and the host; any thread.

    Attributes:
        runtime: of the devices.
        pinned: pinned host memory.
    """

    def __init__(self, runtime: DeviceRuntime, group: str) -> None:
        self.runtime = runtime
        self.pinned = PinnedPool(runtime)
        self._group = group
        self._lock = threading.Lock()
        self._streams: dict[int, CopyStreams] = {}
        # Events for reuse, each with its device. An EventPool would also destroy the events of
        # retained memory.
        self._events: list[tuple[int, int]] = []
        self._retained: list[_RetainedMemory] = []

    def streams(self, device: int) -> CopyStreams:
        """The streams of a device, created at the first use."""
        with self._lock:
            found = self._streams.get(device)
            if found is None:
                c = self.runtime
                found = CopyStreams(
                    c.create_stream(device), c.create_stream(device), c.create_event(device)
                )
                self._streams[device] = found
            return found

    def event(self, device: int) -> int:
        """An event that is not in use."""
        with self._lock:
            for i, (on, event) in enumerate(self._events):
                if on == device:
                    del self._events[i]
                    return event
        return self.runtime.create_event(device)

    def begin(self, call: Call) -> int:
        """Order the group's streams after the work on the streams of a call's arrays; returns the
        arrays' device.

        Raises:
            DistArgumentError: a stream records a graph.
        """
        self._release_retained()
        buffers = (*call.inputs, *call.outputs)
        device, c = buffers[0].device.index or 0, self.runtime
        with on_device(c, device):
            streams = self.streams(device)
            for stream in {b.stream for b in buffers}:
                if stream > LEGACY_STREAM and c.capturing(stream):
                    raise DistArgumentError(
                        f"{call.op.name}: arrays of a GPU go through host memory, which a graph"
                        " cannot record",
                        op=call.op.name,
                    )
                # The streams share one event. Another thread that recorded it between these lines
                # would order the streams after its own arrays. Both streams wait, because the
                # caller's stream may still use the outputs, which the copies to the device write.
                with self._lock:
                    c.record(streams.produced, stream)
                    c.wait_event(streams.to_host, streams.produced)
                    c.wait_event(streams.to_device, streams.produced)
        return device

    def wait(self, event: int, call: Call, deadline: float) -> None:
        """Block the host until the device has reached an event.

        Raises:
            OperationTimeoutError: it has not by ``deadline``.
        """
        if not await_event(self.runtime, event, deadline):
            raise OperationTimeoutError(
                f"{call.describe()} on group {self._group!r} timed out after {call.timeout:g} s:"
                " the device of this rank has not finished the work before it",
                group=self._group,
                op=call.op.name,
                seq=call.seq,
            )

    def enqueue(
        self,
        buffer: Buffer,
        ranges: Sequence[tuple[int, int]],
        pinned: PinnedBlock,
        streams: CopyStreams,
        to_device: bool,
    ) -> None:
        """Enqueue the copies of ranges of a device buffer to pinned memory, or back ``to_device``.

        Args:
            buffer: on the device.
            ranges: first element and number of elements of each; they are contiguous in the pinned
                memory.
            pinned: memory for all ranges.
            streams: of the device, which must be the current device.
        """
        itemsize, in_host = buffer.dtype.itemsize, pinned.ptr
        stream = streams.to_device if to_device else streams.to_host
        for first, count in ranges:
            in_device = buffer.ptr + first * itemsize
            target, source = (in_device, in_host) if to_device else (in_host, in_device)
            if count:
                self.runtime.copy(target, source, count * itemsize, stream)
            in_host += count * itemsize

    def move(
        self, call: Call, device: int, buffer: Buffer, pinned: PinnedBlock, to_device: bool
    ) -> None:
        """Copy a whole buffer to pinned memory, or back ``to_device``; blocks the host, up to the
        call's timeout."""
        c, event = self.runtime, self.event(device)
        with on_device(c, device):
            streams = self.streams(device)
            stream = streams.to_device if to_device else streams.to_host
            try:
                self.enqueue(buffer, ((0, buffer.count),), pinned, streams, to_device)
                c.record(event, stream)
                self.wait(event, call, time.monotonic() + call.timeout)
            except BaseException:
                # A signal's handler may have raised behind the copy, before the event was recorded.
                c.record(event, stream)
                self.retain((pinned,), (buffer,), device, (event,))
                raise
        self.release((), device, (event,))

    def release(self, memory: Sequence[PinnedBlock], device: int, events: Sequence[int]) -> None:
        """Return memory and events that nothing uses any more."""
        for pinned in memory:
            self.pinned.give(pinned)
        with self._lock:
            self._events += [(device, event) for event in events]

    def retain(
        self,
        memory: Sequence[PinnedBlock],
        buffers: Sequence[Buffer],
        device: int,
        events: Sequence[int],
    ) -> None:
        """Keep memory and events of a call until the device is done with them."""
        with self._lock:
            self._retained.append(_RetainedMemory(memory, buffers, device, events))

    def keep(self, buffer: Buffer) -> None:
        """Keep a buffer until the work enqueued on the current stream is done, unless it is ordered
        by its stream."""
        stream = buffer.current_stream() if buffer.current_stream is not None else buffer.stream
        # Later uses of the memory are on the buffer's stream, and so after the work on it. The
        # handle of the per-thread default stream means another stream on each thread.
        if stream == buffer.stream != PER_THREAD_STREAM:
            return
        device = buffer.device.index or 0
        with on_device(self.runtime, device):
            if stream > LEGACY_STREAM and self.runtime.capturing(stream):
                # The program that records a graph keeps its arrays.
                return
            event = self.event(device)
            self.runtime.record(event, stream)
        self.retain((), (buffer,), device, (event,))

    def _release_retained(self, deadline: float = 0.0) -> None:
        """Release retained memory that the device is done with; wait for the device until
        ``deadline``."""
        if not self._retained:
            return
        with self._lock:
            # The list is taken, so that no other thread releases the same memory. What the device
            # still uses goes into the new list.
            retained, self._retained = self._retained, []
        for one in retained:
            if self._is_done(one, deadline):
                self.release(one.memory, one.device, one.events)
            else:
                self.retain(one.memory, one.buffers, one.device, one.events)

    def _is_done(self, one: _RetainedMemory, deadline: float) -> bool:
        try:
            return all(await_event(self.runtime, event, deadline) for event in one.events)
        except DeviceError:
            # It is not known what the device still uses.
            return False

    def close(self) -> None:
        """Release everything except memory that a device still uses."""
        self._release_retained(time.monotonic() + _SETTLE_S)
        streams, self._streams = self._streams, {}
        for device, each in streams.items():
            with on_device(self.runtime, device):
                self.runtime.destroy_stream(each.to_host)
                self.runtime.destroy_stream(each.to_device)
                self.runtime.destroy_event(each.produced)
        events, self._events = self._events, []
        for _, event in events:
            self.runtime.destroy_event(event)
        self.pinned.close()
