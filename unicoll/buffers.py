"""Arrays as the backends see them: ``as_buffer(array) -> Buffer``, one adapter per array family.

A family is recognised by the array's type: NumPy, torch, CuPy, then anything with ``__cuda_array_interface__``
or the buffer protocol. Adapters for torch and CuPy use the module that the array came from, so nothing is imported
that the user has not imported already.

Backends always get contiguous memory. An array that is not contiguous is packed into a copy, and a result is
copied back with :meth:`Buffer.write_back`; the array's own strides are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

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
        stream: for CUDA memory the handle of the stream that the producer asks to be waited for, or None.
        writable: whether results may be written to it.
        unpack: copies ``flat`` back into ``owner``; None where ``flat`` shares the owner's memory.
    """

    __slots__ = ("count", "device", "dtype", "flat", "owner", "ptr", "shape", "stream", "unpack", "writable")

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
        stream: int | None = None,
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


# --- torch -----------------------------------------------------------------------------------------------------


def _torch_family() -> Adapter:
    torch = sys.modules["torch"]
    by_torch = {getattr(torch, d.name): d for d in DTYPES if hasattr(torch, d.name)}
    bits = {1: torch.uint8, 2: torch.int16}

    def adapt(tensor: Any) -> Buffer:
        dtype = by_torch.get(tensor.dtype)
        if dtype is None:
            raise DistTypeError(f"tensors of dtype {tensor.dtype} cannot be communicated")
        if tensor.layout is not torch.strided:
            raise DistTypeError(
                f"tensors of layout {tensor.layout} cannot be communicated; make it dense first"
            )
        device = tensor.device
        if device.type not in ("cpu", "cuda"):
            raise DistTypeError(f"tensors on device {device} cannot be communicated")
        source = tensor.detach()
        lazy = source.is_conj() or source.is_neg()
        packed = (
            source.resolve_conj().resolve_neg().contiguous() if lazy or not source.is_contiguous() else source
        )
        unpack = None if packed is source else (lambda: source.copy_(packed))
        shape = tuple(tensor.shape)
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            place = Device("cuda", device.index)
            return Buffer(
                tensor, dtype, shape, None, True, unpack, place, packed.data_ptr(), packed.numel(), stream
            )
        raw = packed if dtype.native else packed.view(bits[dtype.itemsize])
        flat = raw.numpy().reshape(-1)
        if not dtype.native:
            flat = flat.view(dtype.storage)
        return Buffer(tensor, dtype, shape, flat, True, unpack)

    return adapt


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
    index = int(getattr(device, "id", device if isinstance(device, int) else 0) or 0)
    return Buffer(
        array,
        dtype,
        shape,
        None,
        not read_only,
        None,
        Device("cuda", index),
        int(pointer or 0),
        count,
        cai.get("stream"),
    )


def _cupy_family() -> Adapter:
    cupy = sys.modules["cupy"]

    def adapt(array: Any) -> Buffer:
        dtype = _BY_NUMPY.get(array.dtype) or _numpy_dtype(array.dtype)
        stream = cupy.cuda.get_current_stream().ptr
        place = Device("cuda", array.device.id)
        if array.flags.c_contiguous:
            return Buffer(
                array, dtype, array.shape, None, True, None, place, array.data.ptr, array.size, stream
            )
        packed = cupy.ascontiguousarray(array)

        def unpack() -> None:
            array[...] = packed

        return Buffer(
            array, dtype, array.shape, None, True, unpack, place, packed.data.ptr, packed.size, stream
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

_FAMILIES: dict[str, Callable[[], Adapter]] = {
    "numpy": lambda: _from_numpy,
    "torch": _torch_family,
    "cupy": _cupy_family,
}
_ADAPTERS: dict[type, Adapter] = {np.ndarray: _from_numpy}


def register_family(module: str, factory: Callable[[], Adapter]) -> None:
    """Teach unicoll an array family.

    Args:
        module: top-level module of the arrays' types, for example ``"jax"``.
        factory: called once, when the first such array is met; returns a function from array to :class:`Buffer`.
    """
    _FAMILIES[module] = factory


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
    if isinstance(array, np.generic | list | tuple | int | float | complex | str | bytes) or array is None:
        raise DistTypeError(f"expected an array (NumPy, CuPy, torch), got {kind.__name__}")
    if kind.__module__.startswith("numpy.ma"):
        raise DistTypeError("masked arrays cannot be communicated: fill them, or send data and mask")
    adapter: Adapter | None = None
    for base in kind.__mro__:
        factory = _FAMILIES.get(base.__module__.partition(".")[0])
        if factory is not None:
            adapter = factory()
            break
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
