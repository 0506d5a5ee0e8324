"""What CUDA's driver API and HIP's API have in common: a :class:`DeviceRuntime` over a C library,
by ctypes."""

from __future__ import annotations

import ctypes
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar, NoReturn

from unicoll.devices.device_runtime import (
    CAPTURE_MODE_RELAXED,
    DeviceError,
    DeviceFacts,
    DeviceRuntime,
)
from unicoll.process import fork_safety

SUCCESS, NOT_READY = 0, 600
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING, _HOST_PORTABLE = 0x1, 0x2, 0x1
_CAPTURE_NONE = 0
_POINTER_ATTRIBUTES = (c_int * 3)(2, 8, 9)
"""Attributes of an address: memory type, managed or not, ordinal of its device."""
_UNREGISTERED, _HOST_MEMORY = 0, 1
_TEXT_BYTES = 256
CONTEXT_ENDED = frozenset(
    (4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911)
)
"""Codes after which only the end of the process makes the device usable again: the library is
shutting down; ECC, NVLink or contained hardware errors; an illegal address; a launch timeout; a
destroyed context; an assertion; a hardware stack error; an illegal instruction; a misaligned
address; an invalid address space; an invalid program counter; a launch failure; a leak of tensor
memory; an error of an external device. CUDA and HIP have the same numbers."""

_number, _text, _out = POINTER(c_int), c_char_p, POINTER(c_void_p)
_stream = _event = _address = c_void_p
_device = c_int
_NO_FLAGS = c_uint(0)

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "init": (c_uint,),
    "version": (_number,),
    "device_count": (_number,),
    "device_handle": (_number, c_int),
    "device_name": (_text, c_int, _device),
    "device_uuid": (POINTER(c_ubyte * 16), _device),
    "device_bus": (_text, c_int, _device),
    "device_memory": (POINTER(c_size_t), _device),
    "device_attribute": (_number, c_int, _device),
    "can_access_peer": (_number, _device, _device),
    "peer_attribute": (_number, c_int, _device, _device),
    "stream_priorities": (_number, _number),
    "stream_create": (_out, c_uint, c_int),
    "stream_destroy": (_stream,),
    "stream_query": (_stream,),
    "stream_is_capturing": (_stream, _number),
    "stream_wait_event": (_stream, _event, c_uint),
    "exchange_capture_mode": (_number,),
    "event_create": (_out, c_uint),
    "event_destroy": (_event,),
    "event_record": (_event, _stream),
    "event_query": (_event,),
    "event_elapsed": (POINTER(c_float), _event, _event),
    "mem_alloc": (POINTER(c_uint64), c_size_t),
    "mem_free": (_address,),
    "mem_range": (POINTER(c_uint64), POINTER(c_size_t), _address),
    "host_alloc": (_out, c_size_t, c_uint),
    "host_free": (c_void_p,),
    "pointer_attributes": (c_uint, _number, _out, _address),
}
"""Argument types of the functions that both libraries have; all return a code."""


class _Functions:
    """A library's functions with their signatures, by our names."""

    def __init__(self, library: Any, driver: type[Driver]) -> None:
        for name, arguments in driver.arguments.items():
            function = getattr(library, driver.symbols[name])
            function.restype = driver.results.get(name, c_int)
            function.argtypes = arguments
            setattr(self, name, function)

    # This is for type checkers: __init__ sets all functions.
    def __getattr__(self, name: str) -> Callable[..., int]:
        raise AttributeError(name)


class _ForkedChild:
    """Replaces the functions in a forked child, where the library cannot be used and may hang."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver.name, driver.symbols

    def __getattr__(self, name: str) -> NoReturn:
        library, symbols = self._driver
        raise DeviceError(
            f"{symbols[name]}: {library} cannot be used in this process, which was forked after its"
            f" parent had initialised {library}: start processes with unicoll.spawn, unicoll.run or"
            " multiprocessing's 'spawn' method"
        )


class _QueryOutputs(threading.local):
    """Output memory of the attributes of an address; allocated once per thread, since the call is
    frequent."""

    def __init__(self) -> None:
        self.values = (c_int * len(_POINTER_ATTRIBUTES))()
        start, step = ctypes.addressof(self.values), ctypes.sizeof(c_int)
        self.addresses = (c_void_p * len(_POINTER_ATTRIBUTES))(
            *(start + i * step for i in range(len(_POINTER_ATTRIBUTES)))
        )


class Driver(DeviceRuntime):
    """All devices of a library. Errors name its function, the error's name and its description.

    Args:
        library: a ``ctypes.CDLL``, or another object with the functions as attributes.
        path: of its file.

    Attributes:
        symbols: the library's function of each name.
        arguments: argument types of each function.
        results: result types other than ``int``.
        capability_attributes: attributes of a device: major and minor compute capability.
        native_atomics: the attribute of a pair of devices.

    Raises:
        DeviceError: the library cannot be initialised.
    """

    symbols: ClassVar[Mapping[str, str]]
    arguments: ClassVar[Mapping[str, tuple[Any, ...]]]
    results: ClassVar[Mapping[str, Any]] = {}
    capability_attributes: ClassVar[tuple[int, int]]
    native_atomics: ClassVar[int]

    def __init__(self, library: Any, path: str) -> None:
        self._c: Any = _Functions(library, type(self))
        self._path = path
        self._query = _QueryOutputs()
        self._facts: dict[int, DeviceFacts] = {}
        self._call("init", 0)
        self._version = self._number("version")
        _drivers.add(self)

    # --- devices ---

    def device_count(self) -> int:
        return self._number("device_count")

    def facts(self, device: int) -> DeviceFacts:
        found = self._facts.get(device)
        if found is None:
            found = self._facts[device] = self._find_facts(device)
        return found

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        handle, peer = self._handle(device), self._handle(other)
        if not self._number("can_access_peer", handle, peer):
            return False, False
        return True, bool(self._number("peer_attribute", self.native_atomics, handle, peer))

    # --- streams and events ---

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        made = c_void_p()
        with self._on(device):
            priority = 0
            if high_priority:
                lowest, highest = c_int(), c_int()
                self._call("stream_priorities", byref(lowest), byref(highest))
                priority = highest.value
            self._call("stream_create", byref(made), _STREAM_NON_BLOCKING, priority)
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call_unless_ended("stream_destroy", stream)

    def stream_done(self, stream: int) -> bool:
        code = self._c.stream_query(stream)
        if code == NOT_READY:
            return False
        # _failed() may repeat the query with a context, and returns the code of that.
        return code == SUCCESS or self._failed("stream_query", code, stream) == SUCCESS

    def capturing(self, stream: int) -> bool:
        status = c_int()
        code = self._c.stream_is_capturing(stream, byref(status))
        if code:
            self._failed("stream_is_capturing", code, stream, byref(status))
        return status.value != _CAPTURE_NONE

    def create_event(self, device: int, timing: bool = False) -> int:
        made = c_void_p()
        with self._on(device):
            self._call("event_create", byref(made), 0 if timing else _EVENT_DISABLE_TIMING)
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        self._call_unless_ended("event_destroy", event)

    def record(self, event: int, stream: int) -> None:
        code = self._c.event_record(event, stream)
        if code:
            self._failed("event_record", code, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        code = self._c.stream_wait_event(stream, event, _NO_FLAGS)
        if code:
            self._failed("stream_wait_event", code, stream, event, _NO_FLAGS)

    def event_done(self, event: int) -> bool:
        code = self._c.event_query(event)
        if code == NOT_READY:
            return False
        return code == SUCCESS or self._failed("event_query", code, event) == SUCCESS

    def elapsed(self, start: int, end: int) -> float:
        found = c_float()
        self._call("event_elapsed", byref(found), start, end)
        return found.value / 1e3

    def ignore_captures(self, mode: int = CAPTURE_MODE_RELAXED) -> int:
        exchanged = c_int(mode)
        self._call("exchange_capture_mode", byref(exchanged))
        return exchanged.value

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        made = c_uint64()
        with self._on(device):
            # CUDA refuses a size of zero.
            self._call("mem_alloc", byref(made), max(nbytes, 1))
        return made.value

    def free(self, ptr: int) -> None:
        self._call_unless_ended("mem_free", ptr)

    def pin(self, nbytes: int) -> int:
        made = c_void_p()
        self._call("host_alloc", byref(made), max(nbytes, 1), _HOST_PORTABLE)
        return made.value or 0

    def unpin(self, ptr: int) -> None:
        self._call_unless_ended("host_free", ptr)

    def allocation(self, ptr: int) -> int:
        start, size = c_uint64(), c_size_t()
        self._call("mem_range", byref(start), byref(size), ptr)
        return start.value

    def device_of(self, ptr: int) -> int:
        query = self._query
        query.values[0] = _UNREGISTERED
        # HIP writes a bool there, one byte only, so the rest has to be zero before.
        query.values[1] = 0
        self._call(
            "pointer_attributes",
            len(_POINTER_ATTRIBUTES),
            _POINTER_ATTRIBUTES,
            query.addresses,
            ptr,
        )
        kind, managed, device = query.values
        return -1 if kind == _UNREGISTERED or (kind == _HOST_MEMORY and not managed) else device

    # --- calls ---

    @abstractmethod
    def _on(self, device: int) -> AbstractContextManager[None]:
        """Make a device current for the library; the previous one is restored at the end."""

    @abstractmethod
    def _error_texts(self, code: int) -> tuple[str, str]:
        """Name and description of an error; "" if the library has none."""

    @abstractmethod
    def _uuid(self, ident: bytes, bus: str) -> str:
        """A device's globally unique name."""

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._c, name)(*arguments)
        if code:
            self._failed(name, code, *arguments)

    def _call_unless_ended(self, name: str, *arguments: Any) -> None:
        """A call that has nothing to do once the context has ended."""
        try:
            self._call(name, *arguments)
        except DeviceError as e:
            if not e.context_ended:
                raise

    def _failed(self, name: str, code: int, *arguments: Any) -> int:
        """Raise for the code of a call, unless that is ``NOT_READY``; returns the code."""
        if code not in (SUCCESS, NOT_READY):
            error, meaning = self._error_texts(code)
            what = f"{error or f'error {code}'}{f': {meaning}' if meaning else ''}"
            failure = DeviceError(f"{self.symbols[name]}: {what}")
            failure.context_ended = code in CONTEXT_ENDED
            raise failure
        return code

    def _number(self, name: str, *arguments: Any) -> int:
        found = c_int()
        self._call(name, byref(found), *arguments)
        return found.value

    def _handle(self, device: int) -> int:
        return self._number("device_handle", device)

    def _find_facts(self, device: int) -> DeviceFacts:
        handle = self._handle(device)
        name, bus = (
            ctypes.create_string_buffer(_TEXT_BYTES),
            ctypes.create_string_buffer(_TEXT_BYTES),
        )
        self._call("device_name", name, _TEXT_BYTES, handle)
        self._call("device_bus", bus, _TEXT_BYTES, handle)
        memory, ident = c_size_t(), (c_ubyte * 16)()
        self._call("device_memory", byref(memory), handle)
        self._call("device_uuid", byref(ident), handle)
        major, minor = (
            self._number("device_attribute", which, handle) for which in self.capability_attributes
        )
        address = bus.value.decode(errors="replace").lower()
        return DeviceFacts(
            name.value.decode(errors="replace"),
            self._uuid(bytes(ident), address),
            address,
            memory.value,
            (major, minor),
        )


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


def _disable() -> None:
    for driver in list(_drivers):
        driver._c = _ForkedChild(driver)


fork_safety.in_child(_disable)
