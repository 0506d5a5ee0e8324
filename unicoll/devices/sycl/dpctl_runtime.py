"""SYCL devices by dpctl. Events are barriers of queues."""

from __future__ import annotations

import itertools
import os
import threading
from importlib import import_module
from typing import Any, NoReturn

from unicoll.devices.device_runtime import DeviceError, DeviceFacts
from unicoll.devices.sycl.runtime import SyclRuntime, errors
from unicoll.errors import DistTypeError
from unicoll.process import fork_safety


class _Event:
    """An event: the barrier that recorded it, None before the first."""

    __slots__ = ("barrier",)

    def __init__(self) -> None:
        self.barrier: Any = None


class _Memory:
    """Memory of SYCL by its address, for copies."""

    def __init__(self, ptr: int, nbytes: int, queue: Any) -> None:
        self.__sycl_usm_array_interface__ = {
            "data": (ptr, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 1,
            "offset": 0,
            "syclobj": queue,
        }


class _Thread(threading.local):
    """SYCL has no current device."""

    device = -1


class _ForkedChild:
    """Replaces dpctl and the queues in a forked child, where SYCL cannot be used and may hang."""

    def __getattr__(self, name: str) -> NoReturn:
        raise DeviceError(
            "SYCL cannot be used in this process, which was forked after its parent had used it:"
            " start processes with unicoll.spawn, unicoll.run or multiprocessing's 'spawn' method"
        )

    # The queues and handles that it replaces are dictionaries, which are indexed.
    __getitem__ = __getattr__


class DpctlRuntime(SyclRuntime):
    """All SYCL devices, by dpctl: Intel's GPUs first, in Level Zero's order as in torch, then the
    others.

    Queues of the program are known from its arrays. They are kept: SYCL does not tell when a queue
    is no longer used.
    """

    # The memory of a dropped array is freed at once: dpctl waits for its own operations only.
    frees_in_order = False

    def __init__(self, dpctl: Any) -> None:
        self._dpctl: Any = dpctl
        self._usm: Any = import_module("dpctl.memory")
        self._numbered = found = dpctl.get_devices()
        self._gpus = [d for d in found if d.is_gpu and d.backend == dpctl.backend_type.level_zero]
        self._devices = self._gpus + [d for d in found if d not in self._gpus]
        self._thread = _Thread()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # The queues by their handle.
        self._queues: Any = {}
        # The handles by queue. Different objects for one queue are equal.
        self._handles: Any = {}
        self._events: dict[int, _Event] = {}
        self._memory: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}
        fork_safety.in_child(self._disable)

    def _disable(self) -> None:
        self._dpctl = self._usm = self._queues = self._handles = _ForkedChild()

    @property
    def description(self) -> str:
        return f"SYCL by dpctl {self._dpctl.__version__}"

    # --- devices ---

    def device_count(self) -> int:
        return len(self._devices)

    def has_gpus(self) -> bool:
        return bool(self._gpus)

    def facts(self, device: int) -> DeviceFacts:
        found = self._devices[device]
        # There is no unique id of a device in dpctl. Its number depends on the variables that hide
        # others, so their values are a part of the name.
        hidden = "/".join(
            os.environ.get(v, "") for v in (self.visible_devices, "ONEAPI_DEVICE_SELECTOR")
        )
        return DeviceFacts(
            found.name.strip(), f"{found.filter_string} {hidden}", "", found.global_mem_size, (0, 0)
        )

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        with errors("ext_oneapi_can_access_peer"):
            reaches = bool(self._devices[device].can_access_peer(self._devices[other]))
            return reaches, False

    def current_device(self) -> int:
        return self._thread.device

    def set_device(self, device: int) -> None:
        self._thread.device = device

    # --- streams and events ---

    def place_of(self, queue: Any) -> tuple[int, int]:
        device = queue.sycl_device
        if device not in self._devices:
            raise DistTypeError(
                f"arrays on a part of a device cannot be communicated: {device.name}"
            )
        return self._devices.index(device), self._handles.get(queue) or self._keep(queue)

    def default_queue(self, number: int) -> Any:
        return self._dpctl.get_device_cached_queue(self._numbered[number])

    def _keep(self, queue: Any) -> int:
        with self._lock:
            # The handle is the address of the queue. The queue is kept with it, or another one
            # could get the same address.
            handle: int = self._handles.setdefault(queue, queue.addressof_ref())
            self._queues.setdefault(handle, queue)
            return handle

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        found = self._devices[device]
        properties = [
            "in_order",
            *(["enable_profiling"] if found.has_aspect_queue_profiling else []),
        ]
        with errors("sycl::queue"):
            return self._keep(self._dpctl.SyclQueue(found, property=properties))

    def destroy_stream(self, stream: int) -> None:
        with self._lock:
            queue = self._queues.pop(stream)
            self._marks.pop(stream, None)
            self._handles.pop(queue, None)

    def in_order(self, stream: int) -> bool:
        return bool(self._queues[stream].is_in_order)

    def stream_done(self, stream: int) -> bool:
        with errors("ext_oneapi_submit_barrier"):
            mark = self._marks.get(stream) or self._queues[stream].submit_barrier()
            if self._complete(mark):
                self._marks.pop(stream, None)
                return True
            # There is no query in dpctl for whether a queue is done, so later calls ask this
            # barrier. A new one for each call would lengthen the queue while a thread polls it.
            self._marks[stream] = mark
            return False

    def create_event(self, device: int, timing: bool = False) -> int:
        handle = next(self._numbers)
        self._events[handle] = _Event()
        return handle

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with errors("ext_oneapi_submit_barrier"):
            self._events[event].barrier = self._queues[stream].submit_barrier()

    def wait_event(self, stream: int, event: int) -> None:
        barrier = self._events[event].barrier
        if barrier is not None:
            with errors("ext_oneapi_submit_barrier"):
                self._queues[stream].submit_barrier([barrier])

    def event_done(self, event: int) -> bool:
        barrier = self._events[event].barrier
        with errors("event::get_info"):
            return barrier is None or self._complete(barrier)

    def _complete(self, barrier: Any) -> bool:
        return bool(barrier.execution_status == self._dpctl.event_status_type.complete)

    def elapsed(self, start: int, end: int) -> float:
        first, last = self._events[start].barrier, self._events[end].barrier
        with errors("event::get_profiling_info"):
            return float(last.profiling_info_end - first.profiling_info_end) / 1e9

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        return self._allocate(self._usm.MemoryUSMDevice, device, nbytes)

    def _allocate(self, kind: Any, device: int, nbytes: int) -> int:
        with errors(kind.__name__):
            made = kind(
                max(nbytes, 1), queue=self._dpctl.get_device_cached_queue(self._devices[device])
            )
        ptr: int = made.__sycl_usm_array_interface__["data"][0]
        self._memory[ptr] = made
        return ptr

    def free(self, ptr: int) -> None:
        del self._memory[ptr]

    def pin(self, nbytes: int) -> int:
        return self._allocate(self._usm.MemoryUSMHost, max(0, self.current_device()), nbytes)

    def unpin(self, ptr: int) -> None:
        self.free(ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        queue, usm = self._queues[stream], self._usm.as_usm_memory
        with errors("queue::memcpy"):
            queue.memcpy_async(
                usm(_Memory(to, nbytes, queue)), usm(_Memory(source, nbytes, queue)), nbytes
            )
