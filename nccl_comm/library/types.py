"""NCCL's types and reductions for unicoll's.

Element types that NCCL lacks are moved as bytes. Reductions that NCCL lacks are expressed by ones that it has if the
result is the same (bool as the maximum or minimum of bytes, complex sums as sums of twice as many floats); the rest are
refused.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nccl_comm.library import interface
from unicoll.arrays.types import DType, Reduction

BYTES = interface.DATA_TYPES["int8"]
FP8_VERSION = 22400
"""The first version with the 8-bit floating types (2.24)."""
FP8_CAPABILITY = (9, 0)
"""The least compute capability of a group's devices with which NCCL reduces them."""
_PREMUL = -1
"""Placeholder of an operation that is created with the call's factor."""

_PLAIN = {
    "SUM": interface.SUM,
    "AVG": interface.AVG,
    "PRODUCT": interface.PROD,
    "MIN": interface.MIN,
    "MAX": interface.MAX,
    "PREMUL_SUM": _PREMUL,
}
_BOOL = {
    "SUM": interface.MAX,
    "MAX": interface.MAX,
    "BOR": interface.MAX,
    "PRODUCT": interface.MIN,
    "MIN": interface.MIN,
    "BAND": interface.MIN,
}
_COMPLEX = {"SUM": interface.SUM, "AVG": interface.AVG, "PREMUL_SUM": _PREMUL}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class NativeReduction(NamedTuple):
    """A reduction of one element type in NCCL.

    Attributes:
        type: ncclDataType_t.
        op: ncclRedOp_t; negative if one has to be created with a factor.
        parts: elements of ``type`` per element.
    """

    type: int
    op: int
    parts: int

    @property
    def has_factor(self) -> bool:
        """True if the operation has to be created with a factor."""
        return self.op == _PREMUL


@lru_cache(maxsize=512)
def native_reduction(
    dtype: DType, reduction: Reduction, version: int, capability: tuple[int, int] = FP8_CAPABILITY
) -> NativeReduction | None:
    """The reduction in NCCL of a version, on devices with this compute capability at least, or None."""
    name = dtype.name
    if dtype.kind == "b":
        op = _BOOL.get(reduction.name)
        return None if op is None else NativeReduction(interface.DATA_TYPES["uint8"], op, 1)
    if dtype.kind == "c":
        op = _COMPLEX.get(reduction.name)
        if op is None or isinstance(reduction.factor, complex):
            return None
        return NativeReduction(interface.DATA_TYPES[_PARTS[name]], op, 2)
    op, code = _PLAIN.get(reduction.name), interface.DATA_TYPES.get(name)
    if op is None or code is None:
        return None
    if name.startswith("float8") and (version < FP8_VERSION or capability < FP8_CAPABILITY or op == _PREMUL):
        return None
    return NativeReduction(code, op, 1)


def factor_bytes(dtype: DType, factor: float) -> bytes:
    """A factor as one element of the type in which NCCL computes."""
    if dtype.name == "bfloat16":
        return _round_to_bfloat16(float(factor))
    name = _PARTS.get(dtype.name, dtype.name)
    number = int(factor) if dtype.kind in "ui" else float(factor)
    return np.array(number).astype(name).tobytes()


def _round_to_bfloat16(factor: float) -> bytes:
    bits = int(np.float32(factor).view(np.uint32))
    if factor == factor:
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)
