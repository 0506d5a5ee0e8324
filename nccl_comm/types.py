"""From our element types and reductions to NCCL's.

What NCCL has no type for is moved as bytes. Reductions that NCCL lacks are expressed by ones that it has where that
gives the same result (bool as the larger or smaller byte, complex sums as sums of twice as many floats); the rest are
refused.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unicoll.types import DType, Reduction

from . import api

__all__ = ["BYTES", "FP8_VERSION", "Way", "factor_bytes", "way"]

BYTES = api.DATA_TYPES["int8"]
FP8_VERSION = 22400
"""From here on NCCL has the 8-bit floating types (2.24)."""
_PREMUL = -1
"""Stands for an operation that is made for the call, with its factor."""

_PLAIN = {"SUM": api.SUM, "AVG": api.AVG, "PRODUCT": api.PROD, "MIN": api.MIN, "MAX": api.MAX, "PREMUL_SUM": _PREMUL}
_BOOL = {"SUM": api.MAX, "MAX": api.MAX, "BOR": api.MAX, "PRODUCT": api.MIN, "MIN": api.MIN, "BAND": api.MIN}
_COMPLEX = {"SUM": api.SUM, "AVG": api.AVG, "PREMUL_SUM": _PREMUL}
_PARTS = {"complex64": "float32", "complex128": "float64"}


class Way(NamedTuple):
    """How NCCL reduces one element type.

    Attributes:
        type: ncclDataType_t.
        op: ncclRedOp_t; negative where one has to be made with a factor.
        parts: elements of ``type`` to one of ours.
    """

    type: int
    op: int
    parts: int

    @property
    def made(self) -> bool:
        """Whether the operation has to be made, with a factor."""
        return self.op == _PREMUL


@lru_cache(maxsize=512)
def way(dtype: DType, reduction: Reduction, version: int) -> Way | None:
    """How NCCL of a version does a reduction, or None if it cannot."""
    name = dtype.name
    if dtype.kind == "b":
        op = _BOOL.get(reduction.name)
        return None if op is None else Way(api.DATA_TYPES["uint8"], op, 1)
    if dtype.kind == "c":
        op = _COMPLEX.get(reduction.name)
        if op is None or isinstance(reduction.factor, complex):
            return None
        return Way(api.DATA_TYPES[_PARTS[name]], op, 2)
    op, code = _PLAIN.get(reduction.name), api.DATA_TYPES.get(name)
    if op is None or code is None:
        return None
    if name.startswith("float8") and (version < FP8_VERSION or op == _PREMUL):
        return None
    return Way(code, op, 1)


def factor_bytes(dtype: DType, factor: float) -> bytes:
    """A factor as one element of the type that NCCL computes in."""
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
