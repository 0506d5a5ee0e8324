"""Host memory as a device: a stream is a thread that runs functions in order.

oneCCL's CPU plug-in has no streams. Its calls return when they are done, and nothing interrupts one
that waits for a rank that is gone. On the thread of a stream they neither block the caller nor
outlive its deadline: the thread is abandoned then.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from unicoll.devices.device_runtime import (
    CAPTURE_MODE_RELAXED,
    PER_THREAD_STREAM,
    DeviceFacts,
    DeviceRuntime,
)
from unicoll.process.interrupts import Changes, LazyThread

HOST_STREAM = 0
"""Handle of the order in which a thread of the program uses the arrays: what it has begun is
done."""
_JOIN_S = 1.0


class HostStream:
    """A thread that runs functions in order.

    Attributes:
        failed: True if a function has failed: later ones are dropped, so that their events never
            complete.
    """

    def __init__(self, name: str) -> None:
        self.failed = False
        self._pending = 0
        self._lock = threading.Lock()
        self._functions: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
        self._thread = LazyThread(name)

    def put(self, function: Callable[[], bool]) -> None:
        """Have a function run after those before it; it returns False if it has failed."""
        with self._lock:
            # It is started for each function, because an exception may have interrupted an earlier
            # start.
            self._thread.start(self._work)
            self._pending += 1
        self._functions.put(function)

    def done(self) -> bool:
        """True if all functions have run."""
        return self._pending == 0

    def _work(self) -> None:
        while (function := self._functions.get()) is not None:
            if not self.failed and not function():
                self.failed = True
            # The function may refer to arrays, which a thread that waits for the next one would
            # keep alive.
            del function
            # After a failure the number stays above zero: the stream is never done, as its events
            # never complete.
            if not self.failed:
                with self._lock:
                    self._pending -= 1

    def close(self) -> None:
        """End the thread, which is idle or abandoned."""
        self._functions.put(None)
        self._thread.join(_JOIN_S)


class _Event:
    """An event, which may be recorded again; the number of its recordings tells which one has
    completed."""

    def __init__(self) -> None:
        self.recorded = self.completed = 0
        self.at = 0.0
        self._changes = Changes()

    def complete(self, number: int) -> bool:
        with self._changes.lock:
            self.completed, self.at = max(self.completed, number), time.perf_counter()
        self._changes.notify_all()
        return True

    def wait(self, number: int) -> bool:
        self._changes.wait_for(lambda: self.completed >= number, math.inf)
        return True


class HostRuntime(DeviceRuntime):
    """The host as one device."""

    name = "host"
    device_type = "cpu"
    visible_devices = ""
    host_memory = True

    def __init__(self) -> None:
        self._handles = itertools.count(PER_THREAD_STREAM + 1)
        self._streams: dict[int, HostStream] = {}
        self._events: dict[int, _Event] = {}
        self._memory: dict[int, ctypes.Array[ctypes.c_char]] = {}

    @property
    def description(self) -> str:
        return f"host memory ({platform.machine()})"

    def device_count(self) -> int:
        return 1

    def facts(self, device: int) -> DeviceFacts:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # Each process counts as a device of its own, because two ranks on one device are refused.
        return DeviceFacts("host memory", f"host-{os.getpid()}", "", memory, (0, 0))

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        return True, True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        pass

    # --- streams and events ---

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        handle = next(self._handles)
        self._streams[handle] = HostStream(f"unicoll-host-stream-{handle}")
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream).close()

    def stream(self, handle: int) -> HostStream:
        """The stream of a handle."""
        return self._streams[handle]

    def stream_done(self, stream: int) -> bool:
        return stream == HOST_STREAM or self._streams[stream].done()

    def capturing(self, stream: int) -> bool:
        return False

    def create_event(self, device: int, timing: bool = False) -> int:
        handle = next(self._handles)
        self._events[handle] = _Event()
        return handle

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        found = self._events[event]
        found.recorded += 1
        number = found.recorded
        if stream == HOST_STREAM:
            found.complete(number)
        else:
            self._streams[stream].put(lambda: found.complete(number))

    def wait_event(self, stream: int, event: int) -> None:
        # A wait is for the recording that is the last one now; the event may be recorded again
        # before the stream comes to the wait.
        found = self._events[event]
        number = found.recorded
        if stream != HOST_STREAM and found.completed < number:
            self._streams[stream].put(lambda: found.wait(number))

    def event_done(self, event: int) -> bool:
        found = self._events[event]
        return found.completed >= found.recorded

    def elapsed(self, start: int, end: int) -> float:
        return self._events[end].at - self._events[start].at

    def ignore_captures(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        return mode

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        made = ctypes.create_string_buffer(max(nbytes, 1))
        ptr = ctypes.addressof(made)
        self._memory[ptr] = made
        return ptr

    def free(self, ptr: int) -> None:
        del self._memory[ptr]

    def pin(self, nbytes: int) -> int:
        return self.allocate(0, nbytes)

    def unpin(self, ptr: int) -> None:
        self.free(ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        def move() -> bool:
            ctypes.memmove(to, source, nbytes)
            return True

        if stream == HOST_STREAM:
            move()
        else:
            self._streams[stream].put(move)

    def allocation(self, ptr: int) -> int:
        return ptr

    def device_of(self, ptr: int) -> int:
        return -1
