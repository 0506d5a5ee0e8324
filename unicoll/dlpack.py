"""Arrays that lend their memory by DLPack alone (https://dmlc.github.io/dlpack): JAX's, for example.

CPU arrays become NumPy views. Of a CUDA array the capsule is read here, since NumPy cannot hold one. The producer is
told the stream on which we shall read, and lets that wait for whatever writes the array.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .errors import DistArgumentError, DistTypeError
from .types import BY_NAME, DType

__all__ = ["CPU_DEVICE", "CUDA_DEVICES", "Lent", "device_of", "lend"]

CPU_DEVICE = 1
CUDA_DEVICES = (2, 13)
"""kDLCUDA and kDLCUDAManaged."""
_READ_ONLY = 1

_KINDS = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64",
    (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32", (1, 64): "uint64",
    (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16",
    (5, 64): "complex64", (5, 128): "complex128", (6, 8): "bool",
    (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2",
}  # fmt: skip
"""DLDataTypeCode and bits of our element types."""


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


class Lent:
    """Memory that an array has lent, for as long as this object lives.

    Attributes:
        ptr: address of the first element.
        dtype, shape: of the array.
        read_only: whether the producer forbids writing.
    """

    __slots__ = ("_capsule", "dtype", "ptr", "read_only", "shape")

    def __init__(self, capsule: Any, ptr: int, dtype: DType, shape: tuple[int, ...], read_only: bool) -> None:
        self._capsule = capsule  # unconsumed: the producer takes its memory back when the capsule goes
        self.ptr = ptr
        self.dtype = dtype
        self.shape = shape
        self.read_only = read_only

    def stream(self) -> int:
        """The stream that the memory is ordered for: the legacy default one. The method holds the memory, too."""
        return 0


def device_of(array: Any) -> tuple[int, int]:
    """DLDeviceType and ordinal of an array."""
    kind, index = array.__dlpack_device__()
    return int(kind), int(index)


def lend(array: Any, stream: int) -> Lent:
    """The memory of an array on a CUDA device, ordered for ``stream`` (1 is the legacy default stream).

    Raises:
        DistTypeError: elements that cannot be communicated.
        DistArgumentError: the array is not contiguous.
    """
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before version 1
        capsule = array.__dlpack__(stream=stream)
    name = _get_name(capsule)
    address = _get_pointer(capsule, name)
    read_only = False
    if name == b"dltensor_versioned":
        managed = _Versioned.from_address(address)
        tensor, read_only = managed.tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor = _Tensor.from_address(address)
    found = _KINDS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if found is None:
        raise DistTypeError(
            f"DLPack arrays of type code {tensor.code} with {tensor.bits} bits and {tensor.lanes} lanes"
            " cannot be communicated"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides and not _contiguous(shape, [tensor.strides[i] for i in range(tensor.ndim)]):
        raise DistArgumentError("a DLPack array that is not contiguous cannot be communicated; copy it first")
    return Lent(capsule, int(tensor.data or 0) + tensor.byte_offset, BY_NAME[found], shape, read_only)


def _contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
