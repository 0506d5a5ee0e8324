"""Sums of exact arithmetic, rounded once: they do not depend on the order of the addends.

An element of the result is the sum of the ranks' elements as real numbers, rounded to the element
type (to nearest, ties to even). So it has the same bits for every order and grouping of the ranks,
and the least possible error: half a unit in the last place. So is an average, of which the quotient
is rounded, not the sum: it cannot overflow.

For a block of elements the first of these that is exact is used:

1. All addends are added in float64. This is exact for float32 while the addends of an element
   differ by less than about ``2**29 / n``, and for float16 always, up to ``2**12`` ranks.
2. The rounding errors of these additions are computed (TwoSum, Knuth, The Art of Computer
   Programming 2, 4.2.2) and added, too. This is exact for float64 while the addends differ by less
   than about ``2**50``.
3. The elements for which that is not exact are added one by one by :func:`math.fsum` (Shewchuk,
   Adaptive Precision Floating-Point Arithmetic, 1997). This takes about 1 us for each of them.

An average is the rounded quotient of a float64 and the remainder of the division, which is computed
without a rounding (Dekker, A floating-point technique for extending the available precision, 1971).
Where that does not suffice to round correctly, which is rare, it is divided as a rational number.

The processor tells whether an addition has been rounded: it sets a flag (IEEE 754, "inexact").
Where the flag cannot be used, more blocks take a later step, with the same result. The sum of two
ranks is one addition, which is rounded correctly in the element type already; float16 and bfloat16
are added in float32, whose precision suffices for two (Figueroa, When is double rounding
innocuous?, 1995).

Infinities give infinity, of both signs NaN; NaN gives NaN; every NaN is the positive quiet NaN
without payload. A sum beyond the largest number becomes infinite, not one of which only a partial
sum is. The sum of zeros is -0.0 if all are, else 0.0, and so are exact sums of zero. Subnormal
numbers are numbers like any other. The number of addends is not limited, for an average to less
than ``2**26``.
"""

from __future__ import annotations

import ctypes
import math
import platform
import struct
import threading
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from unicoll.arrays.half_precision import Flat, HalfConversion

_STEP = 4096
"""Elements added at once: five float64 arrays of them fit into the L2 cache."""
_FLAGS = {"x86_64": 0x20, "AMD64": 0x20, "aarch64": 0x10, "arm64": 0x10}
"""``FE_INEXACT`` of <fenv.h>, by machine."""
_BELOW_FLOAT32 = (1 << 29) - 1
"""The bits of a float64 that a float32 does not have."""
_SPLIT = float((1 << 27) + 1)
"""Multiplied by it, a float64 can be divided into two halves (Dekker)."""
_SMALLEST_SPLIT, _LARGEST_SPLIT = 2.0**-800, 2.0**990
"""Bounds between which the operations of a division have no underflow and no overflow."""
_BELOW_TIE = _BELOW_FLOAT32 >> 1
"""They are 0 in a float64 that is a float32, or the middle between two."""


class _Scratch(threading.local):
    """Per-thread memory for intermediate results."""

    def __init__(self) -> None:
        self.arrays = [np.empty(_STEP) for _ in range(5)]
        self.single = np.empty(_STEP, np.float32)


_scratch = _Scratch()


# --- the inexact flag -----------------------------------------------------------------------------


class InexactFlag:
    """The calling thread's floating-point flag that says whether a result was rounded since the
    last :meth:`clear`."""

    def __init__(self) -> None:
        self._mask = _FLAGS[platform.machine()]
        library = ctypes.PyDLL(None)
        self._clear, self._test = library.feclearexcept, library.fetestexcept

    def clear(self) -> None:
        """Set the flag to False."""
        self._clear(self._mask)

    def is_set(self) -> bool:
        """True if a result may have been rounded."""
        return bool(self._test(self._mask))


class _NoFlag(InexactFlag):
    """Where the flag cannot be used."""

    def __init__(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def is_set(self) -> bool:
        return True


@cache
def inexact_flag() -> InexactFlag:
    """The flag, if NumPy's additions set it and keep it."""
    try:
        flag = InexactFlag()
        return flag if _is_reliable(flag) else _NoFlag()
    except (KeyError, OSError, AttributeError):
        return _NoFlag()


def _is_reliable(flag: InexactFlag) -> bool:
    # NumPy adds whole vectors, and the elements that are left one by one. These lengths and places
    # reach both, and each of them must set the flag.
    for count in (1, 7, _STEP):
        large, small = np.ones(count), np.zeros(count)
        for place in {0, count // 2, count - 1}:
            flag.clear()
            np.add(large, small, out=large)
            if flag.is_set():
                return False
            small[place] = 2.0**-60
            np.add(large, small, out=large)
            # An exact addition must keep the flag: callers read it once behind several additions.
            small[place] = 0
            np.add(large, small, out=large)
            if not flag.is_set():
                return False
    return True


# --- sums -----------------------------------------------------------------------------------------


class Summation:
    """The sum, or with ``average`` the average, of arrays of one floating-point type.

    Args:
        half: the conversions of float16 or bfloat16; None for float32 and float64.
        from_float64: True if the addends are float64, and only the result has the type.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        half: HalfConversion | None,
        average: bool = False,
        from_float64: bool = False,
    ) -> None:
        self._half = half
        self._loads = None if from_float64 else half
        self._average = average
        self._wide = half is None and dtype.itemsize == 8
        self._flag = inexact_flag()

    def combine(self, parts: Sequence[Flat], out: Flat) -> None:
        """Write the sums of equally long arrays; ``out`` may be one of them."""
        add = self._add_wide if self._wide else self._add
        if 0 < out.size <= _STEP:
            add(parts, out)
            return
        for start in range(0, out.size, _STEP):
            add([values[start : start + _STEP] for values in parts], out[start : start + _STEP])

    def _add(self, parts: Sequence[Flat], out: Flat) -> None:
        """Write the sums of up to :data:`_STEP` elements, of less than float64."""
        total, loaded = _scratch.arrays[0][: out.size], _scratch.arrays[1][: out.size]
        self._flag.clear()
        # Widening is exact, so it does not set the flag.
        self._widen(parts[0], total)
        for values in parts[1:]:
            self._widen(values, loaded)
            np.add(total, loaded, out=total)
        if self._flag.is_set():
            total = self._sum_with_errors(parts)
        else:
            unify_nans(total)
            if self._divides(parts):
                total = self._divide(parts, total, np.full(total.size, -0.0), np.False_)
        if self._average and not self._divides(parts):
            # The number of ranks is a power of two, so this is exact.
            np.divide(total, len(parts), out=total)
        self._narrow(total, out)

    def _add_wide(self, parts: Sequence[Flat], out: Flat) -> None:
        """:meth:`_add` of float64."""
        total = self._sum_with_errors(parts)
        if self._average and not self._divides(parts):
            total = total / len(parts)
            # Division by a power of two rounds only where the quotient is subnormal. Where the sum
            # is too large, the average need not be. Such elements are computed once more.
            magnitude = np.abs(total)
            rounded = ~((magnitude > _SMALLEST_SPLIT) & (magnitude < _LARGEST_SPLIT)) & (total != 0)
            self._finish_averages(parts, total, rounded)
        out[...] = total

    def _divides(self, parts: Sequence[Flat]) -> bool:
        """True for an average over a number of ranks by which the sum cannot be divided exactly."""
        return self._average and len(parts) & (len(parts) - 1) != 0

    def _widen(self, values: Flat, out: Flat) -> None:
        """Elements as float64."""
        if self._loads is not None:
            single = _scratch.single[: values.size]
            self._loads.widen(values, single)
            values = single
        out[...] = values

    def _sum_with_errors(self, parts: Sequence[Flat]) -> Flat:
        """The sums or averages, rounded to nearest, but for a narrower result as by
        :func:`_move_off_ties`."""
        new, other, loaded, work, missing = [array[: parts[0].size] for array in _scratch.arrays]
        total, wide, flag, rounded = parts[0], self._wide, self._flag, False
        if not wide:
            self._widen(total, other)
            total = other
        missing.fill(0)
        # The caller's parts[0] is only read: the sums alternate between two scratch arrays.
        for values in parts[1:]:
            if not wide:
                self._widen(values, loaded)
                values = loaded
            _add(total, values, new, loaded, work)
            total, new, other = new, other, new
            # Only the addition of the errors counts: the sums are rounded as a rule, and `loaded`
            # has what is missing in them.
            flag.clear()
            # The errors are subtracted and not added: the sum of -0.0 and -0.0 is to be -0.0.
            np.subtract(missing, loaded, out=missing)
            rounded |= flag.is_set()
        if self._divides(parts):
            return self._divide(
                parts, total, -missing, self._is_rounded(parts) if rounded else np.False_
            )
        np.subtract(total, missing, out=new)
        if not wide:
            _move_off_ties(new, total, missing)
        # It is NaN if any sum has an infinity, or a partial sum is too large.
        largest = np.maximum.reduce(new)
        if rounded or largest != largest:
            self._finish(parts, new, rounded)
        return new

    def _finish(self, parts: Sequence[Flat], sums: Flat, rounded: bool) -> None:
        """Write the sums that are not exact yet."""
        unfinished = np.isnan(sums)
        infinite = self._add_infinities(parts, sums) if unfinished.any() else np.False_
        # The flag says only that some element was rounded; this finds which ones.
        if rounded:
            unfinished |= self._is_rounded(parts)
        places = np.flatnonzero(unfinished & ~infinite)
        sums[places] = [_exact(column, self._wide) for column in self._columns(parts, places)]

    def _columns(self, parts: Sequence[Flat], places: Flat) -> list[list[float]]:
        """The addends of some elements."""
        chosen = np.empty((len(parts), places.size))
        for row, values in zip(chosen, parts, strict=True):
            self._widen(values[places], row)
        columns: list[list[float]] = chosen.T.tolist()
        return columns

    def _divide(self, parts: Sequence[Flat], total: Flat, errors: Flat, unfinished: Any) -> Flat:
        """The averages, rounded as sums are; ``total + errors`` is the exact sum where it is not
        ``unfinished``."""
        ranks = len(parts)
        sums, work = np.empty((2, total.size))
        _add(total, errors, sums, errors, work)
        quotient = sums / ranks
        rest = _remainder(sums, quotient, ranks)
        more = (rest + errors) / ranks
        found = np.where(more == 0, quotient, quotient + more)
        magnitude = np.abs(quotient)
        # Quotients that are NaN are among these, because every comparison with NaN is False.
        unfinished = unfinished | ~(
            (magnitude > _SMALLEST_SPLIT) & (magnitude < _LARGEST_SPLIT)
        ) & (sums != 0)
        if not self._wide:
            # If the quotient is in the middle between two numbers of a narrower type, its rounding
            # needs the exact rest.
            unfinished |= ((found.view(np.int64) & _BELOW_TIE) == 0) & (more != 0)
        else:
            # The value of `more` is rounded itself. Where an error of that size could change the
            # result, the rest is computed exactly.
            margin = more * 2.0**-50
            places = np.flatnonzero((quotient + (more - margin)) != (quotient + (more + margin)))
            # A quotient is often in the middle between two numbers, and then `more` is exact.
            rest, more, errors = rest[places], more[places], errors[places]
            left = np.empty(places.size)
            _add(rest, errors, left, errors, np.empty(places.size))
            unfinished[places] |= (errors != 0) | (_remainder(left, more, ranks) != 0)
        self._finish_averages(parts, found, unfinished)
        return found

    def _finish_averages(self, parts: Sequence[Flat], found: Flat, unfinished: Flat) -> None:
        """Write the averages that are not exact yet."""
        if unfinished.any():
            infinite = (
                self._add_infinities(parts, found) if not np.isfinite(found).all() else np.False_
            )
            places = np.flatnonzero(unfinished & ~infinite)
            found[places] = [
                _exact_average(column, self._wide) for column in self._columns(parts, places)
            ]

    def _is_rounded(self, parts: Sequence[Flat]) -> Flat:
        """True for the elements for which the sum of the errors is rounded."""
        # These are new arrays: the scratch arrays still hold the caller's sums.
        total, new, loaded, work, missing = [*np.zeros((5, parts[0].size))]
        found = np.zeros(total.size, bool)
        self._widen(parts[0], total)
        for values in parts[1:]:
            self._widen(values, loaded)
            _add(total, loaded, new, loaded, work)
            total, new = new, total
            np.negative(loaded, out=loaded)
            _add(missing, loaded, new, loaded, work)
            missing, new = new, missing
            found |= loaded != 0
        return found

    def _add_infinities(self, parts: Sequence[Flat], sums: Flat) -> Flat:
        """Write the sums with an infinity or NaN; returns True for these elements."""
        found, loaded = np.zeros((2, sums.size))
        for values in parts:
            self._widen(values, loaded)
            # Finite numbers count as 0, so what is left is the infinity or NaN that the sum is.
            loaded[np.isfinite(loaded)] = 0
            found += loaded
        unify_nans(found)
        there: Flat = found != 0
        np.copyto(sums, found, where=there)
        return there

    def combine_with_rest(
        self, parts: Sequence[Flat], rest: Mapping[int, list[float]], out: Flat
    ) -> None:
        """:meth:`combine` of float64 addends, with more addends for the elements whose indices are
        in ``rest``."""
        self.combine(parts, out)
        for i, more in rest.items():
            addends = [*(float(part[i]) for part in parts), *more]
            # Else the result is an infinity or NaN already.
            if all(map(math.isfinite, addends)):
                self._narrow(np.array([_exact(addends, self._wide)]), out[i : i + 1])

    def _narrow(self, total: Flat, out: Flat) -> None:
        """Round float64 numbers to the element type; float16 and bfloat16 use the memory of
        ``total``."""
        if self._half is None:
            out[...] = total
            return
        # Round to float32 towards zero, but set the last bit of what is not exact: that keeps it
        # off the ties between two numbers of the element type (Boldo and Melquiond, Emulation of
        # FMA and correctly rounded sums, 2008).
        # The caller's sums may be in the first two scratch arrays, but not in this one.
        bits, rest = total.view(np.int64), _scratch.arrays[2][: total.size].view(np.int64)
        np.bitwise_and(bits, _BELOW_FLOAT32, out=rest)
        np.add(rest, _BELOW_FLOAT32, out=rest)
        np.bitwise_or(bits, rest, out=bits)
        np.bitwise_and(bits, ~_BELOW_FLOAT32, out=bits)
        single = _scratch.single[: total.size]
        single[...] = total
        self._half.narrow(single, out)


class Accumulator:
    """The exact sum of arrays of one floating-point type that are added one after another.

    It is ``total - missing``, both of float64, and for the elements whose indices are in ``rest``
    more addends.

    Args:
        count: number of elements.
        half: as of :class:`Summation`.

    Attributes:
        missing: None while it is 0.
    """

    def __init__(self, count: int, dtype: np.dtype[Any], half: HalfConversion | None) -> None:
        # Adding -0.0 changes no number, not even the sign of a zero.
        self.total = np.full(count, -0.0)
        self.missing: Flat | None = None
        self.rest: dict[int, list[float]] = {}
        self._addends = Summation(dtype, half)
        self._flag = inexact_flag()

    def clear(self) -> None:
        """Begin another sum."""
        self.total.fill(-0.0)
        self.missing = None
        self.rest = {}

    def add(self, values: Flat) -> None:
        """Add an array of ``count`` elements."""
        for start in range(0, values.size, _STEP):
            self._add(values[start : start + _STEP], start)

    def _add(self, values: Flat, start: int) -> None:
        total = self.total[start : start + values.size]
        new, loaded, work, error, _ = [array[: values.size] for array in _scratch.arrays]
        self._addends._widen(values, loaded)
        self._flag.clear()
        np.add(total, loaded, out=new)
        if not self._flag.is_set():
            total[...] = new
            return
        _add(total, loaded, new, error, work)
        largest = np.maximum.reduce(error)
        # It is NaN if there is an infinity or NaN, or if a sum is too large.
        if largest != largest:
            self._keep_finite(total, loaded, new, start)
            error[~np.isfinite(error)] = 0
        total[...] = new
        if not error.any():
            return
        if self.missing is None:
            self.missing = np.zeros(self.total.size)
        missing = self.missing[start : start + values.size]
        self._flag.clear()
        np.subtract(missing, error, out=new)
        if self._flag.is_set():
            np.negative(error, out=error)
            # This subtraction was rounded, too: what is missing is kept as one more addend.
            _add(missing, error, new, error, work)
            self._keep(error != 0, -error, start)
        missing[...] = new

    def _keep_finite(self, total: Flat, values: Flat, new: Flat, start: int) -> None:
        """Where the sum of finite numbers is too large, do not add them yet."""
        places = ~np.isfinite(new) & np.isfinite(total) & np.isfinite(values)
        new[places] = total[places]
        self._keep(places, values, start)

    def _keep(self, places: Flat, values: Flat, start: int) -> None:
        for i in np.flatnonzero(places).tolist():
            self.rest.setdefault(start + i, []).append(float(values[i]))


def _add(total: Flat, values: Flat, new: Flat, error: Flat, work: Flat) -> None:
    """TwoSum: ``new`` becomes ``total + values``, and ``error``, which may be ``values``, what is
    missing in it."""
    np.add(total, values, out=new)
    np.subtract(new, total, out=work)
    np.subtract(values, work, out=error)
    np.subtract(new, work, out=work)
    np.subtract(total, work, out=work)
    np.add(error, work, out=error)


def _remainder(values: Flat, quotient: Flat, divisor: int) -> Flat:
    """``values - quotient * divisor``, exactly, where ``quotient`` is ``values / divisor``,
    rounded."""
    work = quotient * _SPLIT
    upper = work - (work - quotient)
    # Both halves have so few bits that their products are exact.
    remainder: Flat = (values - upper * divisor) - (quotient - upper) * divisor
    return remainder


def _move_off_ties(sums: Flat, total: Flat, missing: Flat) -> None:
    """Where ``sums`` are in the middle between two float32 numbers, move them towards the exact
    ``total - missing``."""
    places = np.flatnonzero((sums.view(np.int64) & _BELOW_TIE) == 0)
    if not places.size:
        return
    found, errors = sums[places], -missing[places]
    new, work = np.empty((2, places.size))
    _add(total[places], errors, new, errors, work)
    towards = np.where((errors > 0) == (found > 0), 1, -1)
    found.view(np.int64)[...] += np.where(errors == 0, 0, towards)
    sums[places] = found


def _exact(values: list[float], is_final: bool) -> float:
    """The sum of finite numbers, rounded to nearest, but unless ``is_final`` as by
    :func:`_move_off_ties`."""
    try:
        total = math.fsum(values)
    except OverflowError:
        # A partial sum is too large.
        exact = sum(map(Fraction, values))
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf
    if total == 0:
        return -0.0 if all(math.copysign(1, value) < 0 for value in values) else 0.0
    if is_final or struct.unpack("<q", struct.pack("<d", total))[0] & _BELOW_TIE:
        return total
    # The sum is a float32 number, or in the middle between two: the sign of the rest says which
    # side it is on.
    rest = math.fsum([*values, -total])
    return total if rest == 0 else math.nextafter(total, math.inf if rest > 0 else -math.inf)


def _exact_average(values: list[float], is_final: bool) -> float:
    """The average of finite numbers, rounded as :func:`_exact` does."""
    exact = sum(map(Fraction, values)) / len(values)
    if exact == 0:
        return -0.0 if all(math.copysign(1, value) < 0 for value in values) else 0.0
    found = float(exact)
    if is_final or found == exact:
        return found
    towards = math.nextafter(found, math.inf if exact > found else -math.inf)
    return towards if struct.unpack("<q", struct.pack("<d", found))[0] & _BELOW_TIE == 0 else found


def unify_nans(values: Flat) -> None:
    """Make every NaN the positive quiet one without payload: that of a sum depends on the order."""
    # It is NaN if any value is.
    largest = np.maximum.reduce(values) if values.size else 0
    if largest != largest:
        values[np.isnan(values)] = np.nan
