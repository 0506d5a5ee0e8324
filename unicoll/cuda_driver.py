"""CUDA's driver by ctypes: :class:`unicoll.streams.Cuda` with nothing installed but NVIDIA's driver.

The driver's own symbols are used, so it does not matter which CUDA toolkit CuPy or torch brought along: they share the
primary context of each device, and with it streams, events and memory. Signatures are those of ``cuda.h`` 12 and 13.
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

from . import forks
from .streams import Cuda, CudaError, DeviceFacts

__all__ = ["SIGNATURES", "VARIABLE", "Driver", "load"]

VARIABLE = "UNICOLL_CUDA_LIBRARY"
_NAME = "libcuda.so.1"

_SUCCESS, _NOT_READY, _INVALID_CONTEXT = 0, 600, 201
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING, _HOST_PORTABLE = 0x1, 0x2, 0x1
_CAPTURE_NONE, _CAPTURE_MODE_RELAXED = 0, 2
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_P2P_NATIVE_ATOMICS = 3
_ASKED = (c_int * 3)(2, 8, 9)
"""Of an address: its memory's type, whether it is managed, its device's ordinal."""
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
    "cuMemHostAlloc": (_out, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (_address, _address, c_size_t, _stream),
    "cuPointerGetAttributes": (c_uint, _number, _out, _address),
}
"""What each function takes, under the name that ``cuda.h`` gives its symbol; all return CUresult."""


def load() -> Cuda | str:
    """The driver, started; or, in words, why no CUDA device can be used."""
    path = os.environ.get(VARIABLE) or _NAME
    try:
        library = ctypes.CDLL(path)
    except OSError as e:
        return f"NVIDIA's driver is not here: {e}"
    try:
        driver = Driver(library, path)
        count = driver.device_count()
    except CudaError as e:
        return f"{e}{_visible()}"
    except AttributeError as e:
        return f"{path} is no driver that can be used, or too old: {e}"
    return driver if count else f"there is no CUDA device here{_visible()}"


def _visible() -> str:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown!r})"


class _Functions:
    """The driver's functions with their signatures."""

    def __init__(self, library: Any) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.restype = c_int
            function.argtypes = arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., int]:  # for type checkers: all are set above
        raise AttributeError(name)


class _AfterFork:
    """In place of the functions in a forked child: CUDA does not survive a fork, and may hang there."""

    def __getattr__(self, name: str) -> NoReturn:
        raise CudaError(
            f"{name}: this process was forked after its parent had started CUDA, which cannot be used in it: start"
            " processes with unicoll.spawn, unicoll.run or multiprocessing's 'spawn' method"
        )


class _Answers(threading.local):
    """Where the driver puts what it knows of an address; made once for each thread, since this may be asked often."""

    def __init__(self) -> None:
        self.values = (c_int * len(_ASKED))()
        start, step = ctypes.addressof(self.values), ctypes.sizeof(c_int)
        self.places = (c_void_p * len(_ASKED))(*(start + i * step for i in range(len(_ASKED))))


class Driver(Cuda):
    """All devices, through libcuda. Errors name the driver's call, the error and its text.

    Args:
        library: what has the driver's functions as attributes: a ``ctypes.CDLL``.
        path: where it came from.

    Raises:
        CudaError: the driver does not start.
    """

    def __init__(self, library: Any, path: str) -> None:
        self._c: Any = _Functions(library)
        self._path = path
        self._answers = _Answers()
        self._lock = threading.Lock()
        self._contexts: dict[int, int] = {}
        self._facts: dict[int, DeviceFacts] = {}
        self._call("cuInit", 0)
        self._version = self._number("cuDriverGetVersion")
        _drivers.add(self)

    @property
    def description(self) -> str:
        """``CUDA 12.8 driver``: the newest CUDA that the driver can run."""
        where = "" if self._path == _NAME else f" ({self._path})"
        return f"CUDA {self._version // 1000}.{self._version % 1000 // 10} driver{where}"

    # --- devices ---

    def device_count(self) -> int:
        """Number of devices that the process may use; the driver heeds CUDA_VISIBLE_DEVICES."""
        return self._number("cuDeviceGetCount")

    def facts(self, device: int) -> DeviceFacts:
        """What is known of a device."""
        found = self._facts.get(device)
        if found is None:
            found = self._facts[device] = self._find_facts(device)
        return found

    def reaches(self, device: int, other: int) -> tuple[bool, bool]:
        here, there = self._handle(device), self._handle(other)
        if not self._number("cuDeviceCanAccessPeer", here, there):
            return False, False
        return True, bool(self._number("cuDeviceGetP2PAttribute", _P2P_NATIVE_ATOMICS, here, there))

    def current_device(self) -> int:
        """The calling thread's device, or -1 where it has not chosen any."""
        found = c_int()
        code = self._c.cuCtxGetDevice(byref(found))
        if code == _INVALID_CONTEXT:
            return -1
        if code:
            self._check("cuCtxGetDevice", code)
        return found.value

    def set_device(self, device: int) -> None:
        """Make a device's primary context the calling thread's, with -1 none; starts it when it is first asked for."""
        context = 0 if device < 0 else self._contexts.get(device) or self._retain(device)
        if self._current() != context:
            self._call("cuCtxSetCurrent", context or None)

    # --- streams and events ---

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        """A stream that does not synchronize with the legacy default stream."""
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
        """Give a stream back; what is on it is still done."""
        self._call("cuStreamDestroy_v2", stream)

    def stream_done(self, stream: int) -> bool:
        """Whether all that was put on a stream has been done; never blocks."""
        code = self._c.cuStreamQuery(stream)
        if code == _NOT_READY:
            return False
        return code == _SUCCESS or self._again("cuStreamQuery", code, stream) == _SUCCESS

    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph instead of running; also after its capture has failed, until it ends."""
        status = c_int()
        code = self._c.cuStreamIsCapturing(stream, byref(status))
        if code:
            self._again("cuStreamIsCapturing", code, stream, byref(status))
        return status.value != _CAPTURE_NONE

    def create_event(self, device: int, timing: bool = False) -> int:
        """An event; one without timing is cheaper."""
        made = c_void_p()
        with self._on(device):
            self._call("cuEventCreate", byref(made), 0 if timing else _EVENT_DISABLE_TIMING)
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """Let ``event`` stand for all that is on ``stream`` now."""
        code = self._c.cuEventRecord(event, stream)
        if code:
            self._again("cuEventRecord", code, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Whatever comes on ``stream`` from now on runs after ``event``; does not block the host."""
        code = self._c.cuStreamWaitEvent(stream, event, _NO_FLAGS)
        if code:
            self._again("cuStreamWaitEvent", code, stream, event, _NO_FLAGS)

    def event_done(self, event: int) -> bool:
        """Whether all that the event stands for has been done; never blocks."""
        code = self._c.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        return code == _SUCCESS or self._again("cuEventQuery", code, event) == _SUCCESS

    def elapsed(self, start: int, end: int) -> float:
        """Seconds of the device between two events with timing, which are both done; to half a microsecond."""
        found = c_float()
        self._call("cuEventElapsedTime", byref(found), start, end)
        return found.value / 1e3

    def ignore_captures(self) -> None:
        """Let the calling thread ask about events while other threads capture graphs."""
        self._call("cuThreadExchangeStreamCaptureMode", byref(c_int(_CAPTURE_MODE_RELAXED)))

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        """Device memory, its address; not ordered with any stream."""
        made = c_uint64()
        with self._on(device):
            self._call("cuMemAlloc_v2", byref(made), max(nbytes, 1))
        return made.value

    def free(self, ptr: int) -> None:
        """Give device memory back; may wait for the device."""
        self._call("cuMemFree_v2", ptr)

    def pin(self, nbytes: int) -> int:
        """Page-locked host memory for copies from and to any device, its address."""
        made = c_void_p()
        self._call("cuMemHostAlloc", byref(made), max(nbytes, 1), _HOST_PORTABLE)
        return made.value or 0

    def unpin(self, ptr: int) -> None:
        """Give page-locked memory back."""
        self._call("cuMemFreeHost", ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on a stream between any two of device and pinned memory; returns at once."""
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    def device_of(self, ptr: int) -> int:
        """The device that an address belongs to, or -1 for host memory, pinned or not; managed memory has a device."""
        answers = self._answers
        answers.values[0] = _NOT_CUDA
        self._call("cuPointerGetAttributes", len(_ASKED), _ASKED, answers.places, ptr)
        kind, managed, device = answers.values
        return -1 if kind == _NOT_CUDA or (kind == _HOST_MEMORY and not managed) else device

    # --- contexts ---

    def _retain(self, device: int) -> int:
        """A device's primary context, kept for the life of the process."""
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
        """Work on a device, and leave the thread with the one it had."""
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
            self._again(name, code, *arguments)

    def _again(self, name: str, code: int, *arguments: Any) -> int:
        """Some calls want a current context, whichever: give them one if it is that, else raise."""
        if code == _INVALID_CONTEXT and not self._current():
            device = next(iter(self._contexts), 0)
            with self._on(device):
                code = getattr(self._c, name)(*arguments)
        if code != _NOT_READY:
            self._check(name, code)
        return code

    def _check(self, name: str, code: int) -> None:
        if code:
            error, meaning = self._words("cuGetErrorName", code), self._words("cuGetErrorString", code)
            raise CudaError(f"{name}: {error or f'error {code}'}{f': {meaning}' if meaning else ''}")

    def _words(self, function: str, code: int) -> str:
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


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _disable() -> None:
    for driver in list(_drivers):
        driver._c = _AfterFork()


forks.in_child(_disable)
