"""Arrays of the benchmark, on the host and on CUDA devices: made by each library, filled and read
in one way.

On the host, data is a flat NumPy array of ``DType.storage``; for types that NumPy lacks it holds
the bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.families import FAMILIES, numpy_dtype
from unicoll.arrays.types import DType
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceRuntime
from unicoll.errors import DistTypeError
from unicoll.staging.pinned_pool import PinnedBlock

Flat = npt.NDArray[Any]
Allocate = Callable[[int, DType, str], Any]
"""Makes a flat array of so many elements on a device; Unsupported if its library lacks the type."""
_PIECE = 4 << 20
"""Bytes of pinned memory through which arrays on a device are filled and read."""


class Unsupported(Exception):
    """A contender does not support a case; the message is the reason. Other contenders are still
    measured."""


class BenchArrays:
    """Flat arrays of one library on one device, ``"cpu"``, ``"cuda:N"`` or ``"xpu:N"``."""

    def __init__(self, allocate: Allocate, device: str = "cpu") -> None:
        self.device = device
        self._allocate = allocate
        self._stream: Callable[[], int] | None = None

    def empty(self, count: int, dtype: DType) -> Any:
        """An array of ``count`` elements; Unsupported if the library lacks the type."""
        array = self._allocate(count, dtype, self.device)
        if self.device != "cpu":
            self._stream = as_buffer(array).current_stream
        return array

    def put(self, array: Any, elements: Flat) -> None:
        """Copy elements from the host into an array of the same length."""
        memory = as_buffer(array).flat
        if memory is None:
            self._copy(array, elements, to_device=True)
        else:
            memory[...] = elements

    def get(self, array: Any) -> Flat:
        """An array's elements on the host."""
        buffer = as_buffer(array)
        if buffer.flat is not None:
            return buffer.flat
        elements = np.empty(buffer.count, buffer.dtype.storage)
        self._copy(array, elements, to_device=False)
        return elements

    def _copy(self, array: Any, elements: Flat, to_device: bool) -> None:
        runtime, address, host = self._runtime(), as_buffer(array).ptr, elements.view(np.uint8)
        pinned = PinnedBlock(runtime.pin(_PIECE), _PIECE)
        try:
            for start in range(0, host.size, _PIECE):
                part = host[start : start + _PIECE]
                if to_device:
                    pinned.bytes[: part.size] = part
                    runtime.copy(address + start, pinned.ptr, part.size, self._current_stream())
                    self.finish()
                else:
                    runtime.copy(pinned.ptr, address + start, part.size, self._current_stream())
                    self.finish()
                    part[...] = pinned.bytes[: part.size]
        finally:
            runtime.unpin(pinned.ptr)

    def _runtime(self) -> DeviceRuntime:
        return runtimes.runtime(self.device.partition(":")[0])

    def _current_stream(self) -> int:
        return self._stream() if self._stream is not None else 0

    def finish(self) -> None:
        """Wait until the device has finished the work on the current stream; does nothing on the
        CPU."""
        if self.device != "cpu":
            runtime, stream = self._runtime(), self._current_stream()
            while not runtime.stream_done(stream):
                os.sched_yield()

    def mark(self) -> int:
        """An event on the current stream of the device, for :meth:`between`."""
        runtime = self._runtime()
        event = runtime.create_event(device_index(self.device), timing=True)
        runtime.record(event, self._current_stream())
        return event

    def between(self, first: int, last: int) -> float:
        """Seconds between two marks, after both have completed (:meth:`finish`); they are used
        once."""
        runtime = self._runtime()
        seconds = runtime.elapsed(first, last)
        for event in (first, last):
            runtime.destroy_event(event)
        return seconds


def device_index(device: str) -> int:
    """The number of a device ``"cuda:N"`` or ``"xpu:N"``."""
    return int(device.partition(":")[2])


def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of an element type; Unsupported without ml_dtypes where that is needed."""
    try:
        return numpy_dtype(dtype)
    except DistTypeError as e:
        raise Unsupported(f"{e}, or use --array torch") from None


def storage_array(count: int, dtype: DType, device: str = "cpu") -> Any:
    """NumPy arrays of the storage type, for libraries that move bytes without interpreting them."""
    return np.empty(count, dtype.storage)


def array_of(library: str, count: int, dtype: DType, device: str) -> Any:
    """A flat array of a library of :data:`unicoll.arrays.families.FAMILIES`; bfloat16 and float8 of
    NumPy come from ml_dtypes."""
    try:
        return FAMILIES[library].empty((count,), dtype, device)
    except DistTypeError as e:
        hint = "" if dtype.native or library == "torch" else "; --array torch may have it"
        raise Unsupported(f"{e}{hint}") from None


def family(array_name: str | None, device: str, dtype: DType) -> BenchArrays:
    """The arrays for a contender on a device, ``"cpu"``, ``"cuda:N"`` or ``"xpu:N"``.

    Without ``array_name`` they are NumPy's (torch's for types that only it has) on the CPU, CuPy's,
    or torch's if CuPy is not installed, on a CUDA device, and torch's on an XPU. Unsupported if the
    library is not installed or lacks the device.
    """
    name = array_name
    if name is None and device == "cpu":
        needs_torch = (
            not dtype.native and find_spec("ml_dtypes") is None and find_spec("torch") is not None
        )
        name = "torch" if needs_torch else "numpy"
    elif name is None:
        has_cupy = device.startswith("cuda") and find_spec("cupy") is not None
        name = "cupy" if dtype.native and has_cupy else "torch"
    if name != "numpy" and find_spec(name) is None:
        raise Unsupported(f"{name} is not installed")
    return BenchArrays(partial(array_of, name), device)
