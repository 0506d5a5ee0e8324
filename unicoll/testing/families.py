"""Arrays of each family in each layout, with guard bytes around their elements."""

from __future__ import annotations

import importlib
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

    Attributes:
        array: the array.
        read: returns its elements as a contiguous NumPy array.
        intact: returns True if the guard bytes are unchanged.
    """

    array: Array
    read: Callable[[], Any]
    intact: Callable[[], bool]


VIEWS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda base: base,
    "step": lambda base: base[..., ::2],
    "rows": lambda base: base[::2],
    "transposed": lambda base: base.T,
    "backwards": lambda base: base[..., ::-1],
}


def base_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if layout == "step":
        return (*shape[:-1], 2 * shape[-1])
    if layout == "rows":
        return (2 * shape[0], *shape[1:])
    return shape[::-1] if layout == "transposed" else shape


def _guard(layout: str, values: Any) -> Any:
    """Guard bytes as an array of which the layout's view has the shape of some values."""
    shape = base_shape(layout, values.shape)
    size = int(np.prod(shape)) * values.itemsize
    return np.frombuffer(bytearray([CANARY]) * size, values.dtype).reshape(shape)


def _only_view_changed(layout: str, base: Any) -> bool:
    """True if the elements of an array of guard bytes that are not in the layout's view are unchanged."""
    raw = base.copy().view(f"V{base.itemsize}")
    VIEWS[layout](raw)[...] = np.frombuffer(bytes([CANARY]) * base.itemsize, raw.dtype)[0]
    return bool(raw.tobytes() == bytes([CANARY]) * raw.nbytes)


class NumpyFamily:
    """NumPy arrays."""

    on_device = False

    layouts = ("contiguous", "step", "rows", "transposed", "backwards", "fortran", "unaligned")

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        if values.ndim == 0 or layout not in VIEWS:
            array = self._special(values, layout)
            array.flags.writeable = not read_only
            return GuardedArray(array, lambda: np.ascontiguousarray(array), lambda: True)
        base = _guard(layout, values)
        array = VIEWS[layout](base)
        array[...] = values
        array.flags.writeable = not read_only
        return GuardedArray(
            array, lambda: np.ascontiguousarray(array), lambda: _only_view_changed(layout, base)
        )

    def _special(self, values: Any, layout: str) -> Any:
        if layout == "fortran":
            return np.array(values, order="F")
        if layout == "unaligned":
            memory = bytearray(values.nbytes + 1)
            array: Any = np.ndarray(values.shape, values.dtype, memory, offset=1)
            array[...] = values
            return array
        return values.copy()

    def part(self, held: GuardedArray, start: int, stop: int) -> GuardedArray:
        """Rows of an array, as a view of the same memory."""
        array = held.array[start:stop]
        return GuardedArray(array, lambda: np.ascontiguousarray(array), lambda: True)


class TorchFamily:
    """Tensors of torch in CPU memory, or on a CUDA device."""

    layouts = ("contiguous", "step", "rows", "transposed")

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self.on_device = device != "cpu"
        self._device = device
        self._torch = torch

    def _tensor(self, values: Any) -> Any:
        """A contiguous tensor with the values of a NumPy array."""
        dtype = BY_NAME[values.dtype.name]
        bits = values if dtype.native else values.view(f"i{dtype.itemsize}")
        tensor = self._torch.from_numpy(np.array(bits, order="C")).to(self._device)
        return tensor if dtype.native else tensor.view(getattr(self._torch, dtype.name))

    def _numpy(self, tensor: Any) -> Any:
        name = str(tensor.dtype).partition(".")[2]
        flat = tensor.contiguous().cpu()
        if BY_NAME[name].native:
            return flat.numpy()
        bits = {1: self._torch.uint8, 2: self._torch.int16}[tensor.element_size()]
        return flat.view(bits).numpy().view(reference.numpy_dtype(name))

    def _guarded(self, shape: tuple[int, ...], dtype: Any) -> Any:
        tensor = self._tensor(np.zeros(shape, dtype))
        if tensor.numel():
            tensor.view(-1).view(self._torch.uint8).fill_(CANARY if dtype != np.bool_ else True)
        return tensor

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        if values.ndim == 0 or layout not in self.layouts:
            layout = "contiguous"
        shape = base_shape(layout, values.shape)
        base = self._guarded(shape, values.dtype)
        array = VIEWS[layout](base)
        array.copy_(self._tensor(values))

        def intact() -> bool:
            copy = base.clone()
            VIEWS[layout](copy).copy_(array.new_zeros(array.shape))
            reference_array = self._guarded(shape, values.dtype)
            VIEWS[layout](reference_array).copy_(array.new_zeros(array.shape))
            same: bool = self._numpy(copy).tobytes() == self._numpy(reference_array).tobytes()
            return same

        return GuardedArray(array, lambda: self._numpy(array), intact)

    def part(self, held: GuardedArray, start: int, stop: int) -> GuardedArray:
        """Rows of a tensor, as a view of the same memory."""
        array = held.array[start:stop]
        return GuardedArray(array, lambda: self._numpy(array), lambda: True)


class CupyFamily:
    """Arrays of CuPy, on the current device; no types that NumPy lacks.

    Args:
        module: CuPy, or a substitute in a test.
    """

    on_device = True
    layouts = ("contiguous", "step", "rows", "transposed", "fortran")

    def __init__(self, module: Any = None) -> None:
        self._cupy = importlib.import_module("cupy") if module is None else module

    def hold(self, values: Any, layout: str, read_only: bool = False) -> GuardedArray:
        if values.ndim == 0 or layout not in self.layouts:
            layout = "contiguous"
        if layout == "fortran":
            return self._held(self._cupy.asarray(np.asfortranarray(values), order="F"), lambda: True)
        base = self._cupy.asarray(_guard(layout, values))
        array = VIEWS[layout](base)
        array[...] = self._cupy.asarray(values)
        return self._held(array, lambda: _only_view_changed(layout, np.array(base.get())))

    def _held(self, array: Any, intact: Callable[[], bool]) -> GuardedArray:
        return GuardedArray(array, lambda: np.ascontiguousarray(array.get()), intact)

    def part(self, held: GuardedArray, start: int, stop: int) -> GuardedArray:
        """Rows of an array, as a view of the same memory."""
        return self._held(held.array[start:stop], lambda: True)


FAMILIES: dict[str, Callable[[], Any]] = {
    "numpy": NumpyFamily,
    "torch": TorchFamily,
    "cupy": CupyFamily,
    "torch_cuda": partial(TorchFamily, "cuda"),
}
"""Constructors of array families; the ranks of a backend's tests may add to it."""
_families: dict[str, Any] = {}


def layouts(name: str) -> tuple[str, ...]:
    """The layouts of a family; its library need not be installed."""
    if name.startswith("torch"):
        return TorchFamily.layouts
    return (
        CupyFamily.layouts if name == "cupy" else NumpyFamily.layouts
    )  # other families use contiguous arrays for layouts that they lack


def family(name: str) -> Any:
    """The family of that name."""
    if name not in _families:
        _families[name] = FAMILIES[name]()
    return _families[name]
