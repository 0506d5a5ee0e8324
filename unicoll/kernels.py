"""Reductions in NumPy, for every element type and operation of the table.

A kernel folds contributions in an *accumulator* type: the element type itself, or float32 for the half types, whose
own sums would lose the small terms. bfloat16 is computed through float32 by shifting bits, so that no extra package
is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.types import BY_NAME, DType, Reduction

__all__ = ["Kernel", "kernel_for"]

Flat = npt.NDArray[Any]

_BLOCK = 1 << 15
"""Elements that are widened at a time: small enough to stay in the cache."""

_UFUNCS: dict[str, Any] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def _bfloat16_to_float32(bits: Flat) -> Flat:
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _float32_to_bfloat16(values: Flat, out: Flat) -> None:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits >> 16) & 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16) | 0x40
    out[...] = rounded  # the upper half is zero by now


def _float16_to_float32(values: Flat) -> Flat:
    return values.astype(np.float32)


def _float32_to_float16(values: Flat, out: Flat) -> None:
    with np.errstate(over="ignore"):
        out[...] = values


_WIDEN: dict[str, tuple[Callable[[Flat], Flat], Callable[[Flat, Flat], None]]] = {
    "bfloat16": (_bfloat16_to_float32, _float32_to_bfloat16),
    "float16": (_float16_to_float32, _float32_to_float16),
}


class Kernel:
    """One reduction of one element type.

    Attributes:
        ufunc: folds two accumulator arrays.
        plain: contributions are folded as they are: no widening, factor or division.
        acc: NumPy dtype of the accumulator.
    """

    __slots__ = ("_factor", "_narrow", "_widen", "acc", "average", "dtype", "plain", "storage", "ufunc")

    def __init__(self, dtype: DType, op: Reduction) -> None:
        self.dtype = dtype
        self.storage = dtype.storage
        self.ufunc = _UFUNCS[op.name]
        self.average = op.name == "AVG"
        pair = _WIDEN.get(dtype.name)
        self._widen = pair[0] if pair else None
        self._narrow = pair[1] if pair else None
        self.acc = np.dtype(np.float32) if pair else dtype.storage
        self._factor = None if op.factor is None else np.asarray(op.factor).astype(self.acc)
        self.plain = pair is None and not self.average and self._factor is None

    def widen(self, values: Flat) -> Flat:
        """A contribution as an accumulator; a new array unless the kernel is plain or averages."""
        if self._widen is not None:
            values = self._widen(values)
            if self._factor is not None:
                values *= self._factor
            return values
        if self._factor is not None:
            scaled: Flat = np.multiply(values, self._factor, dtype=self.acc)
            return scaled
        return values

    def fold(self, acc: Flat, values: Flat) -> None:
        """``acc`` becomes ``acc`` op ``values``, where ``values`` is an unwidened contribution."""
        if self._widen is None and self._factor is None:
            self.ufunc(acc, values, out=acc)
            return
        for start in range(0, acc.size, _BLOCK):
            piece = acc[start : start + _BLOCK]
            self.ufunc(piece, self.widen(values[start : start + _BLOCK]), out=piece)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        """Write an accumulator to ``out`` (which may be ``acc`` itself) in the element type."""
        if self.average:
            acc = self._divide(acc, ranks)
        if self._narrow is not None:
            for start in range(0, acc.size, _BLOCK):
                self._narrow(acc[start : start + _BLOCK], out[start : start + _BLOCK])
        elif out is not acc:
            out[...] = acc

    def _divide(self, acc: Flat, ranks: int) -> Flat:
        kind = self.acc.kind
        if kind in "fc":
            average: Flat = np.divide(acc, acc.dtype.type(ranks))
            return average
        quotient: Flat = acc // acc.dtype.type(ranks)
        if kind == "i":  # floor division, but towards zero
            quotient += (acc < 0) & (quotient * acc.dtype.type(ranks) != acc)
        return quotient

    def combine(self, pieces: Sequence[Flat], out: Flat, apart: bool = False) -> None:
        """Fold all ranks' contributions in rank order into ``out``.

        ``out`` may be one of them, unless ``apart`` says that it is not: then no copy is needed.
        """
        ranks = len(pieces)
        if self.plain:
            if ranks == 1:
                out[...] = pieces[0]
                return
            if ranks == 2:
                self.ufunc(pieces[0], pieces[1], out=out)
                return
            acc = self.ufunc(pieces[0], pieces[1], out=out if apart else None)
            for piece in pieces[2:]:
                self.ufunc(acc, piece, out=acc)
            if not apart:
                out[...] = acc
            return
        for start in range(0, out.size, _BLOCK):
            stop = start + _BLOCK
            acc = self.widen(pieces[0][start:stop])
            if acc.base is not None or acc is pieces[0]:
                acc = acc.copy()
            for piece in pieces[1:]:
                self.ufunc(acc, self.widen(piece[start:stop]), out=acc)
            self.finish(acc, out[start:stop], ranks)


@lru_cache(maxsize=512)
def _kernel(dtype: str, op: Reduction) -> Kernel:
    return Kernel(BY_NAME[dtype], op)


_plain: dict[int, Kernel] = {}


def kernel_for(dtype: DType, op: Reduction) -> Kernel:
    """The kernel of an element type and operation."""
    if op.factor is not None:
        return _kernel(dtype.name, op)
    key = (dtype.code << 8) | op.code
    found = _plain.get(key)
    if found is None:
        found = _plain[key] = Kernel(dtype, op)
    return found
