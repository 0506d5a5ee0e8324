"""Arrays of each family in each layout, with guard bytes around their elements."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unicoll.arrays.types import BY_NAME
from unicoll.testing import reference

Array = Any
CANARY = 0xA5


class GuardedArray(NamedTuple):
    """An array in some layout, with guard bytes around its elements.

    ``read`` returns the elements as a contiguous NumPy array, ``intact`` True if the guard bytes
    are unchanged.
    """

    array: Array
    read: Callable[[], Any]
    intact: Callable[[], bool]


_VIEWS: dict[str, Callable[[Any], Any]] = {
    "step": lambda base: base[..., ::2],
    "rows": lambda base: base[::2],
    # The copy is in Fortran's order.
    "transposed": lambda base: base.T,
    "backwards": lambda base: base[..., ::-1],
}


def _guard(layout: str, values: Any) -> Any:
    """Guard bytes as an array of which the layout's view has the shape of some values."""
    shape = values.shape
    if layout == "step":
        shape = (*shape[:-1], 2 * shape[-1])
    elif layout == "rows":
        shape = (2 * shape[0], *shape[1:])
    elif layout == "transposed":
        shape = shape[::-1]
    size = int(np.prod(shape)) * values.itemsize
    return np.frombuffer(bytearray([CANARY]) * size, values.dtype).reshape(shape)


def _only_view_changed(layout: str, base: Any) -> bool:
    """True if the elements of an array of guard bytes that are not in the layout's view are
    unchanged."""
    raw = base.copy().view(f"V{base.itemsize}")
    _VIEWS[layout](raw)[...] = np.frombuffer(bytes([CANARY]) * base.itemsize, raw.dtype)[0]
    return bool(raw.tobytes() == bytes([CANARY]) * raw.nbytes)


class ArrayFamily(ABC):
    """Arrays of one library; for ``layouts`` that it does not have they are contiguous."""

    on_device = True
    layouts: tuple[str, ...] = ("contiguous", "step", "rows", "transposed")

    @abstractmethod
    def from_numpy(self, values: Any) -> Array:
        """A new contiguous array with the values of a NumPy array."""

    @abstractmethod
    def to_numpy(self, array: Array) -> Any:
        """The elements as a contiguous NumPy array."""

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        """The values of a NumPy array in a layout; ``read_only`` has an effect on NumPy arrays."""
        if values.ndim == 0 or layout == "contiguous" or layout not in self.layouts:
            array = self.from_numpy(values)
            return GuardedArray(array, lambda: self.to_numpy(array), lambda: True)
        base = self.from_numpy(_guard(layout, values))
        array = _VIEWS[layout](base)
        array[...] = self.from_numpy(values)
        return GuardedArray(
            array,
            lambda: self.to_numpy(array),
            lambda: _only_view_changed(layout, self.to_numpy(base)),
        )

    def part(self, held: GuardedArray, start: int, stop: int) -> GuardedArray:
        """Rows of an array, as a view of the same memory."""
        array = held.array[start:stop]
        return GuardedArray(array, lambda: self.to_numpy(array), lambda: True)


class NumpyFamily(ArrayFamily):
    on_device = False
    layouts = (*ArrayFamily.layouts, "backwards", "unaligned")

    def from_numpy(self, values: Any) -> Array:
        return np.array(values, order="C")

    def to_numpy(self, array: Array) -> Any:
        return np.ascontiguousarray(array)

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        if layout == "unaligned":
            memory = bytearray(values.nbytes + 1)
            array: Any = np.ndarray(values.shape, values.dtype, memory, offset=1)
            array[...] = values
            held = GuardedArray(array, lambda: self.to_numpy(array), lambda: True)
        else:
            held = super().hold(values, layout)
        held.array.flags.writeable = not read_only
        return held


class TorchFamily(ArrayFamily):
    """Tensors of torch in CPU memory, or on a CUDA device."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self.on_device = device != "cpu"
        self._device = device
        self._torch = torch

    def from_numpy(self, values: Any) -> Array:
        dtype = BY_NAME[values.dtype.name]
        bits = values if dtype.native else values.view(f"i{dtype.itemsize}")
        tensor = self._torch.from_numpy(np.array(bits, order="C")).to(self._device)
        return tensor if dtype.native else tensor.view(getattr(self._torch, dtype.name))

    def to_numpy(self, array: Array) -> Any:
        name = str(array.dtype).partition(".")[2]
        if BY_NAME[name].native:
            return array.contiguous().cpu().numpy()
        bits = {1: self._torch.uint8, 2: self._torch.int16, 4: self._torch.int32}[
            array.element_size()
        ]
        # torch copies bits of all types, and elements of some.
        return array.view(bits).contiguous().cpu().numpy().view(reference.numpy_dtype(name))


class CupyFamily(ArrayFamily):
    """Arrays of CuPy, or of a test's substitute, on the current device; no types that NumPy
    lacks."""

    def __init__(self, module: Any = None) -> None:
        self._cupy = importlib.import_module("cupy") if module is None else module

    def from_numpy(self, values: Any) -> Array:
        host = np.array(values, order="C")
        # CuPy fills an array without dimensions, and with a negative zero it fills it with zero
        # bytes
        return (
            self._cupy.asarray(host)
            if host.ndim
            else self._cupy.asarray(host.reshape(1)).reshape(())
        )

    def to_numpy(self, array: Array) -> Any:
        return np.ascontiguousarray(array.get())


FAMILIES: dict[str, Callable[[], ArrayFamily]] = {
    "numpy": NumpyFamily,
    "torch": TorchFamily,
    "cupy": CupyFamily,
    "torch_cuda": partial(TorchFamily, "cuda"),
}
"""Constructors of array families; the ranks of a backend's tests may add to it."""
_families: dict[str, ArrayFamily] = {}


def layouts(name: str) -> tuple[str, ...]:
    """The layouts of a family; its library need not be installed."""
    return NumpyFamily.layouts if name == "numpy" else ArrayFamily.layouts


def family(name: str) -> ArrayFamily:
    if name not in _families:
        _families[name] = FAMILIES[name]()
    return _families[name]
