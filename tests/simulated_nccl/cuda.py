"""A CUDA device for tests on machines without one; its streams run late.

    simulation = Simulation(devices=1, policy="newest")
    unicoll.devices.runtimes.install("cuda", simulation.cuda)
    ...
    simulation.close()

In this package :mod:`streams` has the rules by which operations run, :mod:`memory` the memory and the detection of
races, :mod:`graphs` captures, and :mod:`arrays` arrays.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulated_nccl.graphs import Capture, Graph
from tests.simulated_nccl.memory import Memory, Pool
from tests.simulated_nccl.streams import Op, Scheduler, Stream, Trap
from unicoll.devices.device_runtime import CAPTURE_MODE_RELAXED, DeviceError, DeviceFacts, DeviceRuntime

__all__ = ["Simulation", "SimulatedCuda"]

_LEGACY = (0, 1)
_PER_THREAD = 2
_MEMORY = 8 << 30


class _Event:
    """An event: the operation that recorded it, None before the first; and the time at which that ran."""

    __slots__ = ("device", "op", "ran", "timing")

    def __init__(self, device: int, timing: bool) -> None:
        self.device = device
        self.timing = timing
        self.op: Op | None = None
        self.ran: list[float] = []


class _Thread(threading.local):
    """State of a host thread."""

    device = -1
    ignores_captures = False


class Simulation:
    """The devices of a process, and what tests check about them.

    Args:
        devices: number of devices that the process sees.
        name: part of the devices' unique ids; processes with the same name see the same devices.
        policy, seed, patience: see :class:`tests.simulated_nccl.streams.Scheduler`.
        capability: compute capability of the devices.
        runtime: the class of :attr:`cuda`; :class:`SimulatedCuda` by default.

    Attributes:
        cuda: for :func:`unicoll.devices.runtimes.install`.
        scheduler, memory, pool: streams and memory.
    """

    def __init__(
        self,
        devices: int = 1,
        name: str = "0",
        policy: str = "oldest",
        seed: int = 0,
        patience: float = 0.005,
        capability: tuple[int, int] = (9, 0),
        runtime: type[SimulatedCuda] | None = None,
    ) -> None:
        self.scheduler = Scheduler(policy, seed, patience)
        self.memory = Memory(self.scheduler)
        self.pool = Pool(self.memory, self.scheduler)
        made = SimulatedCuda if runtime is None else runtime
        self.cuda = made(self.scheduler, self.memory, devices, name, capability)
        self.hold = self.scheduler.hold

    @property
    def faults(self) -> list[str]:
        """Errors that a real device would not notice, or not survive: races, memory freed too early, crashes."""
        return self.scheduler.faults

    def synchronize(self) -> None:
        """Block the host until all streams are done."""
        self.cuda.refuse_under_capture("cudaDeviceSynchronize")
        for stream in list(self.scheduler.streams):
            self.scheduler.wait_for(stream.tail, f"all of {stream}")

    def synchronize_stream(self, handle: int) -> None:
        """Block the host until a stream is done."""
        stream = self.cuda.stream(handle)
        self.cuda.refuse_under_capture("cudaStreamSynchronize", stream)
        self.scheduler.wait_for(stream.tail, f"all of {stream}")

    def trap(self, handle: int) -> None:
        """Put a kernel that traps on a stream: when it runs, the context of this process ends."""

        def body(op: Op) -> None:
            raise Trap

        self.scheduler.put(self.cuda.stream(handle), Op("a kernel", body))

    def begin_capture(self, handle: int, mode: str = "relaxed") -> None:
        """Record the operations put on a stream, in place of running them."""
        self.cuda.captures.append(Capture(self.scheduler, self.cuda.stream(handle), mode))

    def end_capture(self, handle: int) -> Graph:
        """The graph of the operations put on a stream since :meth:`begin_capture`."""
        stream = self.cuda.stream(handle)
        capture = stream.capture
        if capture is None:
            raise DeviceError("cudaErrorIllegalState: the stream does not record a graph")
        try:
            return capture.end(stream)
        finally:
            if stream.capture is None:
                self.cuda.captures.remove(capture)

    @contextmanager
    def capture(self, handle: int, mode: str = "relaxed") -> Iterator[list[Graph]]:
        """Record within the block; the list contains the graph afterwards."""
        made: list[Graph] = []
        self.begin_capture(handle, mode)
        try:
            yield made
        except BaseException:
            try:
                self.end_capture(handle)
            except DeviceError:
                pass
            raise
        made.append(self.end_capture(handle))

    def leftovers(self) -> list[str]:
        """Streams, events and memory that were not freed, except the memory of the pool of arrays."""
        cuda, pooled = self.cuda, self.pool.blocks()
        with self.scheduler.lock:
            found = [f"{stream}" for stream in cuda.streams.values()]
            found += [f"event {handle:#x}" for handle in cuda.events]
            return found + [f"{block}" for block in self.memory.blocks() if block not in pooled]

    def launch(self, graph: Graph, handle: int) -> None:
        """Launch a graph on a stream."""
        graph.launch(self.cuda.stream(handle))

    def close(self) -> None:
        """End the device's thread."""
        self.scheduler.close()


class SimulatedCuda(DeviceRuntime):
    """The interface of unicoll to the simulated devices.

    Attributes:
        capability: compute capability of the devices.
        links: results of :meth:`reaches` by pair of devices; (True, True) for other pairs.
    """

    def __init__(
        self, scheduler: Scheduler, memory: Memory, devices: int, name: str, capability: tuple[int, int]
    ) -> None:
        self.capability = capability
        self._scheduler = scheduler
        self._memory = memory
        self._name = name
        self._count = devices
        self._thread = _Thread()
        self._handles = itertools.count(0x5000, 0x10)
        self._legacy = [scheduler.new_stream(1, d, blocking=False, legacy=True) for d in range(devices)]
        self._per_thread: dict[tuple[int, int], Stream] = {}
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, _Event] = {}
        self.captures: list[Capture] = []
        self.links: dict[tuple[int, int], tuple[bool, bool]] = {}

    @property
    def description(self) -> str:
        return "simulated CUDA"

    def device_count(self) -> int:
        return self._count

    def facts(self, device: int) -> DeviceFacts:
        self._check_device(device)
        uuid, bus = f"GPU-simulated-{self._name}-{device}", f"0000:{device:02x}:00.0"
        return DeviceFacts("Simulated GPU", uuid, bus, _MEMORY, self.capability)

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        self._check_device(device)
        self._check_device(other)
        return self.links.get((device, other), (True, True))

    def current_device(self) -> int:
        return self._thread.device

    def set_device(self, device: int) -> None:
        if device != -1:
            self._check_device(device)
        self._thread.device = device

    def _check_device(self, device: int) -> None:
        if not 0 <= device < self._count:
            raise DeviceError(f"cudaErrorInvalidDevice: device {device} of {self._count}")

    # --- streams and events ---

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        self._check_device(device)
        with self._scheduler.lock:
            self._scheduler.check()
            handle = next(self._handles)
            self.streams[handle] = self._scheduler.new_stream(handle, device, blocking=False)
            return handle

    def stream(self, handle: int) -> Stream:
        """The stream of a handle; a default stream is that of the calling thread's device."""
        device = max(0, self._thread.device)
        if handle in _LEGACY:
            return self._legacy[device]
        if handle == _PER_THREAD:
            key = (threading.get_ident(), device)
            if key not in self._per_thread:
                self._per_thread[key] = self._scheduler.new_stream(handle, device, blocking=True)
            return self._per_thread[key]
        found = self.streams.get(handle)
        if found is None:
            self._scheduler.fault(f"use of a stream that does not exist: {handle:#x}")
            raise DeviceError(f"cudaErrorInvalidResourceHandle: no stream {handle:#x}")
        return found

    def destroy_stream(self, stream: int) -> None:
        if self.stream(stream).capture is not None:
            raise DeviceError("cudaErrorStreamCaptureUnsupported: the stream records a graph")
        del self.streams[stream]

    def stream_done(self, stream: int) -> bool:
        found = self.stream(stream)
        self.refuse_under_capture("cudaStreamQuery", found)
        return self._scheduler.query(found.tail, f"all of {found}")

    def capturing(self, stream: int) -> bool:
        self._scheduler.check()
        return self.stream(stream).capture is not None

    def create_event(self, device: int, timing: bool = False) -> int:
        self._check_device(device)
        with self._scheduler.lock:
            self._scheduler.check()
            handle = next(self._handles)
            self.events[handle] = _Event(device, timing)
            return handle

    def _event(self, handle: int) -> _Event:
        found = self.events.get(handle)
        if found is None:
            self._scheduler.fault(f"use of an event that does not exist: {handle:#x}")
            raise DeviceError(f"cudaErrorInvalidResourceHandle: no event {handle:#x}")
        return found

    def destroy_event(self, event: int) -> None:
        self._event(event)
        del self.events[event]

    def record(self, event: int, stream: int) -> None:
        found, target = self._event(event), self.stream(stream)
        if found.device != target.device:
            raise DeviceError(
                f"cudaErrorInvalidResourceHandle: an event of device {found.device} on {target}"
            )
        ran: list[float] = []
        note = (lambda op: ran.append(time.perf_counter())) if found.timing else None
        found.ran, found.op = ran, self._scheduler.put(target, Op(f"record {event:#x}", note))

    def elapsed(self, start: int, end: int) -> float:
        self._scheduler.check()
        self.refuse_under_capture("cudaEventElapsedTime")
        events = self._event(start), self._event(end)
        if not all(event.timing and event.op is not None for event in events):
            raise DeviceError(
                "cudaErrorInvalidResourceHandle: an event without timing, or that was never recorded"
            )
        if not all(event.ran for event in events):
            raise DeviceError("cudaErrorNotReady: an event that is not done")
        return events[1].ran[0] - events[0].ran[0]

    def wait_event(self, stream: int, event: int) -> None:
        target, op = self.stream(stream), self._event(event).op
        self._scheduler.check()
        if op is None:
            return
        with self._scheduler.lock:
            capture = op.capture
            if capture is not None and capture not in self.captures:
                raise DeviceError("cudaErrorCapturedEvent: a wait for an event of a capture that has ended")
            if capture is not None and target.capture is None:
                capture.join(target)
            self._scheduler.put(target, Op(f"wait for {event:#x}", needs=[op]))

    def event_done(self, event: int) -> bool:
        op = self._event(event).op
        self.refuse_under_capture("cudaEventQuery")
        if op is not None and op.capture is not None:
            op.capture.invalidate("an event recorded in it was queried")
            raise DeviceError("cudaErrorCapturedEvent: an event recorded under capture cannot be queried")
        return self._scheduler.query(op, f"event {event:#x}")

    def ignore_captures(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        before, self._thread.ignores_captures = self._thread.ignores_captures, mode == CAPTURE_MODE_RELAXED
        return CAPTURE_MODE_RELAXED if before else 0

    def refuse_under_capture(self, call: str, stream: Stream | None = None) -> None:
        """Raise DeviceError for a call that is unsafe while a graph is recorded, and invalidate the capture.

        A call is unsafe if its stream records; and unless the capture is relaxed, if it is made on the thread that
        began the capture, or, for a global capture, on any thread that has not called :meth:`ignore_captures`.
        """
        thread = threading.get_ident()
        for capture in self.captures:
            own = capture.mode != "relaxed" and capture.thread == thread
            others = capture.mode == "global" and not self._thread.ignores_captures
            if own or others or (stream is not None and stream.capture is capture):
                capture.invalidate(f"{call} was called")
                raise DeviceError(f"cudaErrorStreamCaptureUnsupported: {call} while a graph is recorded")

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        self._check_device(device)
        self._scheduler.check()
        self.refuse_under_capture("cudaMalloc")
        return self._memory.allocate(nbytes, device).ptr

    def free(self, ptr: int) -> None:
        self.refuse_under_capture("cudaFree")
        block = self._memory.find(ptr)
        for access in list(block.accesses) if block is not None and not self._scheduler.trapped else ():
            self._scheduler.wait_for(access.op, f"{access.op}", "free")
        self._memory.free(ptr)

    def pin(self, nbytes: int) -> int:
        self._scheduler.check()
        self.refuse_under_capture("cudaHostAlloc")
        return self._memory.allocate(nbytes, -1).ptr

    def unpin(self, ptr: int) -> None:
        self.refuse_under_capture("cudaFreeHost")
        self._memory.free(ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        def body(op: Op) -> None:
            self._memory.view(to, nbytes)[:] = self._memory.view(source, nbytes)

        for ptr in (to, source):
            if nbytes and self._memory.find(ptr) is None:
                raise DeviceError(f"cudaErrorInvalidValue: {ptr:#x} is neither device nor pinned memory")
        op = Op(f"copy of {nbytes} bytes", body, reads=[(source, nbytes)], writes=[(to, nbytes)])
        self._scheduler.put(self.stream(stream), op)

    def allocation(self, ptr: int) -> int:
        self._scheduler.check()
        block = self._memory.find(ptr)
        if block is None or block.freed:
            raise DeviceError(f"cudaErrorInvalidValue: {ptr:#x} is no device memory")
        return block.ptr

    def device_of(self, ptr: int) -> int:
        block = self._memory.find(ptr)
        return -1 if block is None or block.freed else block.device
