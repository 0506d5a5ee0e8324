"""The types and reductions of NCCL's API for unicoll's.

Element types that it lacks are moved as bytes. Reductions that it lacks are expressed by ones that
it has if the result is the same (bool as the maximum or minimum of bytes, complex sums as sums of
twice as many floats). The rest are refused, among them the average of integers: the library divides
a sum that it has computed in the element type, where it may not fit.
"""

from __future__ import annotations

import struct

import numpy as np

from unicoll.arrays.types import DType, Reduction
from unicoll.device_collectives import interface

BYTES = interface.DATA_TYPES["int8"]
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


def native_reduction(dtype: DType, reduction: Reduction) -> interface.NativeReduction | None:
    """A reduction as NCCL's API expresses it, or None if it cannot."""
    name = dtype.name
    if dtype.kind == "b":
        op = _BOOL.get(reduction.name)
        return (
            None if op is None else interface.NativeReduction(interface.DATA_TYPES["uint8"], op, 1)
        )
    if dtype.kind == "c":
        op = _COMPLEX.get(reduction.name)
        # A complex factor mixes both parts, which the library multiplies one by one.
        if op is None or isinstance(reduction.factor, complex):
            return None
        return interface.NativeReduction(interface.DATA_TYPES[_PARTS[name]], op, 2)
    op, code = _PLAIN.get(reduction.name), interface.DATA_TYPES.get(name)
    if op is None or code is None:
        return None
    if op == interface.AVG and dtype.kind in "ui":
        return None
    if name.startswith("float8") and op == _PREMUL:
        return None
    return interface.NativeReduction(code, op, 1)


def factor_bytes(dtype: DType, factor: float) -> bytes:
    """A factor as one element of the type in which the library computes."""
    if dtype.name == "bfloat16":
        return _round_to_bfloat16(float(factor))
    name = _PARTS.get(dtype.name, dtype.name)
    number = int(factor) if dtype.kind in "ui" else float(factor)
    return np.array(number).astype(name).tobytes()


def _round_to_bfloat16(factor: float) -> bytes:
    bits = int(np.float32(factor).view(np.uint32))
    # The factor is rounded to the nearest number, and to the even one of two that are equally near.
    # A NaN is not rounded: the addition could change it to an infinity or a zero.
    if factor == factor:
        bits += 0x7FFF + (bits >> 16 & 1)
    return struct.pack("<H", bits >> 16 & 0xFFFF)
