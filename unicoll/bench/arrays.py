"""Array families of the benchmark: made, filled from host memory and read back the same way for each.

The host's side is always a flat NumPy array in ``DType.storage``, which for types that NumPy lacks holds the bits.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import DType

__all__ = ["CupyFamily", "Family", "NumpyFamily", "StorageFamily", "TorchFamily", "Unsupported", "family"]

Flat = npt.NDArray[Any]
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Unsupported(Exception):
    """A contender cannot do what is asked; the message says why, and the others run on."""


class Family(ABC):
    """One-dimensional arrays of one library on one device.

    Attributes:
        name: ``"numpy"``, ``"torch"`` or ``"cupy"``.
        device: ``"cpu"``, or ``"cuda:N"``.
    """

    name = ""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    @abstractmethod
    def empty(self, count: int, dtype: DType) -> Any:
        """An array of ``count`` elements; Unsupported if the library lacks the type."""

    @abstractmethod
    def put(self, array: Any, elements: Flat) -> None:
        """Copy the host's elements into an array of as many."""

    @abstractmethod
    def get(self, array: Any) -> Flat:
        """An array's elements on the host, as unsigned or signed integers or floats of the storage's width."""

    def finish(self) -> None:  # noqa: B027 - optional
        """Wait until the device has done what was asked of it; nothing to do on the CPU."""

    def mark(self) -> Any:
        """A moment of the current stream, for :meth:`between`; on the CPU the clock's."""
        return time.perf_counter()

    def between(self, first: Any, last: Any) -> float:
        """Seconds of the device between two marks, once both are past (:meth:`finish`)."""
        return float(last - first)

    def describe(self) -> str:
        """Library and device, for the header."""
        return f"{self.name} arrays" + ("" if self.device == "cpu" else f" on {self.device}")


class NumpyFamily(Family):
    """NumPy; bfloat16 and float8 come from ml_dtypes."""

    name = "numpy"

    def empty(self, count: int, dtype: DType) -> Any:
        return np.empty(count, _numpy_type(dtype))

    def put(self, array: Any, elements: Flat) -> None:
        array.view(elements.dtype)[...] = elements

    def get(self, array: Any) -> Flat:
        bits: Flat = array.view(_BITS[array.itemsize]) if array.dtype.kind not in "iuf" else array
        return bits


class StorageFamily(NumpyFamily):
    """NumPy arrays of the storage's type: for libraries that move bits and do not ask what they mean."""

    def empty(self, count: int, dtype: DType) -> Any:
        return np.empty(count, dtype.storage)


def _numpy_type(dtype: DType) -> np.dtype[Any]:
    if dtype.native:
        return dtype.storage
    if find_spec("ml_dtypes") is None:
        raise Unsupported(f"NumPy has no {dtype.name}: install ml_dtypes, or use --array torch")
    found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), dtype.name))
    return found


class TorchFamily(Family):
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
        if self.device == "cpu":
            return super().mark()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._torch.cuda.current_stream(self.device))
        return event

    def between(self, first: Any, last: Any) -> float:
        if self.device == "cpu":
            return super().between(first, last)
        return float(first.elapsed_time(last)) / 1e3


class CupyFamily(Family):
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


_more: dict[str, Callable[[str], Family]] = {}


def register(name: str, make: Callable[[str], Family]) -> None:
    """One more family for CUDA devices, made from ``"cuda:N"``; where none is asked for it is taken first."""
    _more[name] = make


def family(wanted: str | None, device: str, dtype: DType) -> Family:
    """The family that a contender measures with.

    Args:
        wanted: what the user asked for; None picks NumPy (torch for types that only it has) on the CPU, and CuPy, or
            torch where there is no CuPy, on a CUDA device.
        device: ``"cpu"`` or ``"cuda:N"``.
        dtype: element type.

    Raises:
        Unsupported: the library is not installed, or does not serve the device.
    """
    if wanted is None:
        wanted = _default(device, dtype)
    if wanted in _more:
        return _more[wanted](device)
    if wanted != "numpy" and find_spec(wanted) is None:
        raise Unsupported(f"{wanted} is not installed")
    if wanted == "numpy":
        if device != "cpu":
            raise Unsupported("NumPy arrays are not on a CUDA device")
        return NumpyFamily()
    if wanted == "torch":
        return TorchFamily(device)
    if device == "cpu":
        raise Unsupported("CuPy arrays are on a CUDA device")
    return CupyFamily(device)


def _default(device: str, dtype: DType) -> str:
    if device == "cpu":
        short = not dtype.native and find_spec("ml_dtypes") is None and find_spec("torch") is not None
        return "torch" if short else "numpy"
    if _more:
        return next(iter(_more))
    return "cupy" if dtype.native and find_spec("cupy") is not None else "torch"
