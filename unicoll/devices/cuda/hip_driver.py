"""HIP's API by ctypes: AMD's devices with the HIP runtime only, which CuPy and torch for ROCm use,
too.

The current device of a thread takes the place of CUDA's contexts; streams, events and memory are as
in CUDA. A process must have one copy of the runtime, so the one that it has mapped already is used,
else that of torch, which it may import later. Signatures are those of ``hip_runtime_api.h`` 6 and
7.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from unicoll.devices.cuda import driver
from unicoll.devices.cuda.driver import Driver
from unicoll.devices.device_runtime import PER_THREAD_STREAM, DeviceError, DeviceRuntime, on_device
from unicoll.process.shared_library import SharedLibrary, package_folders

VARIABLE = "UNICOLL_HIP_LIBRARY"
OLDEST = 60000000
"""HIP 6.0, the first with its numbers for kinds of memory, and with RCCL 2.18."""
_KERNEL_DRIVER = "/dev/kfd"
_MEMCPY_DEFAULT = 4
_IDENT = re.compile(rb"[0-9a-fA-F]{16}")

ARGUMENTS = driver.ARGUMENTS | {
    "error_name": (c_int,),
    "error_text": (c_int,),
    "last_error": (),
    "set_device": (c_int,),
    "get_device": (POINTER(c_int),),
    "copy": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
}
SYMBOLS = {
    "init": "hipInit",
    "version": "hipRuntimeGetVersion",
    "error_name": "hipGetErrorName",
    "error_text": "hipGetErrorString",
    "last_error": "hipGetLastError",
    "device_count": "hipGetDeviceCount",
    "device_handle": "hipDeviceGet",
    "device_name": "hipDeviceGetName",
    "device_uuid": "hipDeviceGetUuid",
    "device_bus": "hipDeviceGetPCIBusId",
    "device_memory": "hipDeviceTotalMem",
    "device_attribute": "hipDeviceGetAttribute",
    "can_access_peer": "hipDeviceCanAccessPeer",
    "peer_attribute": "hipDeviceGetP2PAttribute",
    "set_device": "hipSetDevice",
    "get_device": "hipGetDevice",
    "stream_priorities": "hipDeviceGetStreamPriorityRange",
    "stream_create": "hipStreamCreateWithPriority",
    "stream_destroy": "hipStreamDestroy",
    "stream_query": "hipStreamQuery",
    "stream_is_capturing": "hipStreamIsCapturing",
    "stream_wait_event": "hipStreamWaitEvent",
    "exchange_capture_mode": "hipThreadExchangeStreamCaptureMode",
    "event_create": "hipEventCreateWithFlags",
    "event_destroy": "hipEventDestroy",
    "event_record": "hipEventRecord",
    "event_query": "hipEventQuery",
    "event_elapsed": "hipEventElapsedTime",
    "mem_alloc": "hipMalloc",
    "mem_free": "hipFree",
    "mem_range": "hipMemGetAddressRange",
    "host_alloc": "hipHostMalloc",
    "host_free": "hipHostFree",
    "copy": "hipMemcpyAsync",
    "pointer_attributes": "hipDrvPointerGetAttributes",
}
"""HIP's function of each name."""


def library_folders() -> Iterator[Path]:
    """Folders with ROCm's libraries: those of torch, of the wheels beside it, of the system. torch
    is not imported."""
    for package in package_folders("torch"):
        yield package / "lib"
        yield from sorted(package.parent.glob("_rocm_sdk_*/lib"))
    yield Path(os.environ.get("ROCM_PATH") or "/opt/rocm") / "lib"


FILE = SharedLibrary(
    ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"),
    "/libamdhip64.so",
    "hipInit",
    library_folders,
)


def is_expected() -> bool:
    """True if the machine has AMD's kernel driver for GPUs, or the runtime is named in the
    environment."""
    return bool(os.environ.get(VARIABLE)) or os.path.exists(_KERNEL_DRIVER)


def load() -> DeviceRuntime | str:
    """The initialised runtime; or the reason why no device can be used."""
    named = os.environ.get(VARIABLE)
    reasons = []
    for path in [named] if named else FILE.candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as e:
            reasons.append(str(e))
            continue
        path = FILE.loaded_from(library) or path
        try:
            # The first file that can be loaded decides, also if it cannot be used: a process must
            # have one copy of the runtime.
            made = HipDriver(library, path)
            return made if made.device_count() else f"there is no HIP device{_visible()}"
        except DeviceError as e:
            return f"{e}{_visible()}"
        except AttributeError as e:
            return f"{path} is not a HIP runtime: {e}"
    return f"AMD's HIP runtime cannot be loaded: {'; '.join(reasons)}"


def _visible() -> str:
    names = (HipDriver.visible_devices, "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    found = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
    return f" ({', '.join(found)})" if found else ""


class _ThreadDevice(threading.local):
    """Whether this thread has a device of its own: HIP has device 0 for a thread that never chose
    one."""

    chosen = False


class HipDriver(Driver):
    """All devices, by libamdhip64."""

    name = "HIP"
    visible_devices = "HIP_VISIBLE_DEVICES"
    symbols = SYMBOLS
    arguments = ARGUMENTS
    results = {"error_name": c_char_p, "error_text": c_char_p}
    capability_attributes = (23, 61)
    native_atomics = 2

    def __init__(self, library: Any, path: str) -> None:
        self._thread = _ThreadDevice()
        self._recorded_on: dict[int, int] = {}
        super().__init__(library, path)
        if self._version < OLDEST:
            raise DeviceError(f"{self.description} is too old: 6.0 or newer is needed")

    @property
    def folder(self) -> Path:
        """Of the runtime's file; RCCL of the same ROCm is there."""
        return Path(self._path).parent

    @property
    def description(self) -> str:
        """``HIP 6.4 runtime (/opt/rocm/lib/libamdhip64.so.6)``."""
        return (
            f"HIP {self._version // 10000000}.{self._version // 100000 % 100} runtime"
            f" ({self._path})"
        )

    def current_device(self) -> int:
        found = self._device_of_thread()
        return found if found or self._thread.chosen else -1

    def set_device(self, device: int) -> None:
        if self._device_of_thread() != max(device, 0):
            self._call_unless_ended("set_device", max(device, 0))
        self._thread.chosen = device >= 0

    def _device_of_thread(self) -> int:
        found = c_int()
        self._call_unless_ended("get_device", byref(found))
        return found.value

    def stream_done(self, stream: int) -> bool:
        return super().stream_done(stream) or self._forget_code()

    def record(self, event: int, stream: int) -> None:
        super().record(event, stream)
        self._recorded_on[event] = stream

    def destroy_event(self, event: int) -> None:
        # The entry is removed before the event: another thread may get the same handle for a new
        # event as soon as this one is destroyed.
        self._recorded_on.pop(event, None)
        super().destroy_event(event)

    def event_done(self, event: int) -> bool:
        """As in CUDA; False as long as the stream of the event captures a graph.

        HIP 6 makes the capture invalid if an event of the stream is queried, also one that was
        recorded before. It reads the memory of the stream, too, so a stream that was destroyed,
        which waited for its work, is not queried.
        """
        stream = self._recorded_on.get(event, 0)
        if stream > PER_THREAD_STREAM:
            status = c_int()
            # An error means that the stream was destroyed. Its work was waited for then, so the
            # event has completed.
            if self._c.stream_is_capturing(stream, byref(status)):
                self._forget_code()
                return True
            if status.value:
                return False
        return super().event_done(event) or self._forget_code()

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("copy", to, source, nbytes, _MEMCPY_DEFAULT, stream)

    def _on(self, device: int) -> AbstractContextManager[None]:
        return on_device(self, device)

    def _failed(self, name: str, code: int, *arguments: Any) -> int:
        self._forget_code()
        return super()._failed(name, code, *arguments)

    def _forget_code(self) -> bool:
        """Clear the code of this thread's last call, which torch would take for that of its own
        next one; False."""
        self._c.last_error()
        return False

    def _error_texts(self, code: int) -> tuple[str, str]:
        name, text = self._c.error_name(code), self._c.error_text(code)
        return (name or b"").decode(errors="replace"), (text or b"").decode(errors="replace")

    def _uuid(self, ident: bytes, bus: str) -> str:
        """The name in ``HIP_VISIBLE_DEVICES``, which some devices lack, and the bus id: partitions
        share the name."""
        return f"GPU-{ident.decode()}-{bus}" if _IDENT.fullmatch(ident) else f"GPU-{bus}"
