"""Reductions in NumPy, for every element type and reduction.

A kernel combines contributions in an *accumulator* type: the element type itself, or float32 for
the half types, whose own sums would lose small terms (:mod:`unicoll.arrays.half_precision`
converts). Reductions with more than one pass over the arrays run in blocks with per-thread scratch
memory, so nothing is allocated and a block stays in the cache.

Kernels expect NumPy's floating-point warnings to be off, since overflow and NaN are valid results.
:func:`quiet_runner` switches them off for a whole operation.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.arrays.half_precision import BLOCK, HALVES, scratch
from unicoll.arrays.types import EXACT, DType, ReduceOp, Reduction
from unicoll.errors import DistTypeError

Flat = npt.NDArray[Any]

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


class Kernel:
    """One reduction of one element type.

    Attributes:
        ufunc: combines two accumulator arrays.
        average: True for AVG.
        plain: True if contributions are combined unchanged: no widening, factor or division.
        at_once: True if all contributions have to be combined at once, by :meth:`combine`.
        acc: NumPy dtype of the accumulator.
        storage: NumPy dtype that the elements are stored in.

    Raises:
        DistTypeError: the type is neither NumPy's nor float16 or bfloat16 (float8).
    """

    at_once = False

    def __init__(self, dtype: DType, op: Reduction) -> None:
        self.dtype = dtype
        self.storage = dtype.storage
        self.ufunc = _UFUNCS[op.name]
        self.average = op.name == "AVG"
        self._half = half = HALVES.get(dtype.name)
        if half is None and not dtype.native:
            raise DistTypeError(f"{op.name} of {dtype.name} is not computed on the CPU")
        self.acc = np.dtype(np.float32) if half else dtype.storage
        self._step = BLOCK * 4 // self.acc.itemsize
        self._factor = None if op.factor is None else np.asarray(op.factor).astype(self.acc)
        self._divide = _divide_complex if self.acc.kind == "c" else _divide_floats
        self.plain = half is None and not self.average and self._factor is None

    def _load(self, acc: Flat, values: Flat) -> None:
        """Widen and scale a block of a contribution into ``acc``."""
        if self._half is not None:
            self._half.widen(values, acc)
            if self._factor is not None:
                np.multiply(acc, self._factor, out=acc)
        elif self._factor is not None:
            np.multiply(values, self._factor, out=acc)
        else:
            acc[...] = values

    def begin(self, acc: Flat, values: Flat) -> None:
        """Set ``acc`` to the contribution ``values``, widened and scaled."""
        if self._half is None:
            self._load(acc, values)
            return
        for start in range(0, acc.size, BLOCK):
            self._load(acc[start : start + BLOCK], values[start : start + BLOCK])

    def widen(self, values: Flat) -> Flat:
        """A contribution as an accumulator: a new array, or ``values`` itself if no conversion is
        needed."""
        if self._half is None and self._factor is None:
            return values
        acc = np.empty(values.size, self.acc)
        self.begin(acc, values)
        return acc

    def reduce_into(self, acc: Flat, values: Flat) -> None:
        """Set ``acc`` to ``acc`` op ``values``, where ``values`` is an unwidened contribution."""
        if self._half is None and self._factor is None:
            self.ufunc(acc, values, out=acc)
            return
        buffer, step = scratch.pair(self.acc)[0], self._step
        for start in range(0, acc.size, step):
            block = acc[start : start + step]
            loaded = buffer[: block.size]
            self._load(loaded, values[start : start + step])
            self.ufunc(block, loaded, out=block)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        """Convert an accumulator to the element type, into ``out``, which may be ``acc``; else
        ``acc`` is unchanged."""
        if self._half is not None:
            for start in range(0, acc.size, BLOCK):
                self._finish_half(acc[start : start + BLOCK], out[start : start + BLOCK], ranks)
        elif self.average:
            self._divide(acc, out, ranks)
        elif out is not acc:
            out[...] = acc

    def _finish_half(self, acc: Flat, out: Flat, ranks: int) -> None:
        assert self._half is not None
        if self.average:
            quotient = scratch.pair(self.acc)[1][: acc.size]
            self._divide(acc, quotient, ranks)
            acc = quotient
        self._half.narrow(acc, out)

    def combine(self, contributions: Sequence[Flat], out: Flat, disjoint: bool = False) -> None:
        """Reduce all ranks' contributions in rank order into ``out``.

        Args:
            contributions: equally long arrays of the element type, by rank.
            out: array for the result; it may be one of the contributions.
            disjoint: True if ``out`` is none of the contributions, which saves a copy.
        """
        if self.plain and len(contributions) == 2:
            self.ufunc(contributions[0], contributions[1], out=out)
            return
        combine = (
            self._combine_converted
            if self._half is not None or self._factor is not None
            else self._combine_unconverted
        )
        size, step = out.size, self._step
        # Blocks would have no advantage.
        if size <= step or (self.plain and disjoint):
            if size:
                combine(contributions, out, disjoint)
            return
        for start in range(0, size, step):
            stop = start + step
            combine([values[start:stop] for values in contributions], out[start:stop], disjoint)

    def _combine_unconverted(
        self, contributions: Sequence[Flat], out: Flat, disjoint: bool
    ) -> None:
        ranks = len(contributions)
        if ranks == 1:
            out[...] = contributions[0]
            return
        acc, ufunc = contributions[0], self.ufunc
        # Partial sums need memory of their own: `out` may be a contribution that is still to be
        # read.
        buffer = out if disjoint else scratch.pair(self.acc)[0][: out.size]
        for values in contributions[1:-1]:
            acc = ufunc(acc, values, out=buffer)
        ufunc(acc, contributions[-1], out=out)
        if self.average:
            self._divide(out, out, ranks)

    def _combine_converted(self, contributions: Sequence[Flat], out: Flat, disjoint: bool) -> None:
        first, second = scratch.pair(self.acc)
        acc, loaded = first[: out.size], second[: out.size]
        self._load(acc, contributions[0])
        for values in contributions[1:]:
            self._load(loaded, values)
            self.ufunc(acc, loaded, out=acc)
        if self._half is not None:
            self._finish_half(acc, out, len(contributions))
        else:
            out[...] = acc


class ExactKernel(Kernel):
    """EXACT_SUM or EXACT_AVG of one element type (:mod:`unicoll.arrays.exact_arithmetic`)."""

    at_once = True

    def __init__(self, dtype: DType, op: Reduction) -> None:
        # This is imported only here, because it loads the C library.
        from unicoll.arrays import exact_arithmetic

        super().__init__(dtype, ReduceOp.AVG if op == ReduceOp.EXACT_AVG else ReduceOp.SUM)
        self.plain = False
        # Partial sums would be rounded: code that ignores `at_once` gets an error in place of a
        # wrong sum.
        self.ufunc = _refuse
        self._part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else None
        self._sum = exact_arithmetic.Summation(self._part or self.storage, self._half, self.average)
        self._unify_nans = exact_arithmetic.unify_nans
        self._of_two = Kernel(dtype, ReduceOp.SUM)

    def combine(self, contributions: Sequence[Flat], out: Flat, disjoint: bool = False) -> None:
        # The two parts of complex numbers are added as real numbers.
        part = self._part
        if len(contributions) > 2 or self.average:
            if part is not None:
                contributions, out = [values.view(part) for values in contributions], out.view(part)
            self._sum.combine(contributions, out)
            return
        # One addition rounds the exact sum of two numbers once, also that of half types
        # (exact_arithmetic says why).
        for start in range(0, out.size, BLOCK):
            result = out[start : start + BLOCK]
            self._of_two.combine(
                [values[start : start + BLOCK] for values in contributions], result
            )
            if self._half is None:
                self._unify_nans(result if part is None else result.view(part))


class IntegerAverageKernel(Kernel):
    """AVG of integers: the exact sum, divided by the number of ranks (up to ``2**30``) and rounded
    towards zero.

    The sum itself may not fit into the element type, the average always does. Integers of up to 32
    bits are added in int64; those of 64 bits as ``high * 2**32 + low``, where each part is added in
    a type of 64 bits.
    """

    at_once = True

    def __init__(self, dtype: DType, op: Reduction) -> None:
        super().__init__(dtype, op)
        self.plain = False
        self.ufunc = _refuse
        self._sums = np.dtype(dtype.storage if dtype.itemsize == 8 else np.int64)
        self._average = self._average_parts if dtype.itemsize == 8 else self._average_sums

    def combine(self, contributions: Sequence[Flat], out: Flat, disjoint: bool = False) -> None:
        first, second = scratch.pair(self._sums)
        step = first.size // 2
        blocks = first[:step], first[step:], second[:step], second[step:]
        for start in range(0, out.size, step):
            target = out[start : start + step]
            memory = [block[: target.size] for block in blocks]
            self._average(
                [values[start : start + step] for values in contributions], target, *memory
            )

    def _average_sums(
        self, parts: Sequence[Flat], out: Flat, total: Flat, work: Flat, *_: Flat
    ) -> None:
        total[...] = parts[0]
        for values in parts[1:]:
            np.add(total, values, out=total)
        self._round_up_negative(total, total, work, len(parts))
        np.floor_divide(total, self._sums.type(len(parts)), out=total)
        out[...] = total

    def _average_parts(
        self, parts: Sequence[Flat], out: Flat, high: Flat, low: Flat, work: Flat, spare: Flat
    ) -> None:
        ranks, half, below = map(self._sums.type, (len(parts), 32, 0xFFFF_FFFF))
        high.fill(0)
        low.fill(0)
        for values in parts:
            np.add(high, np.right_shift(values, half, out=work), out=high)
            np.add(low, np.bitwise_and(values, below, out=work), out=low)
        np.add(high, np.right_shift(low, half, out=work), out=high)
        np.bitwise_and(low, below, out=low)
        self._round_up_negative(high, low, work, len(parts))
        # high * 2**32 + low = (quotient * ranks + rest) * 2**32 + low
        quotient = np.floor_divide(high, ranks, out=work)
        np.subtract(high, np.multiply(quotient, ranks, out=spare), out=high)
        np.left_shift(high, half, out=high)
        np.add(low, high, out=low)
        np.floor_divide(low, ranks, out=low)
        np.add(np.left_shift(quotient, half, out=work), low, out=out)

    def _round_up_negative(self, sign: Flat, sums: Flat, work: Flat, ranks: int) -> None:
        """Add ``ranks - 1`` to the sums whose sign is negative, so that floor division rounds them
        towards zero."""
        if self._sums.kind == "i":
            # The shift gives -1 for a negative number, otherwise 0.
            np.right_shift(sign, np.int64(63), out=work)
            np.bitwise_and(work, np.int64(ranks - 1), out=work)
            np.add(sums, work, out=sums)


def _refuse(*_: Any, **__: Any) -> None:
    raise NotImplementedError("an exact sum, or an average of integers, of partial sums")


# --- averages -------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _divisor(dtype: np.dtype[Any], ranks: int) -> tuple[Any, Flat]:
    """(ufunc, operand) that divide by ``ranks``: for a power of two multiplication, which is exact
    and faster."""
    if ranks & (ranks - 1) == 0:
        return np.multiply, np.array(1 / ranks, dtype)
    return np.divide, np.array(ranks, dtype)


def _divide_floats(acc: Flat, out: Flat, ranks: int) -> None:
    ufunc, operand = _divisor(acc.dtype, ranks)
    ufunc(acc, operand, out=out)


def _divide_complex(acc: Flat, out: Flat, ranks: int) -> None:
    part = np.float32 if acc.itemsize == 8 else np.float64
    _divide_floats(acc.view(part), out.view(part), ranks)


# --- kernel cache ---------------------------------------------------------------------------------


_MAX_KERNELS = 512
_kernels: dict[Any, Kernel] = {}


def kernel_for(dtype: DType, op: Reduction) -> Kernel:
    """The kernel of an element type and reduction, cached.

    Raises:
        DistTypeError: the reduction is not supported for the type on the CPU (float8).
    """
    key = dtype.code, op.key
    found = _kernels.get(key)
    if found is None:
        # Each factor of PREMUL_SUM is a reduction of its own, so a program may use any number of
        # them.
        if len(_kernels) >= _MAX_KERNELS:
            _kernels.clear()
        found = _kernels[key] = _class_for(dtype, op)(dtype, op)
    return found


def _class_for(dtype: DType, op: Reduction) -> type[Kernel]:
    if op in EXACT.values():
        return ExactKernel
    return IntegerAverageKernel if op == ReduceOp.AVG and dtype.kind in "ui" else Kernel


# --- warnings -------------------------------------------------------------------------------------


def quiet_runner() -> Callable[..., Any]:
    """``run(function, *args)`` calls a function with NumPy's floating-point warnings off; one call
    at a time.

    NumPy 2 keeps its error state in a context variable, so the function runs in a context of its
    own in which the warnings are permanently off: a tenth of the cost of ``np.errstate``. It does
    not see the caller's context variables. NumPy 1 keeps its error state per thread.
    """
    if int(np.__version__.partition(".")[0]) < 2:
        return lambda function, *args: np.errstate(all="ignore")(function)(*args)
    # The context is empty, so it keeps no value of the caller alive.
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run
