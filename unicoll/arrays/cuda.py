"""CUDA for the backends: streams, events, copies and memory, whichever library owns the arrays.

An array's :class:`unicoll.arrays.buffer.Buffer` has the current stream of its library (CuPy, torch). All other device
calls of a backend go through one :class:`Cuda`. The default one calls the driver
(:mod:`unicoll.arrays.cuda_driver`), so neither CuPy nor torch is needed; tests replace it by a simulated device with
:func:`install`.

Handles of streams and events are integers, as in ``torch.cuda.Stream.cuda_stream`` and ``cupy.cuda.Stream.ptr``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from unicoll.arrays.cuda_interface import Cuda, CudaError, DeviceFacts
from unicoll.errors import BackendUnavailableError

__all__ = [
    "SPIN_S",
    "Cuda",
    "CudaError",
    "DeviceFacts",
    "await_event",
    "backoff",
    "cuda",
    "install",
    "on_device",
    "reason_against",
]

LEGACY_STREAM = 1
"""Handle of the legacy default stream (``cudaStreamLegacy``); 0 usually means the same stream."""
PER_THREAD_STREAM = 2
"""Handle of the calling thread's default stream (``cudaStreamPerThread``).

Handles up to this one denote a default stream of the current device; all others are addresses of streams.
"""

SPIN_S = 50e-6
"""Seconds that the host polls a device without sleeping."""
_MIN_SLEEP_S, _MAX_SLEEP_S = 20e-6, 1e-3


_installed: Cuda | None = None
_reason: str | None = None


def install(runtime: Cuda | None) -> None:
    """Use another :class:`Cuda` in this process; None restores the driver's."""
    global _installed, _reason
    _installed, _reason = runtime, None


def reason_against() -> str | None:
    """The reason why this process can use no CUDA device; None if it can."""
    global _installed, _reason
    if _installed is None and _reason is None:
        from unicoll.arrays import cuda_driver  # needed by programs with CUDA arrays only

        found = cuda_driver.load()
        if isinstance(found, str):
            _reason = found
        else:
            _installed = found
    return None if _installed is not None else _reason


def cuda() -> Cuda:
    """The CUDA devices of this process.

    Raises:
        BackendUnavailableError: no device can be used; the message has the reason.
    """
    if _installed is None:
        reason = reason_against()
        if reason is not None:
            raise BackendUnavailableError(reason)
    assert _installed is not None
    return _installed


@contextmanager
def on_device(cuda: Cuda, device: int) -> Iterator[None]:
    """Make a device the thread's current one within the context; afterwards the previous one, or none, is."""
    before = cuda.current_device()
    if before == device:
        yield
        return
    cuda.set_device(device)
    try:
        yield
    finally:
        cuda.set_device(before)


def backoff(spin: float = 0.0) -> Iterator[None]:
    """Paces a polling loop: yields without delay for ``spin`` seconds, then after sleeps of 20 us growing to 1 ms."""
    until = time.monotonic() + spin
    yield
    while time.monotonic() < until:
        yield
    sleep = _MIN_SLEEP_S
    while True:
        time.sleep(sleep)
        sleep = min(1.3 * sleep, _MAX_SLEEP_S)
        yield


def await_event(runtime: Cuda, event: int, deadline: float) -> bool:
    """Block the host until an event is complete or ``deadline`` (``time.monotonic()``); True if it is complete."""
    for _ in backoff(SPIN_S):
        if runtime.event_done(event):
            return True
        if time.monotonic() >= deadline:
            break
    return runtime.event_done(event)
