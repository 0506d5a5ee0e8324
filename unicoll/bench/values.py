"""Source data of checked calls, and their expected results.

Source data depends on the rank, the element index and the iteration, so that a result of the previous iteration, a
duplicated contribution or misplaced elements are detected. The numbers are small integers (powers of two for products),
chosen so that the result is exact in the element type if the number of ranks allows it; then it is compared exactly.
Otherwise (averages, many ranks with a short type, compression) the tolerance is a few rounding errors.

Data repeats after :data:`PERIOD` elements, a prime, so that large arrays are generated and compared quickly, and
elements that are misplaced by any power of two are still detected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.arrays.types import DType
from unicoll.bench.operations import REDUCED, SourceRange

Flat = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]

PERIOD = 65521
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum")
"""nccl-tests' names, in its order."""
FACTOR = 2
"""The factor of every rank's contribution in ``mulsum``."""
_ROWS = 16
_ROUNDING = {"bfloat16": 1 / 256, "int8": 1 / 254}
"""Largest error of a value's compression, relative to the largest value."""
_BITS = {"bfloat16": (8, 7), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}
"""Widths of exponent and mantissa of the types that NumPy lacks."""
_PRODUCT_RANKS = 6
"""Number of ranks whose factors of a product differ from 1; it keeps the product in range."""


@lru_cache(maxsize=4)
def _codes(name: str) -> tuple[Numbers, Flat, Numbers]:
    """The value of every bit pattern of a type; the patterns of finite values sorted by value; those values."""
    exponent_bits, mantissa_bits = _BITS[name]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    magnitude = np.where(
        exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias)
    )
    values = np.where(codes >> (exponent_bits + mantissa_bits), -magnitude, magnitude)
    top = exponent == (1 << exponent_bits) - 1
    if name == "float8_e4m3fn":  # no infinity; one NaN of each sign
        values[top & (mantissa == (1 << mantissa_bits) - 1)] = np.nan
    else:
        values[top] = np.where(mantissa[top] > 0, np.nan, np.copysign(np.inf, values[top]))
    finite = np.flatnonzero(np.isfinite(values))
    order = finite[np.argsort(values[finite], kind="stable")]
    return values, order, values[order]


def encoded(numbers: Numbers, dtype: DType) -> Flat:
    """Numbers as elements (in ``dtype.storage``), rounded to the nearest."""
    if dtype.native:
        return numbers.astype(dtype.storage)
    _, order, finite = _codes(dtype.name)
    above = np.clip(np.searchsorted(finite, numbers), 1, finite.size - 1)
    nearer = np.where(numbers - finite[above - 1] < finite[above] - numbers, above - 1, above)
    elements: Flat = order[nearer].astype(dtype.storage)
    return elements


def decoded(elements: Flat, dtype: DType) -> Numbers:
    """Elements (in ``dtype.storage``) as numbers."""
    if dtype.native:
        return elements.astype(np.float64)
    return _codes(dtype.name)[0][elements]


def _mantissa(dtype: DType) -> int:
    """Bits of precision, including the implicit one."""
    if dtype.kind != "f":
        return dtype.itemsize * 8 - (dtype.kind == "i")
    if dtype.native:
        return int(np.finfo(dtype.storage).nmant) + 1
    return _BITS[dtype.name][1] + 1


def _random_numbers(rank: int, iteration: int) -> npt.NDArray[np.uint64]:
    """One period of pseudo-random numbers, independent between ranks and iterations (splitmix64)."""
    z: npt.NDArray[np.uint64] = np.arange(PERIOD, dtype=np.uint64)
    z += np.uint64((rank << 48) + (iteration << 32))
    z *= np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return numbers


class Values:
    """Source data and expected results of one element type and one of :data:`REDOPS`, None without reduction.

    ``compression`` is that of the contributions and of the result of a sum or average.
    """

    def __init__(self, dtype: DType, redop: str | None, ranks: int, compression: str = "") -> None:
        self.dtype = dtype
        self.redop = redop
        self.ranks = ranks
        sums = redop in ("sum", "avg", "mulsum")
        share = ranks * (FACTOR if redop == "mulsum" else 1) if sums else 1
        exact = (1 << min(_mantissa(dtype), 31)) - 1
        self._max_value = max(1, min(250, exact // share))
        self.tolerance = 0.0
        self.error = 0.0
        if compression:
            part = _ROUNDING[compression]
            total = self._max_value * (1 if redop == "avg" else ranks)
            self.error = total * (part + part * (1 + part)) * 1.001  # of the contributions, and of the result
        if dtype.kind == "f":
            rounding = 2.0 ** -_mantissa(dtype)  # of one operation, relative to its result
            if sums and share > exact:
                self.tolerance = 2 * ranks * rounding
            elif redop == "avg" and ranks & (ranks - 1):
                # NCCL multiplies every contribution by 1/n before it adds: one rounding each, one per addition.
                self.tolerance = ranks * rounding

    def numbers(self, rank: int, iteration: int) -> Numbers:
        """One period of a rank's source data."""
        random_numbers = _random_numbers(rank, iteration)
        if self.redop == "prod":
            if rank >= _PRODUCT_RANKS:
                return np.ones(PERIOD)
            lowest = -1 if self.dtype.kind == "f" else 0
            return np.asarray(2.0 ** ((random_numbers % np.uint64(2 - lowest)).astype(np.float64) + lowest))
        numbers: Numbers = (random_numbers % np.uint64(self._max_value + 1)).astype(np.float64)
        if self.redop in ("min", "max") and self.dtype.kind in "if":
            numbers -= self._max_value // 2
        return numbers

    def reduced(self, iteration: int, ranks: int | None = None) -> Numbers:
        """One period of the reduction of the source data of the first ``ranks`` ranks, or of all."""
        result = self.numbers(0, iteration)
        for rank in range(1, self.ranks if ranks is None else ranks):
            _FOLD[self.redop or "sum"](result, self.numbers(rank, iteration), out=result)
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
        """Initial contents of receive arrays, which differ from every result (except a few one-byte integers)."""
        if self.dtype.kind != "f":
            pattern = 0x5A5A5A5A5A5A5A5A & ((1 << (8 * self.dtype.itemsize - 1)) - 1)
            return np.full(count, pattern, self.dtype.storage)
        return np.full(count, encoded(np.array([-1.5]), self.dtype)[0])

    def idle(self, count: int) -> Flat:
        """Contents of arrays during timed calls: a repeated in-place reduction does not change them."""
        one = np.array([0.0 if self.redop in ("sum", "mulsum", None) else 1.0])
        return np.full(count, encoded(one, self.dtype)[0])

    def wrong(self, got: Flat, ranges: Sequence[SourceRange], iteration: int) -> int:
        """Number of elements of ``got`` that differ from the source ranges."""
        start = found = 0
        for source in ranges:
            part = got[start : start + source.length]
            found += source.length - part.size  # missing elements of a short array
            found += self._compare(part, self._period(source, iteration))
            start += source.length
        return found

    def _compare(self, got: Flat, period: Flat) -> int:
        found = 0
        expected = decoded(period, self.dtype) if self.dtype.kind == "f" else period
        for start in range(0, got.size, PERIOD * _ROWS):
            chunk = got[start : start + PERIOD * _ROWS]
            values: Flat = decoded(chunk, self.dtype) if self.dtype.kind == "f" else chunk
            full = chunk.size // PERIOD * PERIOD
            found += self._count(values[:full].reshape(-1, PERIOD), expected)
            found += self._count(values[full:], expected[: chunk.size - full])
        return found

    def _count(self, got: Flat, expected: Flat) -> int:
        if self.tolerance == self.error == 0.0:
            return int(np.count_nonzero(got != expected))
        limit = self.tolerance * np.abs(expected) + self.error
        return int(np.count_nonzero(~(np.abs(got - expected) <= limit)))


_FOLD: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "mulsum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
