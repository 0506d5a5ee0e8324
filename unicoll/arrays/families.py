"""Array libraries beyond the buffer: one object per library, which makes arrays and knows their
parts.

:func:`family_of` gives the object of an array. :data:`FAMILIES` has NumPy, torch and CuPy, whose
arrays can be made here. An array of another library, with DLPack, the buffer protocol or
:func:`~unicoll.arrays.conversion.register_family`, is used as an array of NumPy over its memory
(:func:`of_known_library`).

A library is taken from ``sys.modules``; only :meth:`Family.empty` imports one.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.conversion import as_buffer, numpy_view
from unicoll.arrays.torch_tensors import as_integers
from unicoll.arrays.types import BY_NAME, QUANTIZED, DType
from unicoll.errors import DistArgumentError, DistTypeError

Bytes = npt.NDArray[np.uint8]


class Family(ABC):
    """The arrays of one library.

    Attributes:
        name: of the library.
        array_type: the name of its arrays' base class.
    """

    name: str
    array_type: str

    def __repr__(self) -> str:
        return self.name

    @property
    def library(self) -> Any:
        """The module; None if the program has not imported it."""
        return sys.modules.get(self.name)

    def has(self, array: Any) -> bool:
        """True if the array is of this library."""
        # The type is () if another thread is just importing the library.
        return isinstance(array, getattr(self.library, self.array_type, ()))

    @abstractmethod
    def device_of(self, array: Any) -> str:
        """``"cpu"`` or ``"cuda:0"``, for example."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: DType, device: str) -> Any:
        """A new uninitialised array on ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:0"``.

        Raises:
            DistTypeError: the library has no such type, or no arrays there.
            ImportError: it is not installed.
        """

    @abstractmethod
    def empty_like(self, array: Any, count: int) -> Any:
        """A new uninitialised array of ``count`` elements, of the type and on the device of
        ``array``."""

    @abstractmethod
    def of_bytes(self, data: Bytes, dtype: Any) -> Any:
        """A 1-D array of a type of this library over memory of NumPy, in host memory."""

    @abstractmethod
    def on_host(self, array: Any) -> Any:
        """The array, or a copy in host memory if it is on a device."""

    @abstractmethod
    def bytes_on_device_of(self, like: Any, data: Bytes) -> Any:
        """Bytes of NumPy as an array of this library, on the device of ``like``."""

    @abstractmethod
    def copy(self, array: Any) -> Any:
        """A contiguous copy, of the base class of the library's arrays."""

    def copyable(self, array: Any, dtype: DType) -> Any:
        """A view of which the library can copy the elements."""
        return array

    def without_history(self, array: Any) -> Any:
        """An array over the same memory without autograd history."""
        return array

    def is_contiguous(self, array: Any) -> bool:
        """True if the elements are in C order without gaps."""
        return bool(array.flags.c_contiguous)

    def is_read_only(self, array: Any) -> bool:
        """True if results cannot be written to it."""
        return False

    def nonfinite(self, array: Any) -> tuple[int, int, int] | None:
        """Numbers of NaN, infinite and all elements; None for types that have neither."""
        if array.dtype.kind not in "fc":
            return None
        library = self.library
        return int(library.isnan(array).sum()), int(library.isinf(array).sum()), array.size


class _Numpy(Family):
    name, array_type = "numpy", "ndarray"

    def has(self, array: Any) -> bool:
        # NumPy's scalars count as arrays of shape ().
        return isinstance(array, np.ndarray | np.generic)

    def device_of(self, array: Any) -> str:
        return "cpu"

    def empty(self, shape: Sequence[int], dtype: DType, device: str) -> Any:
        if device != "cpu":
            raise DistTypeError("NumPy arrays are not on a device")
        return np.empty(shape, numpy_dtype(dtype))

    def empty_like(self, array: Any, count: int) -> Any:
        return np.empty(count, array.dtype)

    def of_bytes(self, data: Bytes, dtype: Any) -> Any:
        return data.view(dtype)

    def on_host(self, array: Any) -> Any:
        return np.asarray(array)

    def bytes_on_device_of(self, like: Any, data: Bytes) -> Any:
        return data

    def copy(self, array: Any) -> Any:
        return np.array(array, order="C")

    def is_read_only(self, array: Any) -> bool:
        return not array.flags.writeable

    def nonfinite(self, array: Any) -> tuple[int, int, int] | None:
        # The functions of NumPy do not know the types of ml_dtypes.
        dtype = BY_NAME.get(array.dtype.name)
        return super().nonfinite(array) if dtype is not None and dtype.native else None


class _Torch(Family):
    name, array_type = "torch", "Tensor"

    def device_of(self, array: Any) -> str:
        return str(array.device)

    def empty(self, shape: Sequence[int], dtype: DType, device: str) -> Any:
        torch = import_module("torch")
        kind = getattr(torch, dtype.name, None)
        if kind is None:
            raise DistTypeError(f"torch {torch.__version__} has no {dtype.name}")
        return torch.empty(tuple(shape), dtype=kind, device=device)

    def empty_like(self, array: Any, count: int) -> Any:
        return array.new_empty(count)

    def of_bytes(self, data: Bytes, dtype: Any) -> Any:
        return self.library.from_numpy(data).view(dtype)

    def on_host(self, array: Any) -> Any:
        return array.detach().cpu()

    def bytes_on_device_of(self, like: Any, data: Bytes) -> Any:
        return self.library.from_numpy(data).to(like.device)

    def copy(self, array: Any) -> Any:
        torch = self.library
        # The copy is not an operation of the program: autograd and overrides of subclasses do not
        # see it.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.clone(array).as_subclass(torch.Tensor)

    def copyable(self, array: Any, dtype: DType) -> Any:
        return as_integers(array, dtype)

    def without_history(self, array: Any) -> Any:
        return array.detach()

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def nonfinite(self, array: Any) -> tuple[int, int, int] | None:
        if not (array.is_floating_point() or array.is_complex()):
            return None
        torch, values = self.library, array.detach()
        # Torch has few functions for float8, so its elements are converted to float32.
        if values.element_size() == 1:
            values = values.float()
        return int(torch.isnan(values).sum()), int(torch.isinf(values).sum()), values.numel()


class _Cupy(Family):
    name, array_type = "cupy", "ndarray"

    def device_of(self, array: Any) -> str:
        return f"cuda:{array.device.id}"

    def empty(self, shape: Sequence[int], dtype: DType, device: str) -> Any:
        kind, _, index = device.partition(":")
        if not dtype.native:
            raise DistTypeError(f"CuPy has no {dtype.name}")
        if kind != "cuda":
            raise DistTypeError("CuPy arrays are on a CUDA device")
        cupy = import_module("cupy")
        with cupy.cuda.Device(int(index) if index else None):
            return cupy.empty(tuple(shape), dtype.storage)

    # CuPy allocates and copies on the current device, which may be another one than an array's.

    def empty_like(self, array: Any, count: int) -> Any:
        with array.device:
            return self.library.empty(count, array.dtype)

    def of_bytes(self, data: Bytes, dtype: Any) -> Any:
        return data.view(dtype)

    def on_host(self, array: Any) -> Any:
        return array.get()

    def bytes_on_device_of(self, like: Any, data: Bytes) -> Any:
        with like.device:
            return self.library.asarray(data)

    def copy(self, array: Any) -> Any:
        cupy = self.library
        with array.device:
            return cupy.ndarray.view(array, cupy.ndarray).copy()


FAMILIES: dict[str, Family] = {each.name: each for each in (_Numpy(), _Torch(), _Cupy())}
"""The libraries whose arrays can be made here, by name. Adding one is adding a row."""


class Kind(NamedTuple):
    """Properties that arrays in one flat array have in common.

    Attributes:
        family: the library.
        device: ``"cpu"`` or ``"cuda:0"``, for example.
        dtype: dtype object of the library.
    """

    family: Family
    device: str
    dtype: Any

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype_name(self) -> str:
        """``"float32"``, for example, in every library."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def element_type(self) -> DType:
        """The element type; DistTypeError if no collective supports it, or if its bytes are not its
        values."""
        found = BY_NAME.get(self.dtype_name)
        # Another rank's scale may differ.
        if found is None or found.name in QUANTIZED:
            reason = "" if found is None else ": their scale and zero point are not in their memory"
            raise DistTypeError(f"arrays of {self} cannot be communicated{reason}")
        return found

    def __str__(self) -> str:
        where = "" if self.on_host else f" on {self.device}"
        return f"{self.family} {self.dtype_name}{where}"


_BY_TYPE: dict[type, Family] = {}


def family_of(array: Any) -> Family | None:
    """The library that made an array; None: another one, or it is no array."""
    found = _BY_TYPE.get(type(array))
    if found is None:
        found = next((family for family in FAMILIES.values() if family.has(array)), None)
        # No entry for other types: the library that makes such an array may be imported later.
        if found is not None:
            _BY_TYPE[type(array)] = found
    return found


def kind_of(array: Any) -> Kind:
    """The kind of an array of :data:`FAMILIES`; DistTypeError for all others."""
    family = family_of(array)
    if family is None:
        raise DistTypeError(
            f"expected an array of NumPy, CuPy or torch, got {type(array).__name__}"
        )
    return Kind(family, family.device_of(array), array.dtype)


def of_known_library(array: Any) -> Any:
    """The array itself if it is of :data:`FAMILIES`; else an array of NumPy over its memory, which
    is in host memory.

    Raises:
        DistTypeError: it is no array, or is on a device, or of a type for which ml_dtypes would
            have to be installed.
        DistArgumentError: its memory is not contiguous, and the family that is registered for it
            gives no view.
    """
    if family_of(array) is not None:
        return array
    buffer = as_buffer(array)
    if buffer.flat is None:
        raise DistTypeError(
            "expected an array of NumPy, CuPy or torch, or in host memory, got"
            f" {type(array).__name__} on {buffer.device}"
        )
    view = numpy_view(array, buffer).view(numpy_dtype(buffer.dtype))
    view.flags.writeable = view.flags.writeable and buffer.writable
    return view


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy dtype of an element type.

    Raises:
        DistTypeError: NumPy does not have it, nor ml_dtypes, which may not be installed.
    """
    if dtype.native:
        return dtype.storage
    try:
        found: np.dtype[Any] = np.dtype(getattr(import_module("ml_dtypes"), dtype.name))
        return found
    except (ImportError, AttributeError):
        raise DistTypeError(f"NumPy has no {dtype.name}: install ml_dtypes") from None


def host_bytes(array: Any) -> Bytes:
    """The elements' bytes in C order, in host memory; shares memory with a contiguous array on the
    CPU."""
    flat = as_buffer(kind_of(array).family.on_host(array)).flat
    # The array is on the CPU by now.
    assert flat is not None
    return flat.view(np.uint8)


def nonfinite(array: Any) -> tuple[int, int, int] | None:
    """Numbers of NaN, infinite and all elements; None for types that have neither, or that cannot
    be counted."""
    family = family_of(array)
    if family is not None:
        return family.nonfinite(array)
    buffer = as_buffer(array)
    # An array of a type that NumPy lacks has only its bits in flat, and one on a device has no
    # flat.
    native = buffer.flat is not None and buffer.dtype.native
    return FAMILIES["numpy"].nonfinite(buffer.flat) if native else None


def copy_of(buffer: Buffer, op: str) -> Buffer:
    """A buffer with a copy of the memory of a contiguous array, made in the order of its library's
    current stream.

    Args:
        op: name of the operation, for errors.

    Raises:
        DistArgumentError: the array is on a device, and its library has no function for it.
    """
    if buffer.flat is not None:
        flat = buffer.flat.copy()
        return Buffer(flat, buffer.dtype, buffer.shape, flat)
    owner = buffer.owner
    family = family_of(owner)
    if family is not None:
        return as_buffer(family.copy(owner), op)
    namespace, copy = getattr(owner, "__array_namespace__", None), getattr(owner, "copy", None)
    if namespace is not None:
        return as_buffer(namespace().asarray(owner, copy=True), op)
    if copy is None:
        raise DistArgumentError(
            f"{op}: the input {buffer} overlaps an output, and {type(owner).__name__} has no"
            " copy(): copy it first",
            op=op,
        )
    return as_buffer(copy(), op)
