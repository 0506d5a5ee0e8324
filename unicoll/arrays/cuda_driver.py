"""The CUDA driver API by ctypes: a :class:`~unicoll.arrays.device_runtime.DeviceRuntime` with NVIDIA's driver only.

The driver API is independent of the CUDA toolkit that CuPy or torch includes: all share the primary context of each
device, and with it streams, events and memory. Signatures are those of ``cuda.h`` 12 and 13.
"""

from __future__ import annotations

import ctypes
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any, NoReturn

from unicoll.arrays.device_runtime import DeviceError, DeviceFacts, DeviceRuntime
from unicoll.net import fork_safety

VARIABLE = "UNICOLL_CUDA_LIBRARY"
_NAME = "libcuda.so.1"

_SUCCESS, _NOT_READY, _INVALID_CONTEXT = 0, 600, 201
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING, _HOST_PORTABLE = 0x1, 0x2, 0x1
_CAPTURE_NONE, _CAPTURE_MODE_RELAXED = 0, 2
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_P2P_NATIVE_ATOMICS = 3
_POINTER_ATTRIBUTES = (c_int * 3)(2, 8, 9)
"""Attributes of an address: memory type, managed or not, ordinal of its device."""
_NOT_CUDA, _HOST_MEMORY = 0, 1
_TEXT_BYTES = 256

_number, _text, _out = POINTER(c_int), c_char_p, POINTER(c_void_p)
_context = _stream = _event = _address = c_void_p
_device = c_int
_NO_FLAGS = c_uint(0)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_number,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (_number,),
    "cuDeviceGet": (_number, c_int),
    "cuDeviceGetName": (_text, c_int, _device),
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte * 16), _device),
    "cuDeviceGetPCIBusId": (_text, c_int, _device),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), _device),
    "cuDeviceGetAttribute": (_number, c_int, _device),
    "cuDeviceCanAccessPeer": (_number, _device, _device),
    "cuDeviceGetP2PAttribute": (_number, c_int, _device, _device),
    "cuDevicePrimaryCtxRetain": (_out, _device),
    "cuCtxGetCurrent": (_out,),
    "cuCtxSetCurrent": (_context,),
    "cuCtxGetDevice": (_number,),
    "cuCtxGetStreamPriorityRange": (_number, _number),
    "cuStreamCreateWithPriority": (_out, c_uint, c_int),
    "cuStreamDestroy_v2": (_stream,),
    "cuStreamQuery": (_stream,),
    "cuStreamIsCapturing": (_stream, _number),
    "cuStreamWaitEvent": (_stream, _event, c_uint),
    "cuThreadExchangeStreamCaptureMode": (_number,),
    "cuEventCreate": (_out, c_uint),
    "cuEventDestroy_v2": (_event,),
    "cuEventRecord": (_event, _stream),
    "cuEventQuery": (_event,),
    "cuEventElapsedTime": (POINTER(c_float), _event, _event),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (_address,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), _address),
    "cuMemHostAlloc": (_out, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (_address, _address, c_size_t, _stream),
    "cuPointerGetAttributes": (c_uint, _number, _out, _address),
}
"""Argument types of each function, by the symbol in ``cuda.h``; all return CUresult."""


def load() -> DeviceRuntime | str:
    """The initialised driver; or the reason why no CUDA device can be used."""
    path = os.environ.get(VARIABLE) or _NAME
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        return f"NVIDIA's driver cannot be loaded: {e}"
    try:
        driver = CudaDriver(library, path)
        count = driver.device_count()
    except DeviceError as e:
        return f"{e}{_visible()}"
    except AttributeError as e:
        return f"{path} is not a CUDA driver, or too old: {e}"
    return driver if count else f"there is no CUDA device{_visible()}"


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"


class _DriverFunctions:
    """The driver's functions with their signatures."""

    def __init__(self, library: Any) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.restype = c_int
            function.argtypes = arguments
            setattr(self, name, function)

    def __getattr__(
        self, name: str
    ) -> Callable[..., int]:  # declared for type checkers; __init__ sets all functions
        raise AttributeError(name)


class _ForkedChild:
    """Replaces the functions in a forked child, where CUDA cannot be used and may hang."""

    def __getattr__(self, name: str) -> NoReturn:
        raise DeviceError(
            f"{name}: CUDA cannot be used in this process, which was forked after its parent had initialised CUDA:"
            " start processes with unicoll.spawn, unicoll.run or multiprocessing's 'spawn' method"
        )


class _QueryOutputs(threading.local):
    """Output memory of ``cuPointerGetAttributes``; allocated once per thread, since the call is frequent."""

    def __init__(self) -> None:
        self.values = (c_int * len(_POINTER_ATTRIBUTES))()
        start, step = ctypes.addressof(self.values), ctypes.sizeof(c_int)
        self.addresses = (c_void_p * len(_POINTER_ATTRIBUTES))(
            *(start + i * step for i in range(len(_POINTER_ATTRIBUTES)))
        )


class CudaDriver(DeviceRuntime):
    """All devices, by libcuda. Errors name the driver function, the error's name and its description.

    Args:
        library: a ``ctypes.CDLL``, or another object with the driver's functions as attributes.

    Raises:
        DeviceError: the driver cannot be initialised.
    """

    def __init__(self, library: Any, path: str) -> None:
        self._c: Any = _DriverFunctions(library)
        self._path = path
        self._query = _QueryOutputs()
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        self._facts: dict[int, DeviceFacts] = {}
        self._call("cuInit", 0)
        self._version = self._number("cuDriverGetVersion")
        _drivers.add(self)

    @property
    def description(self) -> str:
        """``CUDA 12.8 driver``: the newest CUDA version that the driver supports."""
        origin = "" if self._path == _NAME else f" ({self._path})"
        return f"CUDA {self._version // 1000}.{self._version % 1000 // 10} driver{origin}"

    # --- devices ---

    def device_count(self) -> int:
        return self._number("cuDeviceGetCount")

    def facts(self, device: int) -> DeviceFacts:
        found = self._facts.get(device)
        if found is None:
            found = self._facts[device] = self._find_facts(device)
        return found

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        handle, peer = self._handle(device), self._handle(other)
        if not self._number("cuDeviceCanAccessPeer", handle, peer):
            return False, False
        return True, bool(self._number("cuDeviceGetP2PAttribute", _P2P_NATIVE_ATOMICS, handle, peer))

    def current_device(self) -> int:
        found = c_int()
        code = self._c.cuCtxGetDevice(byref(found))
        if code == _INVALID_CONTEXT:
            return -1
        if code:
            self._check("cuCtxGetDevice", code)
        return found.value

    def set_device(self, device: int) -> None:
        context = 0 if device < 0 else self._contexts.get(device) or self._retain(device)
        if self._current() != context:
            self._call("cuCtxSetCurrent", context or None)

    # --- streams and events ---

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        made = c_void_p()
        with self._on(device):
            priority = 0
            if high_priority:
                lowest, highest = c_int(), c_int()
                self._call("cuCtxGetStreamPriorityRange", byref(lowest), byref(highest))
                priority = highest.value
            self._call("cuStreamCreateWithPriority", byref(made), _STREAM_NON_BLOCKING, priority)
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def stream_done(self, stream: int) -> bool:
        code = self._c.cuStreamQuery(stream)
        if code == _NOT_READY:
            return False
        return code == _SUCCESS or self._retry("cuStreamQuery", code, stream) == _SUCCESS

    def capturing(self, stream: int) -> bool:
        status = c_int()
        code = self._c.cuStreamIsCapturing(stream, byref(status))
        if code:
            self._retry("cuStreamIsCapturing", code, stream, byref(status))
        return status.value != _CAPTURE_NONE

    def create_event(self, device: int, timing: bool = False) -> int:
        made = c_void_p()
        with self._on(device):
            self._call("cuEventCreate", byref(made), 0 if timing else _EVENT_DISABLE_TIMING)
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        code = self._c.cuEventRecord(event, stream)
        if code:
            self._retry("cuEventRecord", code, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        code = self._c.cuStreamWaitEvent(stream, event, _NO_FLAGS)
        if code:
            self._retry("cuStreamWaitEvent", code, stream, event, _NO_FLAGS)

    def event_done(self, event: int) -> bool:
        code = self._c.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        return code == _SUCCESS or self._retry("cuEventQuery", code, event) == _SUCCESS

    def elapsed(self, start: int, end: int) -> float:
        found = c_float()
        self._call("cuEventElapsedTime", byref(found), start, end)
        return found.value / 1e3

    def ignore_captures(self) -> None:
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_CAPTURE_MODE_RELAXED)))

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        made = c_uint64()
        with self._on(device):
            self._call("cuMemAlloc_v2", byref(made), max(nbytes, 1))
        return made.value

    def free(self, ptr: int) -> None:
        self._call("cuMemFree_v2", ptr)

    def pin(self, nbytes: int) -> int:
        made = c_void_p()
        self._call("cuMemHostAlloc", byref(made), max(nbytes, 1), _HOST_PORTABLE)
        return made.value or 0

    def unpin(self, ptr: int) -> None:
        self._call("cuMemFreeHost", ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def allocation(self, ptr: int) -> int:
        start = c_uint64()
        self._call("cuMemGetAddressRange_v2", byref(start), None, ptr)
        return start.value

    def device_of(self, ptr: int) -> int:
        query = self._query
        query.values[0] = _NOT_CUDA
        self._call(
            "cuPointerGetAttributes", len(_POINTER_ATTRIBUTES), _POINTER_ATTRIBUTES, query.addresses, ptr
        )
        kind, managed, device = query.values
        return -1 if kind == _NOT_CUDA or (kind == _HOST_MEMORY and not managed) else device

    # --- contexts ---

    def _retain(self, device: int) -> int:
        """A device's primary context, retained until the process ends."""
        with self._lock:
            if device not in self._contexts:
                made = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", byref(made), self._handle(device))
                self._contexts[device] = made.value or 0
            return self._contexts[device]

    def _current(self) -> int:
        found = c_void_p()
        code = self._c.cuCtxGetCurrent(byref(found))
        if code:
            self._check("cuCtxGetCurrent", code)
        return found.value or 0

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Make a device's context current; the previous one is restored at the end."""
        context, before = self._contexts.get(device) or self._retain(device), self._current()
        if context == before:
            yield
            return
        self._call("cuCtxSetCurrent", context)
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before or None)

    # --- calls ---

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._c, name)(*arguments)
        if code:
            self._retry(name, code, *arguments)

    def _retry(self, name: str, code: int, *arguments: Any) -> int:
        """Repeat a call that failed for lack of a current context with some context; raise for any other error."""
        if code == _INVALID_CONTEXT and not self._current():
            device = next(iter(self._contexts), 0)
            with self._on(device):
                code = getattr(self._c, name)(*arguments)
        if code != _NOT_READY:
            self._check(name, code)
        return code

    def _check(self, name: str, code: int) -> None:
        if code:
            error, meaning = (
                self._error_text("cuGetErrorName", code),
                self._error_text("cuGetErrorString", code),
            )
            raise DeviceError(f"{name}: {error or f'error {code}'}{f': {meaning}' if meaning else ''}")

    def _error_text(self, function: str, code: int) -> str:
        text = c_char_p()
        if getattr(self._c, function)(code, byref(text)) or text.value is None:
            return ""
        return text.value.decode(errors="replace")

    def _number(self, name: str, *arguments: Any) -> int:
        found = c_int()
        self._call(name, byref(found), *arguments)
        return found.value

    def _handle(self, device: int) -> int:
        return self._number("cuDeviceGet", device)

    def _find_facts(self, device: int) -> DeviceFacts:
        handle = self._handle(device)
        name, bus = ctypes.create_string_buffer(_TEXT_BYTES), ctypes.create_string_buffer(_TEXT_BYTES)
        self._call("cuDeviceGetName", name, _TEXT_BYTES, handle)
        self._call("cuDeviceGetPCIBusId", bus, _TEXT_BYTES, handle)
        memory, ident = c_size_t(), (c_ubyte * 16)()
        self._call("cuDeviceTotalMem_v2", byref(memory), handle)
        self._call("cuDeviceGetUuid_v2", byref(ident), handle)
        capability = (
            self._number("cuDeviceGetAttribute", _CAPABILITY_MAJOR, handle),
            self._number("cuDeviceGetAttribute", _CAPABILITY_MINOR, handle),
        )
        return DeviceFacts(
            name.value.decode(errors="replace"),
            f"GPU-{uuid.UUID(bytes=bytes(ident))}",
            bus.value.decode(errors="replace").lower(),
            memory.value,
            capability,
        )


_drivers: weakref.WeakSet[CudaDriver] = weakref.WeakSet()


def _disable() -> None:
    for driver in list(_drivers):
        driver._c = _ForkedChild()


fork_safety.in_child(_disable)
