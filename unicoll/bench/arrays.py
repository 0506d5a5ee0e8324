"""Array families of the benchmark: one interface to allocate arrays, fill them from the host and read them back.

On the host, data is a flat NumPy array of ``DType.storage``; for types that NumPy lacks it holds the bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.arrays.types import DType, ReduceOp

Flat = npt.NDArray[Any]
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Unsupported(Exception):
    """A contender does not support a case; the message is the reason. Other contenders are still measured."""


class BenchArrays(ABC):
    """One-dimensional arrays of one library on one device, ``"cpu"`` or ``"cuda:N"``."""

    name = ""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @abstractmethod
    def empty(self, count: int, dtype: DType) -> Any:
        """An array of ``count`` elements; Unsupported if the library lacks the type."""

    @abstractmethod
    def put(self, array: Any, elements: Flat) -> None:
        """Copy elements from the host into an array of the same length."""

    @abstractmethod
    def get(self, array: Any) -> Flat:
        """An array's elements on the host, as unsigned or signed integers or floats of the storage's width."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Wait until the device has finished the work on the current stream; does nothing on the CPU."""

    def mark(self) -> Any:
        """A time for :meth:`between`: seconds of the host's clock; on a device an event on the current stream."""
        return perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two marks, after both have completed (:meth:`finish`)."""
        return float(last - first)

    def describe(self) -> str:
        """Library and device, for the table's header."""
        return f"{self.name} arrays" + ("" if self.device == "cpu" else f" on {self.device}")


class NumpyArrays(BenchArrays):
    """NumPy; bfloat16 and float8 come from ml_dtypes."""

    name = "numpy"

    def empty(self, count: int, dtype: DType) -> Any:
        return np.empty(count, _numpy_type(dtype))

    def put(self, array: Any, elements: Flat) -> None:
        array.view(elements.dtype)[...] = elements

    def get(self, array: Any) -> Flat:
        bits: Flat = array.view(_BITS[array.itemsize]) if array.dtype.kind not in "iuf" else array
        return bits


class StorageArrays(NumpyArrays):
    """NumPy arrays of the storage type, for libraries that move bytes without interpreting them."""

    def empty(self, count: int, dtype: DType) -> Any:
        return np.empty(count, dtype.storage)


class SymmetricArrays(NumpyArrays):
    """NumPy arrays in symmetric memory of a group, as large as the largest that a rank asks for."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self._group = group

    def empty(self, count: int, dtype: DType) -> Any:
        most = np.array([count])
        self._group.all_reduce(most, op=ReduceOp.MAX)
        memory = self._group.symmetric_empty(int(most[0]), dtype.name, device="cpu")
        return memory[:count].view(_numpy_type(dtype))


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    if dtype.native:
        return dtype.storage
    if find_spec("ml_dtypes") is None:
        raise Unsupported(f"NumPy has no {dtype.name}: install ml_dtypes, or use --array torch")
    found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), dtype.name))
    return found


class TorchArrays(BenchArrays):
    """torch, on the CPU or a CUDA device."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._torch: Any = import_module("torch")

    def empty(self, count: int, dtype: DType) -> Any:
        kind = getattr(self._torch, dtype.name, None)
        if kind is None:
            raise Unsupported(f"torch {self._torch.__version__} has no {dtype.name}")
        return self._torch.empty(count, dtype=kind, device=self.device)

    def _bits(self, array: Any) -> Any:
        return array.view(getattr(self._torch, _BITS[array.element_size()]))

    def put(self, array: Any, elements: Flat) -> None:
        bits = np.ascontiguousarray(elements).view(_BITS[elements.itemsize])
        self._bits(array).copy_(self._torch.from_numpy(bits))

    def get(self, array: Any) -> Flat:
        bits: Flat = self._bits(array).cpu().numpy()
        return bits

    def finish(self) -> None:
        if self.device != "cpu":
            self._torch.cuda.current_stream(self.device).synchronize()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.device))
        return event

    def between(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3


class CupyArrays(BenchArrays):
    """CuPy, on the process's CUDA device."""

    name = "cupy"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._cupy: Any = import_module("cupy")
        self._cupy.cuda.Device(int(device.partition(":")[2])).use()

    def empty(self, count: int, dtype: DType) -> Any:
        if not dtype.native:
            raise Unsupported(f"CuPy has no {dtype.name}: use --array torch")
        return self._cupy.empty(count, dtype.storage)

    def put(self, array: Any, elements: Flat) -> None:
        array.set(np.ascontiguousarray(elements))

    def get(self, array: Any) -> Flat:
        elements: Flat = array.get()
        return elements

    def finish(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def mark(self) -> Any:
        return self._cupy.cuda.get_current_stream().record(self._cupy.cuda.Event())

    def between(self, first: Any, last: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(first, last)) / 1e3


FAMILIES: dict[str, Callable[[str], BenchArrays]] = {
    "numpy": NumpyArrays,
    "torch": TorchArrays,
    "cupy": CupyArrays,
}
"""The families by name, each called with the device. One more is the default on CUDA devices."""


def family(array_name: str | None, device: str, dtype: DType) -> BenchArrays:
    """The array family for a contender on a device, ``"cpu"`` or ``"cuda:N"``.

    Without ``array_name`` it is NumPy (torch for types that only it has) on the CPU, and CuPy, or torch if CuPy is not
    installed, on a CUDA device. Unsupported if the library is not installed, or does not support the device.
    """
    name = array_name or _default(device, dtype)
    if name in ("torch", "cupy") and find_spec(name) is None:
        raise Unsupported(f"{name} is not installed")
    if name == "numpy" and device != "cpu":
        raise Unsupported("NumPy arrays are not on a CUDA device")
    if name == "cupy" and device == "cpu":
        raise Unsupported("CuPy arrays are on a CUDA device")
    return FAMILIES[name](device)


def _default(device: str, dtype: DType) -> str:
    if device == "cpu":
        needs_torch = not dtype.native and find_spec("ml_dtypes") is None and find_spec("torch") is not None
        return "torch" if needs_torch else "numpy"
    *_, last = FAMILIES
    if last != "cupy":
        return last
    return "cupy" if dtype.native and find_spec("cupy") is not None else "torch"
