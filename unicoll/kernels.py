"""Reductions in NumPy, for every element type and operation of the table.

A kernel folds contributions in an *accumulator* type: the element type itself, or float32 for the half types, whose
own sums would lose the small terms (:mod:`unicoll.halves` converts). Whatever is more than one pass over the arrays
is done block by block in memory of the thread's own, so nothing is allocated and a block stays in the cache.

Kernels expect floating-point warnings to be switched off: overflow and NaN are results. :class:`Quiet` does that for
a whole operation.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from unicoll.errors import DistTypeError
from unicoll.halves import BLOCK, HALVES, rooms
from unicoll.types import BY_NAME, DType, Reduction

__all__ = ["Kernel", "Quiet", "kernel_for", "quiet_runner"]

Flat = npt.NDArray[Any]
T = TypeVar("T")

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
        ufunc: folds two accumulator arrays.
        plain: contributions are folded as they are: no widening, factor or division.
        acc: NumPy dtype of the accumulator.

    Raises:
        DistTypeError: of a type that is neither NumPy's nor converted here (float8).
    """

    __slots__ = (
        "_divide",
        "_factor",
        "_half",
        "_step",
        "acc",
        "average",
        "dtype",
        "plain",
        "storage",
        "ufunc",
    )

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
        self._divide = _DIVIDE.get(self.acc.kind, _divide_floats)
        self.plain = half is None and not self.average and self._factor is None

    def _take(self, acc: Flat, values: Flat) -> None:
        """A block of a contribution, widened and scaled."""
        if self._half is not None:
            self._half.widen(values, acc)
            if self._factor is not None:
                np.multiply(acc, self._factor, out=acc)
        elif self._factor is not None:
            np.multiply(values, self._factor, out=acc)
        else:
            acc[...] = values

    def begin(self, acc: Flat, values: Flat) -> None:
        """``acc`` becomes ``values``, an unwidened contribution."""
        if self._half is None:
            self._take(acc, values)
            return
        for start in range(0, acc.size, BLOCK):
            self._take(acc[start : start + BLOCK], values[start : start + BLOCK])

    def widen(self, values: Flat) -> Flat:
        """A contribution as an accumulator: a new array, or itself where accumulators look the same."""
        if self._half is None and self._factor is None:
            return values
        acc = np.empty(values.size, self.acc)
        self.begin(acc, values)
        return acc

    def fold(self, acc: Flat, values: Flat) -> None:
        """``acc`` becomes ``acc`` op ``values``, where ``values`` is an unwidened contribution."""
        if self._half is None and self._factor is None:
            self.ufunc(acc, values, out=acc)
            return
        room, step = rooms.pair(self.acc)[0], self._step
        for start in range(0, acc.size, step):
            piece = acc[start : start + step]
            taken = room[: piece.size]
            self._take(taken, values[start : start + step])
            self.ufunc(piece, taken, out=piece)

    def finish(self, acc: Flat, out: Flat, ranks: int) -> None:
        """Write an accumulator to ``out`` (which may be ``acc`` itself) in the element type; ``acc`` is kept."""
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
            quotient = rooms.pair(self.acc)[1][: acc.size]
            self._divide(acc, quotient, ranks)
            acc = quotient
        self._half.narrow(acc, out)

    def combine(self, pieces: Sequence[Flat], out: Flat, apart: bool = False) -> None:
        """Fold all ranks' contributions in rank order into ``out``.

        ``out`` may be one of them; ``apart`` says that it is not.
        """
        if self.plain and len(pieces) == 2:
            self.ufunc(pieces[0], pieces[1], out=out)
            return
        combine = (
            self._combine_wide if self._half is not None or self._factor is not None else self._combine_as_is
        )
        size, step = out.size, self._step
        if size <= step or (self.plain and apart):  # then blocks would save nothing
            if size:
                combine(pieces, out, apart)
            return
        for start in range(0, size, step):
            stop = start + step
            combine([piece[start:stop] for piece in pieces], out[start:stop], apart)

    def _combine_as_is(self, pieces: Sequence[Flat], out: Flat, apart: bool) -> None:
        ranks = len(pieces)
        if ranks == 1:
            out[...] = pieces[0]
            return
        acc, ufunc = pieces[0], self.ufunc
        room = out if apart else rooms.pair(self.acc)[0][: out.size]
        for piece in pieces[1:-1]:
            acc = ufunc(acc, piece, out=room)
        ufunc(acc, pieces[-1], out=out)
        if self.average:
            self._divide(out, out, ranks)

    def _combine_wide(self, pieces: Sequence[Flat], out: Flat, apart: bool) -> None:
        first, second = rooms.pair(self.acc)
        acc, taken = first[: out.size], second[: out.size]
        self._take(acc, pieces[0])
        for piece in pieces[1:]:
            self._take(taken, piece)
            self.ufunc(acc, taken, out=acc)
        if self._half is not None:
            self._finish_half(acc, out, len(pieces))
        else:
            out[...] = acc


# --- averages -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _scaling(dtype: np.dtype[Any], ranks: int) -> tuple[Any, Flat]:
    """How to divide by a number of ranks: for a power of two its inverse, since multiplying is faster, and the same."""
    if ranks & (ranks - 1) == 0:
        return np.multiply, np.array(1 / ranks, dtype)
    return np.divide, np.array(ranks, dtype)


def _divide_floats(acc: Flat, out: Flat, ranks: int) -> None:
    ufunc, operand = _scaling(acc.dtype, ranks)
    ufunc(acc, operand, out=out)


def _divide_complex(acc: Flat, out: Flat, ranks: int) -> None:
    part = np.float32 if acc.itemsize == 8 else np.float64
    _divide_floats(acc.view(part), out.view(part), ranks)


def _divide_unsigned(acc: Flat, out: Flat, ranks: int) -> None:
    if ranks > np.iinfo(acc.dtype).max:
        out[...] = 0
    else:
        np.floor_divide(acc, acc.dtype.type(ranks), out=out)


def _divide_signed(acc: Flat, out: Flat, ranks: int) -> None:
    """Towards zero: floor division, after the negative ones were raised by ranks - 1."""
    kind = acc.dtype.type
    if ranks > np.iinfo(kind).max:
        out[...] = -(acc == -ranks).astype(kind)
        return
    room, sign = rooms.pair(acc.dtype)[1], kind(acc.itemsize * 8 - 1)
    for start in range(0, acc.size, room.size):
        piece, target = acc[start : start + room.size], out[start : start + room.size]
        raised = room[: piece.size]
        np.right_shift(piece, sign, out=raised)  # -1 for a negative number, otherwise 0
        np.bitwise_and(raised, kind(ranks - 1), out=raised)
        np.add(raised, piece, out=raised)
        np.floor_divide(raised, kind(ranks), out=target)


_DIVIDE: dict[str, Callable[[Flat, Flat, int], None]] = {
    "c": _divide_complex,
    "u": _divide_unsigned,
    "i": _divide_signed,
}


# --- kernels, kept --------------------------------------------------------------------------------------------------


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


# --- warnings -------------------------------------------------------------------------------------------------------


def _settings_are_in_context() -> bool:
    """Whether NumPy keeps its error settings in a context variable (NumPy 2) and not in the thread."""
    return int(np.__version__.partition(".")[0]) >= 2


class Quiet:
    """Calls functions with NumPy's floating-point warnings off, at a tenth of the cost of ``np.errstate``.

    With NumPy 2 the function runs in a context of its own (:mod:`contextvars`), where the warnings were switched
    off once and for all. So it does not see the caller's context variables, and what it sets there is not seen
    outside. Calls may overlap, in threads and within each other: each takes a context that is not in use.

    With NumPy 1 it runs within ``np.errstate(all="ignore")``.
    """

    __slots__ = ("_idle", "_in_context")

    def __init__(self) -> None:
        self._in_context = _settings_are_in_context()
        self._idle: list[contextvars.Context] = []

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)``."""
        if not self._in_context:
            with np.errstate(all="ignore"):
                return function(*args)
        idle = self._idle
        try:
            context = idle.pop()
        except IndexError:
            context = contextvars.Context()  # empty, so that it keeps nothing of the caller's alive
            context.run(_switch_off)
        try:
            return context.run(function, *args)
        finally:
            idle.append(context)


def quiet_runner() -> Callable[..., Any]:
    """A :class:`Quiet` for one call at a time, never within itself: with NumPy 2 no Python code is around the call."""
    if not _settings_are_in_context():
        return Quiet()
    context = contextvars.Context()
    context.run(_switch_off)
    return context.run


def _switch_off() -> None:
    np.seterr(all="ignore")
