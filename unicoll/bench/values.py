"""Source data of checked calls, and their expected results.

Source data depends on the rank, the element index and the iteration, so that a result of the
previous iteration, a duplicated contribution or misplaced elements are detected. The numbers are
small integers (powers of two for products), chosen so that the result is exact in the element type
if the number of ranks allows it; then it is compared exactly. Otherwise (averages, many ranks with
a short type, compression) the tolerance is a few rounding errors.

Data repeats after :data:`PERIOD` elements, a prime, so that large arrays are generated and compared
quickly, and elements that are misplaced by any power of two are still detected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.arrays.types import DType
from unicoll.bench.arrays import Unsupported
from unicoll.bench.operations import REDUCED, SourceRange
from unicoll.testing.reference import numpy_dtype

Flat = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]

PERIOD = 65521
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "exact")
"""nccl-tests' names, in its order, and the exact sum."""
FACTOR = 2
"""The factor of every rank's contribution in ``mulsum``."""
_ROWS = 16
_ROUNDING = {"bfloat16": 1 / 256, "int8": 1 / 254}
"""Largest error of a value's compression, relative to the largest value."""
_MANTISSA = {"bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
_PRODUCT_RANKS = 6
"""Number of ranks whose factors of a product differ from 1; it keeps the product in range."""


def _package(dtype: DType) -> tuple[Any, Any]:
    """torch and its type for one that NumPy lacks; None and that of ml_dtypes if torch is not
    imported.

    ml_dtypes is not imported into programs with torch, since unicoll converts with the packages
    that are imported.
    """
    if "torch" not in sys.modules and find_spec("ml_dtypes") is not None:
        return None, numpy_dtype(dtype.name)
    if find_spec("torch") is None:
        raise Unsupported(f"{dtype.name} needs ml_dtypes or torch")
    torch = import_module("torch")
    return torch, getattr(torch, dtype.name)


def encoded(numbers: Numbers, dtype: DType) -> Flat:
    """Numbers as elements (in ``dtype.storage``), rounded to the nearest; Unsupported if no package
    has the type."""
    if dtype.native:
        return numbers.astype(dtype.storage)
    torch, kind = _package(dtype)
    if torch is None:
        return numbers.astype(kind).view(dtype.storage)
    bits: Flat = (
        torch.from_numpy(numbers).to(kind).view(getattr(torch, f"int{8 * dtype.itemsize}")).numpy()
    )
    return bits.view(dtype.storage)


def decoded(elements: Flat, dtype: DType) -> Numbers:
    """Elements (in ``dtype.storage``) as numbers."""
    if dtype.native:
        return elements.astype(np.float64)
    torch, kind = _package(dtype)
    if torch is None:
        return np.asarray(elements.view(kind), np.float64)
    numbers: Numbers = (
        torch.from_numpy(elements.view(f"i{dtype.itemsize}")).view(kind).double().numpy()
    )
    return numbers


def _mantissa(dtype: DType) -> int:
    """Bits of precision, including the implicit one."""
    if dtype.kind != "f":
        return dtype.itemsize * 8 - (dtype.kind == "i")
    return int(np.finfo(dtype.storage).nmant) + 1 if dtype.native else _MANTISSA[dtype.name]


class Values:
    """Source data and expected results of one element type and one of :data:`REDOPS`, None without
    reduction.

    ``compression`` is that of the contributions and of the result of a sum or average.
    """

    def __init__(self, dtype: DType, redop: str | None, ranks: int, compression: str = "") -> None:
        self.dtype = dtype
        self.redop = redop
        self.ranks = ranks
        sums = redop in ("sum", "avg", "mulsum", "exact")
        share = ranks * (FACTOR if redop == "mulsum" else 1) if sums else 1
        exact = (1 << min(_mantissa(dtype), 31)) - 1
        self._max_value = max(1, min(250, exact // share))
        self.tolerance = 0.0
        self.error = 0.0
        if compression:
            part = _ROUNDING[compression]
            total = self._max_value * (1 if redop == "avg" else ranks)
            # These are the roundings of the contributions, and of the result.
            self.error = total * (part + part * (1 + part)) * 1.001
        if dtype.kind == "f":
            # This is the error of one operation, relative to its result.
            rounding = 2.0 ** -_mantissa(dtype)
            if sums and share > exact:
                self.tolerance = 2 * ranks * rounding
            elif redop == "avg" and ranks & (ranks - 1):
                # NCCL multiplies every contribution by 1/n before it adds: one rounding each, one
                # per addition.
                self.tolerance = ranks * rounding

    def numbers(self, rank: int, iteration: int) -> Numbers:
        """One period of a rank's source data."""
        # This gives the same numbers in all versions of NumPy.
        random = np.random.RandomState([rank, iteration])
        if self.redop == "prod":
            if rank >= _PRODUCT_RANKS:
                return np.ones(PERIOD)
            lowest = -1 if self.dtype.kind == "f" else 0
            return np.asarray(2.0 ** random.randint(lowest, 2, PERIOD))
        numbers: Numbers = random.randint(0, self._max_value + 1, PERIOD).astype(np.float64)
        if self.redop in ("min", "max") and self.dtype.kind in "if":
            numbers -= self._max_value // 2
        return numbers

    def reduced(self, iteration: int, ranks: int | None = None) -> Numbers:
        """One period of the reduction of the source data of the first ``ranks`` ranks, or of
        all."""
        fold = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(
            self.redop or "", np.add
        )
        result = self.numbers(0, iteration)
        for rank in range(1, self.ranks if ranks is None else ranks):
            fold(result, self.numbers(rank, iteration), out=result)
        if self.redop == "mulsum":
            result *= FACTOR
        if self.redop == "avg":
            result /= self.ranks
            if self.dtype.kind in "iu":
                result = np.trunc(result)
        return result

    def _period(self, source: SourceRange, iteration: int) -> Flat:
        if source.rank == REDUCED:
            number = self.reduced(iteration)
        elif source.rank < REDUCED:
            number = self.reduced(iteration, REDUCED - source.rank)
        else:
            number = self.numbers(source.rank, iteration)
        return np.roll(encoded(number, self.dtype), -(source.offset % PERIOD))

    def elements(self, ranges: Sequence[SourceRange], iteration: int) -> Flat:
        """The elements of source ranges, concatenated, in ``dtype.storage``."""
        parts = [np.resize(self._period(s, iteration), s.length) for s in ranges]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def poison(self, count: int) -> Flat:
        """Initial contents of receive arrays, which differ from every result (except a few one-byte
        integers)."""
        if self.dtype.kind != "f":
            pattern = 0x5A5A5A5A5A5A5A5A & ((1 << (8 * self.dtype.itemsize - 1)) - 1)
            return np.full(count, pattern, self.dtype.storage)
        return np.full(count, encoded(np.array([-1.5]), self.dtype)[0])

    def idle(self, count: int) -> Flat:
        """Contents of arrays during timed calls: a repeated in-place reduction does not change
        them."""
        one = np.array([0.0 if self.redop in ("sum", "mulsum", "exact", None) else 1.0])
        return np.full(count, encoded(one, self.dtype)[0])

    def wrong(self, got: Flat, ranges: Sequence[SourceRange], iteration: int) -> int:
        """Number of elements of ``got`` that differ from the source ranges."""
        start = found = 0
        for source in ranges:
            part = got[start : start + source.length]
            # A short array differs in its missing elements.
            found += source.length - part.size
            found += self._compare(part, self._period(source, iteration))
            start += source.length
        return found

    def _compare(self, got: Flat, period: Flat) -> int:
        is_float = self.dtype.kind == "f"
        expected = np.tile(
            decoded(period, self.dtype) if is_float else period, min(_ROWS, -(-got.size // PERIOD))
        )
        found = 0
        for start in range(0, got.size, PERIOD * _ROWS):
            chunk = got[start : start + PERIOD * _ROWS]
            found += self._count(
                decoded(chunk, self.dtype) if is_float else chunk, expected[: chunk.size]
            )
        return found

    def _count(self, got: Flat, expected: Flat) -> int:
        if self.tolerance == self.error == 0.0:
            return int(np.count_nonzero(got != expected))
        limit = self.tolerance * np.abs(expected) + self.error
        return int(np.count_nonzero(~(np.abs(got - expected) <= limit)))
