"""CUDA for the backends: streams, events, copies and memory, whichever library owns the arrays.

An array's :class:`unicoll.arrays.buffer.Buffer` has the current stream of its library (CuPy, torch). All other device
calls of a backend go through one :class:`~unicoll.arrays.device_runtime.DeviceRuntime`. The default one calls the
driver (:mod:`unicoll.arrays.cuda_driver`), so neither CuPy nor torch is needed; tests replace it by a simulated device
with :func:`install`.

Handles of streams and events are integers, as in ``torch.cuda.Stream.cuda_stream`` and ``cupy.cuda.Stream.ptr``.
"""

from __future__ import annotations

from unicoll.arrays.device_runtime import DeviceRuntime
from unicoll.errors import BackendUnavailableError

_installed: DeviceRuntime | None = None
_reason: str | None = None


def install(runtime: DeviceRuntime | None) -> None:
    """Use another runtime in this process; None restores the driver's."""
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


def cuda() -> DeviceRuntime:
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
