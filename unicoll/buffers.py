"""Arrays as the backends see them: ``as_buffer(array) -> Buffer``, one adapter per array family.

A family is recognised by the array's type: NumPy, torch, CuPy, then anything with ``__dlpack__``,
``__cuda_array_interface__`` or the buffer protocol. Adapters for torch and CuPy use the module that the array came
from, so nothing is imported that the user has not imported already.

Backends always get contiguous memory. An array that is not contiguous is packed into a copy, and a result is
copied back with :meth:`Buffer.write_back`; the array's own strides are kept.

An array of a subclass is viewed as a plain array first, by the methods of its family's own class, so nothing that the
subclass overrides is called. A subclass whose memory is not its data is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from . import dlpack, streams
from .errors import DistArgumentError, DistTypeError
from .types import BY_NAME, CPU, DTYPES, Device, DType

__all__ = ["Buffer", "as_buffer", "register_family"]

FlatArray = npt.NDArray[Any]


class Buffer:
    """One array of an operation.

    Attributes:
        owner: the array as the user gave it (kept alive by this reference).
        dtype: element type.
        count: number of elements.
        shape: the array's shape.
        device: where it lives.
        flat: for CPU memory a contiguous 1-D NumPy view (or packed copy) in ``dtype.storage``; None on CUDA.
        ptr: for CUDA memory the device address; 0 on the CPU.
        stream: for CUDA memory the handle of the stream that the array is ordered by: its library's current one.
        here: for CUDA memory what tells the library's current stream, at any later time.
        writable: whether results may be written to it; not where memory is read-only, nor where autograd would go back
            through the values.
        unpack: copies ``flat`` back into ``owner``; None where ``flat`` shares the owner's memory.
    """

    __slots__ = (
        "count", "device", "dtype", "flat", "here", "owner", "ptr", "shape", "stream", "unpack", "writable",
    )  # fmt: skip

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
        here: Callable[[], int] | None = None,
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
        self.here = here

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.count * self.dtype.itemsize

    def write_back(self) -> None:
        """Copy a packed result into the user's array; nothing to do where the memory is shared."""
        if self.unpack is not None:
            self.unpack()

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}" + (
            "" if self.device.type == "cpu" else f" on {self.device}"
        )


Adapter = Callable[[Any], Buffer]


# --- NumPy -----------------------------------------------------------------------------------------------------

_BY_NUMPY: dict[np.dtype[Any], DType] = {d.storage: d for d in DTYPES if d.native}


def _numpy_dtype(dtype: np.dtype[Any]) -> DType:
    found = _BY_NUMPY.get(dtype)
    if found is None:
        found = BY_NAME.get(dtype.name)  # ml_dtypes' bfloat16 and float8 types
        if found is None or found.native:
            reason = (
                ""
                if dtype.isnative
                else " (byte order is not this machine's; use .astype(dtype.newbyteorder('=')))"
            )
            raise DistTypeError(f"arrays of dtype {dtype.str} ({dtype.name}) cannot be communicated{reason}")
        _BY_NUMPY[dtype] = found
    return found


def _from_numpy(array: FlatArray) -> Buffer:
    dtype = _BY_NUMPY.get(array.dtype) or _numpy_dtype(array.dtype)
    flags = array.flags
    if flags.c_contiguous:
        flat = array if array.ndim == 1 else array.reshape(-1)
        if not dtype.native:
            flat = flat.view(dtype.storage)
        return Buffer(array, dtype, array.shape, flat, flags.writeable)
    packed = np.ascontiguousarray(array)
    flat = packed.reshape(-1).view(dtype.storage)

    def unpack() -> None:
        array[...] = packed

    return Buffer(array, dtype, array.shape, flat, flags.writeable, unpack)


def _numpy_family(kind: type) -> Adapter | None:
    if np.ndarray not in kind.__mro__:
        return None
    if any(str(base.__module__).startswith("numpy.ma") for base in kind.__mro__):
        raise DistTypeError("masked arrays cannot be communicated: fill them, or send data and mask")
    return _from_numpy if kind is np.ndarray else _from_numpy_subclass


def _from_numpy_subclass(array: Any) -> Buffer:
    buffer = _from_numpy(np.ndarray.view(array, np.ndarray))
    buffer.owner = array
    return buffer


def _torch_family(kind: type) -> Adapter | None:
    from .torch_buffers import torch_family

    return torch_family(kind)


# --- CUDA arrays -----------------------------------------------------------------------------------------------


def _from_cuda_interface(array: Any) -> Buffer:
    """Anything with ``__cuda_array_interface__`` (v2 or v3; NUMBA's and CuPy's documentation define it)."""
    cai = array.__cuda_array_interface__
    dtype = _numpy_dtype(np.dtype(array.dtype if hasattr(array, "dtype") else cai["typestr"]))
    shape = tuple(int(n) for n in cai["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    strides = cai.get("strides")
    if strides is not None and count:
        expected = dtype.itemsize
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != expected:
                raise DistArgumentError(
                    "a CUDA array that is not contiguous cannot be communicated; copy it first"
                )
            expected *= size
    pointer, read_only = cai["data"]
    device = getattr(array, "device", None)
    index = getattr(device, "id", device if isinstance(device, int) else None)
    if index is None:
        index = max(0, streams.cuda().device_of(int(pointer))) if pointer else 0
    stream = cai.get("stream") or 0
    if stream == streams.LEGACY_STREAM:
        stream = 0
    return Buffer(
        array,
        dtype,
        shape,
        None,
        not read_only,
        None,
        Device("cuda", int(index)),
        int(pointer or 0),
        count,
        stream,
        lambda: stream,
    )


def _from_dlpack(array: Any) -> Buffer:
    """Anything with ``__dlpack__``, on the CPU or a CUDA device; read on the legacy default stream."""
    kind, index = dlpack.device_of(array)
    immutable = type(array).__module__.partition(".")[0] in _IMMUTABLE
    if kind == dlpack.CPU_DEVICE:
        buffer = _from_numpy(np.from_dlpack(array))
        buffer.owner = array
        buffer.writable = buffer.writable and not immutable
        return buffer
    if kind not in dlpack.CUDA_DEVICES:
        raise DistTypeError(f"arrays on a device of DLPack type {kind} cannot be communicated")
    lent = dlpack.lend(array, streams.LEGACY_STREAM)
    count = int(np.prod(lent.shape, dtype=np.int64))
    writable = not (lent.read_only or immutable)
    return Buffer(
        array, lent.dtype, lent.shape, None, writable, None, Device("cuda", index), lent.ptr, count, 0, lent.stream
    )


_IMMUTABLE = frozenset(("jax", "jaxlib", "tensorflow"))
"""Modules whose arrays never change, whatever they say: results go into arrays of others."""


def _cupy_family(kind: type) -> Adapter | None:
    cupy = sys.modules["cupy"]
    if cupy.ndarray not in kind.__mro__:
        return None
    adapt = _cupy_adapter(cupy)
    view, plain = cupy.ndarray.view, cupy.ndarray

    def adapt_subclass(array: Any) -> Buffer:
        buffer = adapt(view(array, plain))
        buffer.owner = array
        return buffer

    return adapt if kind is plain else adapt_subclass


@cache
def _cupy_adapter(cupy: Any) -> Adapter:
    """What makes buffers of plain arrays of CuPy."""
    current = cupy.cuda.get_current_stream
    places: dict[int, tuple[Device, Callable[[], int]]] = {}

    def place(index: int) -> tuple[Device, Callable[[], int]]:
        def here() -> int:
            return int(current(index).ptr)

        found = places[index] = (Device("cuda", index), here)
        register_current(index, here)
        return found

    def adapt(array: Any) -> Buffer:
        dtype = _BY_NUMPY.get(array.dtype) or _numpy_dtype(array.dtype)
        index = array.device.id
        where, here = places.get(index) or place(index)
        unpack, packed = None, array
        if not array.flags.c_contiguous:
            with cupy.cuda.Device(index):  # CuPy allocates and copies on the current one
                packed = cupy.ascontiguousarray(array)

            def unpack() -> None:
                with cupy.cuda.Device(index):
                    array[...] = packed

        return Buffer(
            array, dtype, array.shape, None, True, unpack, where, packed.data.ptr, packed.size, here(), here
        )

    return adapt


# --- anything else that lends its memory -------------------------------------------------------------------------


def _from_memory(array: Any) -> Buffer:
    view = memoryview(array)
    flat = np.asarray(view)
    buffer = _from_numpy(flat)
    buffer.owner = array
    buffer.writable = not view.readonly
    return buffer


# --- recognition -------------------------------------------------------------------------------------------------

_FAMILIES: dict[str, Callable[[type], Adapter | None]] = {
    "numpy": _numpy_family,
    "torch": _torch_family,
    "cupy": _cupy_family,
}
"""By the top-level module of a class: what gives the adapter of arrays of a type that is the class or derived from it;
None if they are no arrays of the family."""
_ADAPTERS: dict[type, Adapter] = {np.ndarray: _from_numpy}


def register_family(module: str, factory: Callable[[], Adapter]) -> None:
    """Teach unicoll an array family.

    Args:
        module: top-level module of the arrays' types, for example ``"jax"``.
        factory: called when the first array of a type is met; returns a function from array to :class:`Buffer`.
    """
    _FAMILIES[module] = lambda kind: factory()


_CURRENT: dict[int, list[Callable[[], int]]] = {}
"""By device: what tells the current stream of each array library that has had arrays there."""


def register_current(device: int, here: Callable[[], int]) -> None:
    """An array library has arrays on a device; ``here`` tells its current stream there."""
    _CURRENT.setdefault(device, []).append(here)


def current_streams(device: int) -> set[int]:
    """The calling thread's current streams on a device, of all array libraries whose arrays there have been seen."""
    return {here() for here in _CURRENT.get(device, ())}


def as_buffer(array: Any, what: str = "") -> Buffer:
    """Wrap an array of any known family; no copy where it is contiguous.

    Args:
        array: NumPy, CuPy or torch array, or anything that lends its memory.
        what: operation and argument, for errors: ``"broadcast: tensor"``.

    Raises:
        DistTypeError: the object is no array, or of a dtype or layout that cannot be communicated.
    """
    try:
        adapter = _ADAPTERS.get(type(array))
        if adapter is None:
            adapter = _find_adapter(type(array), array)
        return adapter(array)
    except DistArgumentError as e:
        if not what:
            raise
        raise type(e)(f"{what}: {e}", op=what.partition(":")[0]) from None


def _find_adapter(kind: type, array: Any) -> Adapter:
    if issubclass(kind, np.generic | list | tuple | int | float | complex | str | bytes) or array is None:
        raise DistTypeError(f"expected an array (NumPy, CuPy, torch), got {kind.__name__}")
    adapter: Adapter | None = None
    for base in kind.__mro__:
        family = _FAMILIES.get(str(base.__module__).partition(".")[0])
        if family is not None and (adapter := family(kind)) is not None:
            break
    if adapter is None and hasattr(array, "__dlpack_device__"):
        adapter = _from_dlpack
    if adapter is None and hasattr(array, "__cuda_array_interface__"):
        adapter = _from_cuda_interface
    if adapter is None:
        try:
            memoryview(array)
        except TypeError:
            raise DistTypeError(f"expected an array (NumPy, CuPy, torch), got {kind.__name__}") from None
        adapter = _from_memory
    _ADAPTERS[kind] = adapter
    return adapter
