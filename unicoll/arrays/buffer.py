"""The :class:`Buffer` of one array, and the current streams of the array libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unicoll.arrays.types import CPU, Device, DType

FlatArray = np.ndarray[Any, np.dtype[Any]]


class WriteBack:
    """Copies the packed copy of a strided array back into the array.

    Attributes:
        address: of the array's first element.
        strides: the array's, in bytes.
    """

    __slots__ = ("_copy", "address", "strides")

    def __init__(self, copy: Callable[[], None], address: int, strides: Sequence[int]) -> None:
        self._copy = copy
        self.address = address
        self.strides = tuple(strides)

    def __call__(self) -> None:
        self._copy()


class Buffer:
    """One array of an operation.

    Attributes:
        owner: the user's array; this reference keeps it alive.
        dtype: element type.
        count: number of elements.
        shape: the array's shape.
        device: the device of the array's memory.
        flat: for CPU memory a contiguous 1-D NumPy view (or packed copy) in ``dtype.storage``; None
            on a device.
        ptr: for device memory the device address; 0 on the CPU.
        stream: for device memory the handle of the stream that orders the array: its library's
            current stream when the buffer was made.
        current_stream: for device memory a function that returns the handle of the library's
            current stream on the device at the time of the call; None on the CPU.
        writable: True if results may be written to the array. False for read-only memory, for an
            array that was expanded, whose elements share memory, and for one whose values autograd
            needs for the backward pass.
        unpack: copies a packed copy back into ``owner``, a :class:`WriteBack` where the strides are
            known; None if ``flat`` or ``ptr`` is the owner's own memory.
    """

    __slots__ = (
        "count",
        "current_stream",
        "device",
        "dtype",
        "flat",
        "owner",
        "ptr",
        "shape",
        "stream",
        "unpack",
        "writable",
    )

    def __init__(
        self,
        owner: Any,
        dtype: DType,
        shape: tuple[int, ...],
        flat: FlatArray | None,
        writable: bool = True,
        unpack: Callable[[], None] | None = None,
        device: Device = CPU,
        ptr: int = 0,
        count: int = -1,
        stream: int = 0,
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self.owner = owner
        self.dtype = dtype
        self.shape = shape
        self.flat = flat
        self.count = flat.size if flat is not None else count
        self.writable = writable
        self.unpack = unpack
        self.device = device
        self.ptr = ptr
        self.stream = stream
        self.current_stream = current_stream

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.count * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Of the first byte, in host or device memory."""
        if self.flat is None:
            return self.ptr
        address: int = self.flat.__array_interface__["data"][0]
        return address

    def first(self, count: int) -> Buffer:
        """Its first elements, for a copy to them; :meth:`write_back` remains with this buffer."""
        flat = self.flat[:count] if self.flat is not None else None
        return Buffer(
            self.owner,
            self.dtype,
            (count,),
            flat,
            device=self.device,
            ptr=self.ptr,
            count=count,
            stream=self.stream,
            current_stream=self.current_stream,
        )

    def write_back(self) -> None:
        """Copy a packed result into the user's array; does nothing if the memory is shared."""
        if self.unpack is not None:
            self.unpack()

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}" + (
            "" if self.device.type == "cpu" else f" on {self.device}"
        )


def has_shared_elements(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """True if several elements of an array have the same memory, as after a broadcast; strides as
    ``itemsize``."""
    if 0 in shape:
        return False
    # No elements are shared if each dimension, in the order of the strides, steps over all memory
    # of those before it. Otherwise they may still be distinct, which only their addresses tell.
    steps = sorted((abs(step), size) for step, size in zip(strides, shape, strict=True) if size > 1)
    extent = itemsize
    for step, size in steps:
        if step < extent:
            break
        extent += step * (size - 1)
    else:
        return False
    # An expanded array, the usual case, has a stride of 0 and needs no list of addresses.
    if steps[0][0] == 0:
        return True
    offsets = np.zeros(1, np.int64)
    for step, size in steps:
        offsets = np.add.outer(offsets, np.arange(size) * step).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < itemsize).any())


Adapter = Callable[[Any], Buffer]

_CURRENT_STREAMS: dict[Device, list[Callable[[], int]]] = {}
"""By device: per array library, a function that returns its current stream on the device."""


def register_current_stream(device: Device, current_stream: Callable[[], int]) -> None:
    """Register an array library on a device.

    Args:
        current_stream: returns the handle of the library's current stream there, for the calling
            thread.
    """
    _CURRENT_STREAMS.setdefault(device, []).append(current_stream)


def current_streams(device: Device) -> set[int]:
    """Handles of the calling thread's current streams on a device, one per registered array
    library."""
    return {current_stream() for current_stream in _CURRENT_STREAMS.get(device, ())}
