"""Where device arrays come ashore: streams, events and page-locked memory for copies between a device and the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .buffers import Buffer
from .call import Call
from .errors import DistArgumentError, OperationTimeoutError
from .pinned import Pinned, Pins
from .streams import LEGACY_STREAM, PER_THREAD_STREAM, Cuda, await_event, on_device

__all__ = ["Dock", "Lanes"]

_SETTLE_S = 5.0


@dataclass(frozen=True)
class Lanes:
    """Streams of a device: to the host and back, and an event for what the producers had put on their streams."""

    down: int
    up: int
    before: int


@dataclass(frozen=True)
class _Lost:
    """What a call has left behind: it stays until the device is done with it.

    Attributes:
        memory: on the host; none where the backend may use it until the process ends.
        buffers: on the device.
        events: that stand for the last use.
    """

    memory: Sequence[Pinned]
    buffers: Sequence[Buffer]
    device: int
    events: Sequence[int]


class Dock:
    """What a group needs to copy between devices and the host; any thread.

    Attributes:
        cuda: the devices.
        pins: page-locked memory.
    """

    def __init__(self, cuda: Cuda, group: str) -> None:
        self.cuda = cuda
        self.pins = Pins(cuda)
        self._group = group
        self._lock = threading.Lock()
        self._lanes: dict[int, Lanes] = {}
        self._events: list[tuple[int, int]] = []  # (device, event), to be used again
        self._lost: list[_Lost] = []

    def lanes(self, device: int) -> Lanes:
        """The streams of a device."""
        with self._lock:
            found = self._lanes.get(device)
            if found is None:
                c = self.cuda
                found = Lanes(c.create_stream(device), c.create_stream(device), c.create_event(device))
                self._lanes[device] = found
            return found

    def event(self, device: int) -> int:
        """An event that stands for nothing any more."""
        with self._lock:
            for i, (on, event) in enumerate(self._events):
                if on == device:
                    del self._events[i]
                    return event
        return self.cuda.create_event(device)

    def begin(self, call: Call) -> int:
        """Let our streams wait for whatever the caller's have to do with a call's arrays; their device.

        Raises:
            DistArgumentError: a stream records a graph.
        """
        self._reap()
        buffers = (*call.inputs, *call.outputs)
        device, c = buffers[0].device.index or 0, self.cuda
        with on_device(c, device):
            lanes = self.lanes(device)
            for stream in {b.stream for b in buffers}:
                if stream > LEGACY_STREAM and c.capturing(stream):
                    raise DistArgumentError(
                        f"{call.op.name}: arrays of a GPU go through the host here, which a graph cannot record",
                        op=call.op.name,
                    )
                with self._lock:
                    c.record(lanes.before, stream)
                    c.wait_event(lanes.down, lanes.before)
                    c.wait_event(lanes.up, lanes.before)
        return device

    def wait(self, event: int, call: Call, deadline: float) -> None:
        """Block the host until an event is done.

        Raises:
            OperationTimeoutError: it was not by ``deadline``.
        """
        if not await_event(self.cuda, event, deadline):
            raise OperationTimeoutError(
                f"{call.describe()} on group {self._group!r} timed out after {call.timeout:g} s: the device of this"
                " rank has not come to it",
                group=self._group,
                op=call.op.name,
                seq=call.seq,
            )

    def move(self, call: Call, device: int, buffer: Buffer, pinned: Pinned, back: bool) -> None:
        """Copy a whole buffer from the device, or ``back``; blocks the host, for the call's time at most."""
        c, event = self.cuda, self.event(device)
        with on_device(c, device):
            lanes = self.lanes(device)
            stream = lanes.up if back else lanes.down
            if buffer.nbytes:
                to, source = (buffer.ptr, pinned.ptr) if back else (pinned.ptr, buffer.ptr)
                c.copy(to, source, buffer.nbytes, stream)
            c.record(event, stream)
            try:
                self.wait(event, call, time.monotonic() + call.timeout)
            except BaseException:
                self.lose((pinned,), (buffer,), device, (event,))
                raise
        self.give((), device, (event,))

    def give(self, memory: Sequence[Pinned], device: int, events: Sequence[int]) -> None:
        """Nothing uses these any more."""
        for pinned in memory:
            self.pins.give(pinned)
        with self._lock:
            self._events += [(device, event) for event in events]

    def lose(
        self, memory: Sequence[Pinned], buffers: Sequence[Buffer], device: int, events: Sequence[int]
    ) -> None:
        """Keep what a call had until the device is done with it: one that failed, or whose results are still copied."""
        with self._lock:
            self._lost.append(_Lost(memory, buffers, device, events))

    def keep(self, buffer: Buffer) -> None:
        """Keep a buffer until all that is on the current stream now has been done, unless that is ordered anyway."""
        stream = buffer.here() if buffer.here is not None else buffer.stream
        if stream == buffer.stream != PER_THREAD_STREAM:  # whatever uses the memory again on this stream comes later
            return
        device = buffer.device.index or 0
        with on_device(self.cuda, device):
            if stream > LEGACY_STREAM and self.cuda.capturing(stream):
                return  # a graph's arrays are its maker's to keep
            event = self.event(device)
            self.cuda.record(event, stream)
        self.lose((), (buffer,), device, (event,))

    def _reap(self, deadline: float = 0.0) -> None:
        """Give back what calls have left behind and the device has done; wait for that until ``deadline``."""
        if not self._lost:
            return
        with self._lock:
            lost, self._lost = self._lost, []
        for one in lost:
            if all(await_event(self.cuda, event, deadline) for event in one.events):
                self.give(one.memory, one.device, one.events)
            else:
                self.lose(one.memory, one.buffers, one.device, one.events)

    def close(self) -> None:
        """Give everything back but what a device that hangs still uses."""
        self._reap(time.monotonic() + _SETTLE_S)
        lanes, self._lanes = self._lanes, {}
        for device, each in lanes.items():
            with on_device(self.cuda, device):
                self.cuda.destroy_stream(each.down)
                self.cuda.destroy_stream(each.up)
                self.cuda.destroy_event(each.before)
        events, self._events = self._events, []
        for _, event in events:
            self.cuda.destroy_event(event)
        self.pins.close()
