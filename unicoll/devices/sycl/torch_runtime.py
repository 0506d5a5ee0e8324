"""SYCL devices through torch: streams, events and memory of ``torch.xpu``."""

from __future__ import annotations

import itertools
import os
from typing import Any

from unicoll.devices.device_runtime import DeviceFacts
from unicoll.devices.sycl.runtime import SyclRuntime, errors


class TorchRuntime(SyclRuntime):
    """The GPUs of a torch for XPU. Its streams are in order.

    torch has a fixed number of streams per device, which it never destroys.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._xpu = torch.xpu
        self._raw_stream = getattr(torch._C, "_xpu_getCurrentRawStream", None)
        self._numbers = itertools.count(1)
        self._streams: dict[int, Any] = {}
        self._events: dict[int, Any] = {}
        self._memory: dict[int, Any] = {}

    @property
    def description(self) -> str:
        return f"SYCL by torch {self._torch.__version__}"

    # --- devices ---

    def device_count(self) -> int:
        return int(self._xpu.device_count())

    def facts(self, device: int) -> DeviceFacts:
        found = self._xpu.get_device_properties(device)
        # Before 2.9 torch has no unique id. The number depends on the variable that hides other
        # devices, so its value is a part of the name.
        uuid = (
            getattr(found, "uuid", None) or f"{device} {os.environ.get(self.visible_devices, '')}"
        )
        return DeviceFacts(found.name, f"GPU-{uuid}", "", found.total_memory, (0, 0))

    def peer_access(self, device: int, other: int) -> tuple[bool, bool]:
        # From 2.9 on torch has this function.
        query = getattr(self._xpu, "can_device_access_peer", None)
        return bool(query is not None and query(device, other)), False

    def current_device(self) -> int:
        return int(self._xpu.current_device()) if self._xpu.is_initialized() else -1

    def set_device(self, device: int) -> None:
        with errors("torch.xpu.set_device"):
            # The device cannot be unset in torch, whose default is device 0.
            self._xpu.set_device(max(0, device))

    # --- streams and events ---

    def current_stream(self, device: int) -> int:
        """Handle of torch's current stream on a device, for the calling thread."""
        # The private function is faster than the public one.
        handle = self._raw_stream(device) if self._raw_stream is not None else 0
        return handle if handle in self._streams else self._keep(self._xpu.current_stream(device))

    def _keep(self, stream: Any) -> int:
        handle = int(stream.sycl_queue)
        self._streams.setdefault(handle, stream)
        return handle

    def create_stream(self, device: int, high_priority: bool = False) -> int:
        with errors("torch.xpu.Stream"):
            return self._keep(self._xpu.Stream(device, priority=-1 if high_priority else 0))

    def destroy_stream(self, stream: int) -> None:
        # A device has a fixed number of streams in torch, which gives them out again and again, so
        # another user of torch may have the same one.
        pass

    def capturing(self, stream: int) -> bool:
        # From 2.10 on torch has this function. It tells only about the current stream.
        query = getattr(self._xpu, "is_current_stream_capturing", None)
        device = self.current_device()
        return (
            query is not None
            and device >= 0
            and stream == self.current_stream(device)
            and bool(query())
        )

    def stream_done(self, stream: int) -> bool:
        with errors("torch.xpu.Stream.query"):
            return bool(self._streams[stream].query())

    def create_event(self, device: int, timing: bool = False) -> int:
        handle = next(self._numbers)
        self._events[handle] = self._xpu.Event(enable_timing=timing)
        return handle

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with errors("torch.xpu.Event.record"):
            self._events[event].record(self._streams[stream])

    def wait_event(self, stream: int, event: int) -> None:
        with errors("torch.xpu.Stream.wait_event"):
            self._streams[stream].wait_event(self._events[event])

    def event_done(self, event: int) -> bool:
        with errors("torch.xpu.Event.query"):
            return bool(self._events[event].query())

    def elapsed(self, start: int, end: int) -> float:
        with errors("torch.xpu.Event.elapsed_time"):
            return float(self._events[start].elapsed_time(self._events[end])) / 1e3

    # --- memory ---

    def allocate(self, device: int, nbytes: int) -> int:
        with errors("torch.empty"):
            made = self._torch.empty(
                max(nbytes, 1), dtype=self._torch.uint8, device=f"xpu:{device}"
            )
            # The memory pool of torch is ordered by streams: kernels that used the memory before
            # may still be on this one. The caller uses the memory on other streams.
            self._xpu.current_stream(device).synchronize()
        return self._hold(made)

    def _hold(self, tensor: Any) -> int:
        ptr: int = tensor.data_ptr()
        self._memory[ptr] = tensor
        return ptr

    def free(self, ptr: int) -> None:
        del self._memory[ptr]

    def pin(self, nbytes: int) -> int:
        with errors("torch.empty"):
            made = self._torch.empty(max(nbytes, 1), dtype=self._torch.uint8, pin_memory=True)
        return self._hold(made)

    def unpin(self, ptr: int) -> None:
        self.free(ptr)

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        on = self._streams[stream]
        with errors("Tensor.copy_"), self._xpu.stream(on):
            self._bytes(to, nbytes, on.device).copy_(
                self._bytes(source, nbytes, on.device), non_blocking=True
            )

    def _bytes(self, ptr: int, nbytes: int, device: Any) -> Any:
        """A tensor over memory of the device, or over page-locked memory, which the device reaches
        as well."""
        torch = self._torch
        storage = torch._C._construct_storage_from_data_pointer(ptr, device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,))
