"""The CUDA driver API by ctypes: NVIDIA's devices with NVIDIA's driver only.

The driver API is independent of the CUDA toolkit that CuPy or torch includes: all share the primary
context of each device, and with it streams, events and memory. Signatures are those of ``cuda.h``
12 and 13.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from unicoll.devices.cuda import driver
from unicoll.devices.cuda.driver import CONTEXT_ENDED, Driver
from unicoll.devices.device_runtime import DeviceError, DeviceRuntime

VARIABLE = "UNICOLL_CUDA_LIBRARY"
_NAME = "libcuda.so.1"
_INVALID_CONTEXT = 201

_out, _context, _stream, _address = POINTER(c_void_p), c_void_p, c_void_p, c_void_p

ARGUMENTS = driver.ARGUMENTS | {
    "error_name": (c_int, POINTER(c_char_p)),
    "error_text": (c_int, POINTER(c_char_p)),
    "context_retain": (_out, c_int),
    "context_current": (_out,),
    "context_set": (_context,),
    "context_device": (POINTER(c_int),),
    "copy": (_address, _address, c_size_t, _stream),
}
SYMBOLS = {
    "init": "cuInit",
    "version": "cuDriverGetVersion",
    "error_name": "cuGetErrorName",
    "error_text": "cuGetErrorString",
    "device_count": "cuDeviceGetCount",
    "device_handle": "cuDeviceGet",
    "device_name": "cuDeviceGetName",
    "device_uuid": "cuDeviceGetUuid_v2",
    "device_bus": "cuDeviceGetPCIBusId",
    "device_memory": "cuDeviceTotalMem_v2",
    "device_attribute": "cuDeviceGetAttribute",
    "can_access_peer": "cuDeviceCanAccessPeer",
    "peer_attribute": "cuDeviceGetP2PAttribute",
    "context_retain": "cuDevicePrimaryCtxRetain",
    "context_current": "cuCtxGetCurrent",
    "context_set": "cuCtxSetCurrent",
    "context_device": "cuCtxGetDevice",
    "stream_priorities": "cuCtxGetStreamPriorityRange",
    "stream_create": "cuStreamCreateWithPriority",
    "stream_destroy": "cuStreamDestroy_v2",
    "stream_query": "cuStreamQuery",
    "stream_is_capturing": "cuStreamIsCapturing",
    "stream_wait_event": "cuStreamWaitEvent",
    "exchange_capture_mode": "cuThreadExchangeStreamCaptureMode",
    "event_create": "cuEventCreate",
    "event_destroy": "cuEventDestroy_v2",
    "event_record": "cuEventRecord",
    "event_query": "cuEventQuery",
    "event_elapsed": "cuEventElapsedTime",
    "mem_alloc": "cuMemAlloc_v2",
    "mem_free": "cuMemFree_v2",
    "mem_range": "cuMemGetAddressRange_v2",
    "host_alloc": "cuMemHostAlloc",
    "host_free": "cuMemFreeHost",
    "copy": "cuMemcpyAsync",
    "pointer_attributes": "cuPointerGetAttributes",
}
"""The driver's function of each name."""


def load() -> DeviceRuntime | str:
    """The initialised driver; or the reason why no CUDA device can be used."""
    path = os.environ.get(VARIABLE) or _NAME
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        return f"NVIDIA's driver cannot be loaded: {e}"
    try:
        made = CudaDriver(library, path)
        count = made.device_count()
    except DeviceError as e:
        return f"{e}{_visible()}"
    except AttributeError as e:
        return f"{path} is not a CUDA driver, or too old: {e}"
    return made if count else f"there is no CUDA device{_visible()}"


def _visible() -> str:
    visible = os.environ.get(CudaDriver.visible_devices)
    return "" if visible is None else f" ({CudaDriver.visible_devices}={visible!r})"


class CudaDriver(Driver):
    """All devices, by libcuda. A thread has a device if it has a current context."""

    symbols = SYMBOLS
    arguments = ARGUMENTS
    capability_attributes = (75, 76)
    native_atomics = 3

    def __init__(self, library: Any, path: str) -> None:
        # These are set before the base is initialised, because its calls of the library may need
        # them (_failed).
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        super().__init__(library, path)

    @property
    def description(self) -> str:
        """``CUDA 12.8 driver``: the newest CUDA version that the driver supports."""
        origin = "" if self._path == _NAME else f" ({self._path})"
        return f"CUDA {self._version // 1000}.{self._version % 1000 // 10} driver{origin}"

    def current_device(self) -> int:
        found = c_int()
        code = self._c.context_device(byref(found))
        if code == _INVALID_CONTEXT or code in CONTEXT_ENDED:
            return -1
        if code:
            super()._failed("context_device", code)
        return found.value

    def set_device(self, device: int) -> None:
        context = 0 if device < 0 else self._contexts.get(device) or self._retain(device)
        if self._current() != context:
            self._call_unless_ended("context_set", context or None)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("copy", to, source, nbytes, stream)

    # --- contexts ---

    def _retain(self, device: int) -> int:
        """A device's primary context, retained until the process ends."""
        with self._lock:
            if device not in self._contexts:
                made = c_void_p()
                self._call("context_retain", byref(made), self._handle(device))
                self._contexts[device] = made.value or 0
            return self._contexts[device]

    def _current(self) -> int:
        found = c_void_p()
        code = self._c.context_current(byref(found))
        if code and code not in CONTEXT_ENDED:
            super()._failed("context_current", code)
        return found.value or 0

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        context, before = self._contexts.get(device) or self._retain(device), self._current()
        if context == before:
            yield
            return
        self._call_unless_ended("context_set", context)
        try:
            yield
        finally:
            self._call_unless_ended("context_set", before or None)

    # --- calls ---

    def _failed(self, name: str, code: int, *arguments: Any) -> int:
        """Repeat a call that failed for lack of a current context with some context; raise for any
        other error."""
        if code == _INVALID_CONTEXT and not self._current():
            # Any context serves such a call. One of a device in use is taken, so that no other
            # device is initialised for it.
            device = next(iter(self._contexts), 0)
            with self._on(device):
                code = getattr(self._c, name)(*arguments)
        return super()._failed(name, code, *arguments)

    def _error_texts(self, code: int) -> tuple[str, str]:
        return self._text(self._c.error_name, code), self._text(self._c.error_text, code)

    def _text(self, function: Any, code: int) -> str:
        text = c_char_p()
        if function(code, byref(text)) or text.value is None:
            return ""
        return text.value.decode(errors="replace")

    def _uuid(self, ident: bytes, bus: str) -> str:
        return f"GPU-{uuid.UUID(bytes=ident)}"
