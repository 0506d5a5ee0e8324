"""Capture of streams into graphs, and replay, on the simulated device, with CUDA's rules.

A capture has a list of operations (a lane) for every stream that takes part: the one on which it began, and those that
waited for an event recorded in it. A replay puts a copy of every operation on streams of its own, one for each lane,
between two marks on the stream on which the graph is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from tests.simulated_nccl.streams import Op, Scheduler, Stream
from unicoll.devices.device_runtime import DeviceError

__all__ = ["Capture", "Graph"]


class Capture:
    """A capture in progress.

    Args:
        scheduler: owner of the streams.
        origin: stream on which it begins.
        mode: "global", "thread_local" or "relaxed", as cudaStreamCaptureMode.
    """

    def __init__(self, scheduler: Scheduler, origin: Stream, mode: str) -> None:
        if mode not in ("global", "thread_local", "relaxed"):
            raise ValueError(f"no capture mode {mode!r}")
        if origin.legacy:
            raise DeviceError("cudaErrorStreamCaptureUnsupported: the legacy stream cannot be captured")
        if origin.capture is not None:
            raise DeviceError("cudaErrorIllegalState: the stream records a graph already")
        self.scheduler = scheduler
        self.origin = origin
        self.mode = mode
        self.thread = threading.get_ident()
        self.reason: str | None = None
        self.lanes: dict[Stream, list[Op]] = {origin: []}
        origin.capture = self

    def add(self, stream: Stream, op: Op) -> None:
        """Record an operation."""
        self.check()
        for need in op.needs:
            if need.capture is not self:
                self.invalidate("an operation outside the capture was waited for")
                raise DeviceError("cudaErrorStreamCaptureIsolation: a wait for work outside the capture")
        lane = self.lanes[stream]
        lane.append(op)
        op.stream, op.seq, op.capture = stream, len(lane), self

    def join(self, stream: Stream) -> None:
        """Add a stream to the capture."""
        self.check()
        if stream.legacy:
            self.invalidate("the legacy stream waited for an event of the capture")
            raise DeviceError(
                "cudaErrorStreamCaptureImplicit: the legacy stream cannot take part in a capture"
            )
        self.lanes[stream] = []
        stream.capture = self

    def invalidate(self, reason: str) -> None:
        """Make the capture invalid: it can only be ended."""
        self.reason = self.reason or reason

    def check(self) -> None:
        """Raise DeviceError if the capture is invalid."""
        if self.reason is not None:
            raise DeviceError(f"cudaErrorStreamCaptureInvalidated: {self.reason}")

    def end(self, stream: Stream) -> Graph:
        """End the capture; the graph."""
        if stream is not self.origin:
            raise DeviceError("cudaErrorStreamCaptureUnmatched: the capture began on another stream")
        for each in self.lanes:
            each.capture = None
        self.check()
        joined = set(self._before(self.lanes[stream][-1:]))
        for each, lane in self.lanes.items():
            work = [op for op in lane if op.body is not None]
            if each is not stream and work and work[-1] not in joined:
                raise DeviceError(f"cudaErrorStreamCaptureUnjoined: {work[-1]} was not joined to the origin")
        return Graph(self)

    def _before(self, ops: list[Op]) -> Iterator[Op]:
        """These operations and all that they are ordered after."""
        seen: set[Op] = set()
        todo = list(ops)
        while todo:
            op = todo.pop()
            if op in seen:
                continue
            seen.add(op)
            yield op
            todo += op.needs
            assert op.stream is not None
            if op.seq > 1:
                todo.append(self.lanes[op.stream][op.seq - 2])


class Graph:
    """A recorded graph.

    Attributes:
        owners: the communicators of its operations, which must outlive the graph.
    """

    def __init__(self, capture: Capture) -> None:
        self._scheduler = capture.scheduler
        self._origin = capture.origin
        self._lanes = {stream: list(lane) for stream, lane in capture.lanes.items()}
        self._streams: dict[Stream, Stream] = {}
        self._last: Op | None = None
        self.owners = {op.owner for lane in self._lanes.values() for op in lane if op.owner is not None}
        for owner in self.owners:
            owner.captured_in(self)

    def launch(self, stream: Stream) -> None:
        """Put copies of all operations on streams, after and before marks on the given one."""
        scheduler = self._scheduler
        if stream.capture is not None:
            raise DeviceError("cudaErrorStreamCaptureUnsupported: graphs within graphs are not simulated")
        with scheduler.lock:
            if not self._lanes:
                raise DeviceError("cudaErrorInvalidValue: the graph has been destroyed")
            last = [self._last] if self._last is not None else []  # a graph does not overlap with itself
            start = scheduler.put(stream, Op("graph launch", needs=last))
            copies: dict[Op, Op] = {}
            ends = []
            for op in self._in_order():
                assert op.stream is not None
                lane = self._stream_for(op.stream)
                first = [start] if op.seq == 1 else []
                serial = op.owner.serial(lane) if op.owner is not None else []
                needs = [*first, *serial, *(copies[n] for n in op.needs)]
                copy = Op(f"{op.label} (replayed)", op.body, needs, op.reads, op.writes, op.owner)
                copies[op] = scheduler.put(lane, copy)
                if op.owner is not None:
                    op.owner.launched(copy)
                if op.seq == len(self._lanes[op.stream]):
                    ends.append(copy)
            self._last = scheduler.put(stream, Op("graph end", needs=ends))

    def _stream_for(self, stream: Stream) -> Stream:
        if stream not in self._streams:
            made = self._scheduler.new_stream(-1 - stream.handle, stream.device, blocking=False)
            self._streams[stream] = made
        return self._streams[stream]

    def _in_order(self) -> list[Op]:
        """All operations, each after those that it needs."""
        done: dict[Op, None] = {}
        positions = dict.fromkeys(self._lanes, 0)
        while any(positions[s] < len(lane) for s, lane in self._lanes.items()):
            for stream, lane in self._lanes.items():
                while positions[stream] < len(lane):
                    op = lane[positions[stream]]
                    if any(need not in done for need in op.needs):
                        break
                    done[op] = None
                    positions[stream] += 1
        return list(done)

    def destroy(self) -> None:
        """Destroy the graph; launched copies still run."""
        self._lanes = {}
        for owner in self.owners:
            owner.released_by(self)
        self.owners = set()
