"""The interface of a device runtime: devices, streams, events, copies and memory.

:mod:`unicoll.devices.runtimes` has the runtime of each device type. Handles of streams and events
are integers.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from unicoll.errors import DistBackendError

LEGACY_STREAM = 1
"""CUDA's handle of the legacy default stream (``cudaStreamLegacy``); 0 usually means the same
stream."""
CAPTURE_MODE_RELAXED = 2
"""CUDA's mode of a thread that may call what other threads' captures refuse
(``cudaStreamCaptureModeRelaxed``)."""
PER_THREAD_STREAM = 2
"""CUDA's handle of the calling thread's default stream (``cudaStreamPerThread``).

Handles up to this one denote a default stream of the current device; all others are addresses of
streams.
"""

SPIN_S = 50e-6
"""Seconds that the host polls a device without sleeping."""
_MIN_SLEEP_S, _MAX_SLEEP_S = 20e-6, 1e-3


class DeviceError(DistBackendError):
    """A call of a device's runtime failed.

    Attributes:
        context_ended: True if the device's context has ended: all later work of this process on the
            device fails, too, as after a kernel that traps.
    """

    context_ended = False


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device.

    Attributes:
        name: the model.
        uuid: globally unique; a MIG instance has its own.
        bus: PCI bus id, ``"0000:3b:00.0"``.
        memory: total memory in bytes.
        capability: major and minor compute capability; (0, 0) for devices without.
    """

    name: str
    uuid: str
    bus: str
    memory: int
    capability: tuple[int, int]


class DeviceRuntime(ABC):
    """The devices of one type in this process. All methods are thread-safe and raise
    :class:`DeviceError`.

    Once a device's context has ended, what frees, destroys or unpins has nothing to do, and raises
    nothing, and neither do :meth:`current_device` and :meth:`set_device`: the teardown of a group
    works then, too.

    Attributes:
        name: for messages: ``"CUDA"``.
        device_type: the type of the devices' arrays: ``"cuda"``.
        visible_devices: the environment variable that selects the devices of a process.
        host_memory: True if the arrays are in host memory: the host waits for operations, not a
            stream.
        frees_in_order: True if the memory of an array that is dropped is used again only after the
            work that is on the array's stream then. Array libraries with a pool of memory do that.
    """

    name: ClassVar[str] = "CUDA"
    device_type: ClassVar[str] = "cuda"
    visible_devices: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    host_memory: ClassVar[bool] = False
    frees_in_order: bool = True

    @property
    @abstractmethod
    def description(self) -> str:
        """Name and version, for reports."""

    def has_gpus(self) -> bool:
        """True if the devices are GPUs; SYCL's may be a CPU."""
        return True

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices that the process may use."""

    @abstractmethod
    def facts(self, device: int) -> DeviceFacts:
        """Properties of a device."""

    @abstractmethod
    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        """(True if ``device`` can access the memory of ``other``, True if also with native atomics,
        as over NVLink)."""

    @abstractmethod
    def current_device(self) -> int:
        """The calling thread's device, or -1 if it has none."""

    @abstractmethod
    def set_device(self, device: int) -> None:
        """Make a device the calling thread's current one; -1 unsets it. Cheap if it is current
        already."""

    # --- streams and events ---

    @abstractmethod
    def create_stream(self, device: int, high_priority: bool = False) -> int:
        """A stream that does not synchronize with the legacy default stream."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream; work enqueued on it still completes."""

    @abstractmethod
    def stream_done(self, stream: int) -> bool:
        """True if all work enqueued on a stream is complete; never blocks."""

    @abstractmethod
    def capturing(self, stream: int) -> bool:
        """True if the stream is capturing a graph, including a failed capture that has not ended
        yet."""

    def in_order(self, stream: int) -> bool:
        """True if work on a stream runs in the order in which it is put there."""
        return True

    @abstractmethod
    def create_event(self, device: int, timing: bool = False) -> int:
        """A new event; one without timing is cheaper."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Destroy an event."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Record an event: it completes after all work that is on ``stream`` now."""

    @abstractmethod
    def wait_event(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` run after ``event``; does not block the host."""

    @abstractmethod
    def event_done(self, event: int) -> bool:
        """True if the event is complete; never blocks."""

    @abstractmethod
    def elapsed(self, start: int, end: int) -> float:
        """Device time in seconds between two completed events with timing."""

    @abstractmethod
    def ignore_captures(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        """Allow the calling thread to query events while other threads capture graphs; returns the
        mode before, which undoes it as ``mode``."""

    # --- memory ---

    @abstractmethod
    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate device memory; returns its address. Not ordered with any stream."""

    @abstractmethod
    def free(self, ptr: int) -> None:
        """Free device memory; may wait for the device."""

    @abstractmethod
    def pin(self, nbytes: int) -> int:
        """Allocate page-locked host memory, usable by all devices; returns its address."""

    @abstractmethod
    def unpin(self, ptr: int) -> None:
        """Free page-locked host memory."""

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy on a stream, between device and pinned memory in any direction; returns at
        once."""

    @abstractmethod
    def allocation(self, ptr: int) -> int:
        """The first address of the allocation of device memory that an address is in."""

    @abstractmethod
    def device_of(self, ptr: int) -> int:
        """The device that owns an address, -1 for host memory, pinned or not; managed memory has a
        device."""


@contextmanager
def on_device(runtime: DeviceRuntime, device: int) -> Iterator[None]:
    """Make a device the thread's current one within the context; afterwards the previous one, or
    none, is."""
    before = runtime.current_device()
    if before == device:
        yield
        return
    try:
        # This is within the try clause, because an exception of a signal's handler may come right
        # behind it, when the device has changed already.
        runtime.set_device(device)
        yield
    finally:
        runtime.set_device(before)


def backoff(spin: float = 0.0) -> Iterator[None]:
    """Paces a polling loop: yields without delay for ``spin`` seconds, then after sleeps of 20 us
    growing to 1 ms."""
    until = time.monotonic() + spin
    yield
    while time.monotonic() < until:
        yield
    sleep = _MIN_SLEEP_S
    while True:
        time.sleep(sleep)
        sleep = min(1.3 * sleep, _MAX_SLEEP_S)
        yield


def await_event(runtime: DeviceRuntime, event: int, deadline: float) -> bool:
    """Block the host until an event is complete or ``deadline`` (``time.monotonic()``); True if it
    is complete."""
    for _ in backoff(SPIN_S):
        if runtime.event_done(event):
            return True
        if time.monotonic() >= deadline:
            break
    # The event is queried once more: the thread may have slept beyond the deadline, and the event
    # may have completed meanwhile.
    return runtime.event_done(event)
