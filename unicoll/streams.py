"""CUDA as the backends need it: streams, events, copies and memory, whoever owns the arrays.

Arrays say which stream is current for their library (CuPy's, torch's); everything else a backend does on a device goes
through one :class:`Cuda`. The real one speaks to the driver (:mod:`unicoll.cuda_driver`), so neither CuPy nor torch is
needed for it; tests put a simulated device in its place with :func:`install`.

Handles of streams and events are integers, as in ``torch.cuda.Stream.cuda_stream`` and ``cupy.cuda.Stream.ptr``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import BackendUnavailableError, DistBackendError

__all__ = [
    "SPIN_S",
    "Cuda",
    "CudaError",
    "DeviceFacts",
    "await_event",
    "cuda",
    "install",
    "naps",
    "on_device",
    "reason_against",
]

LEGACY_STREAM = 1
"""Handle of the legacy default stream (``cudaStreamLegacy``), as 0 mostly is."""
PER_THREAD_STREAM = 2
"""Handle of the calling thread's default stream (``cudaStreamPerThread``).

Handles up to this one mean a stream of the current device; all others are streams themselves.
"""

SPIN_S = 50e-6
"""How long the host looks again and again for what the device is about to do."""
_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3


class CudaError(DistBackendError):
    """A call of CUDA failed."""


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of a device.

    Attributes:
        name: the model.
        uuid: unique in the world; a MIG instance has its own.
        bus: PCI bus id, ``"0000:3b:00.0"``.
        memory: bytes.
        capability: major and minor.
    """

    name: str
    uuid: str
    bus: str
    memory: int
    capability: tuple[int, int]


class Cuda(ABC):
    """The devices of this process. Every method may be called from any thread; errors are :class:`CudaError`."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is, in a few words, with its version."""

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices that the process may use."""

    @abstractmethod
    def facts(self, device: int) -> DeviceFacts:
        """What is known of a device."""

    @abstractmethod
    def reaches(self, device: int, other: int) -> tuple[bool, bool]:
        """Whether a device can use another's memory itself; and whether atomically, as over NVLink, not over PCIe."""

    @abstractmethod
    def current_device(self) -> int:
        """The calling thread's device, or -1 where it has not chosen any."""

    @abstractmethod
    def set_device(self, device: int) -> None:
        """Make a device the calling thread's, with -1 none; cheap where it is already."""

    # --- streams and events ---

    @abstractmethod
    def create_stream(self, device: int, high_priority: bool = False) -> int:
        """A stream that does not synchronize with the legacy default stream."""

    @abstractmethod
    def destroy_stream(self, stream: int) -> None:
        """Give a stream back; what is on it is still done."""

    @abstractmethod
    def stream_done(self, stream: int) -> bool:
        """Whether all that was put on a stream has been done; never blocks."""

    @abstractmethod
    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph instead of running."""

    @abstractmethod
    def create_event(self, device: int, timing: bool = False) -> int:
        """An event; one without timing is cheaper."""

    @abstractmethod
    def destroy_event(self, event: int) -> None:
        """Give an event back."""

    @abstractmethod
    def record(self, event: int, stream: int) -> None:
        """Let ``event`` stand for all that is on ``stream`` now."""

    @abstractmethod
    def wait_event(self, stream: int, event: int) -> None:
        """Whatever comes on ``stream`` from now on runs after ``event``; does not block the host."""

    @abstractmethod
    def event_done(self, event: int) -> bool:
        """Whether all that the event stands for has been done; never blocks."""

    @abstractmethod
    def elapsed(self, start: int, end: int) -> float:
        """Seconds of the device between two events with timing, which are both done."""

    @abstractmethod
    def ignore_captures(self) -> None:
        """Let the calling thread ask about events while other threads capture graphs."""

    # --- memory ---

    @abstractmethod
    def allocate(self, device: int, nbytes: int) -> int:
        """Device memory, its address; not ordered with any stream."""

    @abstractmethod
    def free(self, ptr: int) -> None:
        """Give device memory back; may wait for the device."""

    @abstractmethod
    def pin(self, nbytes: int) -> int:
        """Page-locked host memory, its address."""

    @abstractmethod
    def unpin(self, ptr: int) -> None:
        """Give page-locked memory back."""

    @abstractmethod
    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on a stream between any two of device and pinned memory; returns at once."""

    @abstractmethod
    def device_of(self, ptr: int) -> int:
        """The device that an address belongs to, or -1 for host memory."""


_installed: Cuda | None = None
_reason: str | None = None


def install(runtime: Cuda | None) -> None:
    """Use another :class:`Cuda` in this process; None goes back to the driver's."""
    global _installed, _reason
    _installed, _reason = runtime, None


def reason_against() -> str | None:
    """Why no CUDA device can be used here, or None."""
    global _installed, _reason
    if _installed is None and _reason is None:
        from .cuda_driver import load

        found = load()
        if isinstance(found, str):
            _reason = found
        else:
            _installed = found
    return None if _installed is not None else _reason


def cuda() -> Cuda:
    """The devices of this process.

    Raises:
        BackendUnavailableError: there are none; the message says why.
    """
    if _installed is None:
        reason = reason_against()
        if reason is not None:
            raise BackendUnavailableError(reason)
    assert _installed is not None
    return _installed


@contextmanager
def on_device(cuda: Cuda, device: int) -> Iterator[None]:
    """Make a device the thread's for a while; one that had none has none afterwards."""
    before = cuda.current_device()
    if before == device:
        yield
        return
    cuda.set_device(device)
    try:
        yield
    finally:
        cuda.set_device(before)


def naps(spin: float = 0.0) -> Iterator[None]:
    """Turns of waiting for a device: at once for ``spin`` seconds, then after naps that grow from 20 us to 1 ms."""
    until = time.monotonic() + spin
    yield
    while time.monotonic() < until:
        yield
    nap = _SHORTEST_S
    while True:
        time.sleep(nap)
        nap = min(1.3 * nap, _LONGEST_S)
        yield


def await_event(runtime: Cuda, event: int, deadline: float) -> bool:
    """Block the host until an event is done, at most until ``deadline`` (``time.monotonic()``); whether it is."""
    for _ in naps(SPIN_S):
        if runtime.event_done(event):
            return True
        if time.monotonic() >= deadline:
            break
    return runtime.event_done(event)
