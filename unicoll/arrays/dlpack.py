"""Arrays that are accessible by DLPack only (https://dmlc.github.io/dlpack), for example JAX
arrays.

CPU arrays become NumPy views. NumPy has no arrays on devices, so their capsules are read here: the
producer gets the stream on which the memory is read, and makes that stream wait for pending writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicoll.arrays.types import BY_NAME, DType
from unicoll.errors import DistTypeError

HOST_DEVICES = (1, 3, 11)
"""kDLCPU; kDLCUDAHost and kDLROCMHost: pinned host memory."""
CUDA_DEVICES = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""
ROCM_DEVICE = 10
"""kDLROCM: an AMD device, ``cuda`` here as in CuPy and torch."""
ONEAPI_DEVICE = 14
"""kDLOneAPI: a SYCL device."""
_READ_ONLY = 1
_VERSIONED = b"dltensor_versioned"

_KINDS: dict[tuple[int, ...], str] = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (5, 32): "complex32",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
    (17, 4, 2): "float4_e2m1fn_x2",
}
"""DLDataTypeCode and bits of unicoll's element types, and lanes where that is not 1."""


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype = ctypes.c_char_p
_get_name.argtypes = [ctypes.py_object]


@dataclass(slots=True, eq=False)
class DLPackMemory:
    """The memory of an array, valid while this object exists.

    Attributes:
        capsule: not consumed: deleting it releases the memory.
        ptr: address of the first element.
        dtype: element type of the array.
        shape: shape of the array.
        read_only: True if the producer marked the memory read-only.
        stream: handle of the stream that orders it.
        strides: in elements; None: contiguous in C order.
    """

    capsule: Any
    ptr: int
    dtype: DType
    shape: tuple[int, ...]
    read_only: bool
    stream: int
    strides: tuple[int, ...] | None

    def current_stream(self) -> int:
        """:attr:`stream`. The bound method keeps the memory."""
        return self.stream


def device_of(array: Any) -> tuple[int, int]:
    """DLDeviceType and ordinal of an array's device."""
    kind, index = array.__dlpack_device__()
    return int(kind), int(index)


class _HostMemory:
    """The array interface of memory in host memory, with the bits of types that NumPy lacks; keeps
    the memory."""

    def __init__(self, memory: DLPackMemory) -> None:
        self._memory = memory
        size = memory.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": memory.shape,
            "typestr": memory.dtype.storage.str,
            "data": (memory.ptr, memory.read_only),
            "strides": None if memory.strides is None else tuple(n * size for n in memory.strides),
        }


def import_host(array: Any) -> tuple[np.ndarray[Any, Any], DType]:
    """A NumPy array over the memory of an array in host memory, and its element type, which NumPy
    may lack.

    Capsules before DLPack 1.0 have no read-only flag: their memory is writable, as for other
    consumers.

    Raises:
        DistTypeError: the element type cannot be communicated.
    """
    memory = import_memory(array, None, 0)
    return np.asarray(_HostMemory(memory)), memory.dtype


def import_memory(array: Any, stream: Any, handle: int) -> DLPackMemory:
    """The memory of an array.

    Args:
        stream: for the producer, which orders the memory for it: on CUDA a stream (1 is the legacy
            default stream), on an AMD device 0 for the default stream, on a SYCL device a
            ``dpctl.SyclQueue``; None for host memory.
        handle: the stream's handle here.

    Raises:
        DistTypeError: the element type cannot be communicated.
    """
    try:
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:
            # A producer of a DLPack version before 1.0 does not know max_version.
            capsule = array.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        what = f"{type(array).__module__}.{type(array).__name__}"
        raise DistTypeError(
            f"{what} cannot be communicated: its __dlpack__ raises {type(e).__name__}: {e}"
        ) from e
    # The capsule is not renamed, as other consumers do: its own destructor releases the memory.
    name = _get_name(capsule)
    address = _get_pointer(capsule, name)
    read_only = False
    if name == _VERSIONED:
        managed = _Versioned.from_address(address)
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor = _Tensor.from_address(address)
    found = _KINDS.get((tensor.code, tensor.bits, tensor.lanes)[: 2 if tensor.lanes == 1 else 3])
    if found is None:
        raise DistTypeError(
            f"DLPack arrays of type code {tensor.code} with {tensor.bits} bits and {tensor.lanes}"
            " lanes cannot be communicated"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    # Without strides the elements are in C order without gaps.
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    if strides is not None and is_contiguous(shape, strides):
        strides = None
    address = int(tensor.data or 0) + tensor.byte_offset
    return DLPackMemory(capsule, address, BY_NAME[found], shape, read_only, handle, strides)


def is_contiguous(shape: Sequence[int], strides: Sequence[int], unit: int = 1) -> bool:
    """True if the strides are those of a contiguous array; ``unit`` is the stride between
    neighbouring elements."""
    expected = unit
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True
