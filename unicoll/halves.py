"""float16 and bfloat16 to float32 and back, a block at a time.

NumPy computes in float16 one element after the other, and does not know bfloat16 at all. Here float32 is rounded with
integer operations on whole blocks. Where the program has imported torch or ml_dtypes anyway, their conversions are
used, which are faster; nothing is imported for it.

All ways give the same bits, since ranks of one group may take different ones: widening is exact, narrowing rounds to
the nearest and ties to even, what is too large becomes an infinity (IEEE 754), and every NaN becomes the one that is
positive, quiet and without payload. A package's conversion is used after it has shown that it does so.

The functions expect floating-point warnings to be switched off, see :class:`unicoll.kernels.Quiet`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK", "HALVES", "Half", "rooms"]

Flat = npt.NDArray[Any]
Convert = Callable[[Flat, Flat], None]

BLOCK = 1 << 15
"""Most elements that are converted at a time: as float32 they stay in the second-level cache. torch spreads more than
so many over threads (its grain size), which would take cores from the other ranks of the host."""

_log = logging.getLogger("unicoll.halves")


class _Rooms(threading.local):
    """Memory for intermediate results, of each thread its own."""

    def __init__(self) -> None:
        size = BLOCK * 4
        self._first, self._second = np.empty(size, np.uint8), np.empty(size, np.uint8)
        self._views: dict[np.dtype[Any], tuple[Flat, Flat]] = {}
        self.bits = np.empty(BLOCK, np.uint32)
        self.more_bits = np.empty(BLOCK, np.uint32)

    def pair(self, dtype: np.dtype[Any]) -> tuple[Flat, Flat]:
        """Two arrays of ``BLOCK * 4`` bytes each, apart from those that conversions use."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = (self._first.view(dtype), self._second.view(dtype))
        return found


rooms = _Rooms()


def _word(value: int) -> Flat:
    return np.array(value, np.uint32)  # NumPy takes such operands in half the time of its scalars


_ONE, _HALF_WORD, _BELOW_TIE = _word(1), _word(16), _word(0x7FFF)
_MAGNITUDE, _EXPONENT, _SIGN = _word(0x7FFFFFFF), _word(0x7F800000), _word(0x8000)
_LEAST_EXPONENT, _ALIGN, _SHIFT = _word(113 << 23), _word(13 << 23), _word(13)
_REBIAS = np.array(-(126 << 10) & 0xFFFF, np.uint16)
_OVERFLOW = 0x47800000
"""65536 as float32. What is less rounds to float16's infinity at most, as it should; from here on it would go on."""


def _unify_nans(values: Flat, out: Flat, nan: int) -> None:
    """``out`` where ``values`` is NaN: this one. (Processors and packages differ in the sign and payload of NaNs.)"""
    largest = np.maximum.reduce(values)  # NaN if any is
    if largest != largest:
        out.view(np.uint16)[np.isnan(values)] = nan


# --- bfloat16 -------------------------------------------------------------------------------------------------------


def _widen_bfloat16(values: Flat, out: Flat) -> None:
    bits = out.view(np.uint32)
    bits[...] = values
    np.left_shift(bits, _HALF_WORD, out=bits)


def _round_bfloat16(values: Flat, out: Flat) -> None:
    """Add half a unit, less a little unless the result's last bit is set; cut off. NaNs may become anything."""
    bits = values.view(np.uint32)
    rounded = rooms.bits[: values.size]
    np.right_shift(bits, _HALF_WORD, out=rounded)
    np.bitwise_and(rounded, _ONE, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.add(rounded, _BELOW_TIE, out=rounded)
    np.right_shift(rounded, _HALF_WORD, out=rounded)
    out[...] = rounded


# --- float16 --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table() -> Flat:
    """float32 of every float16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _look_up_float16(values: Flat, out: Flat) -> None:
    np.take(_table(), values.view(np.uint16), out=out, mode="clip")  # other modes go through a buffer


def _cast(values: Flat, out: Flat) -> None:
    """NumPy's own conversion, one element after the other; the fastest for a few."""
    out[...] = values


def _cast_float16(values: Flat, out: Flat) -> None:
    _cast(values, out)
    _unify_nans(values, out, 0x7E00)


def _round_float16(values: Flat, out: Flat) -> None:
    """Round by adding a power of two so large that the sum's last place is float16's.

    For a magnitude in [2^e, 2^(e+1)) that is 2^(e+13), and never less than 2^-1, for float16's subnormals. The adder
    rounds to the nearest even. The sum's exponent is then that of the result but for the bias, and its mantissa is
    the result in units of the last place. No result of this is subnormal in float32, so processors that are slow
    with those, or told to flush them, make no difference.
    """
    bits, n = values.view(np.uint32), values.size
    size, scale = rooms.bits[:n], rooms.more_bits[:n]
    np.bitwise_and(bits, _MAGNITUDE, out=size)
    if np.maximum.reduce(size) >= _OVERFLOW:  # or infinite, or NaN
        _cast_float16(values, out)
        return
    np.bitwise_and(size, _EXPONENT, out=scale)
    np.maximum(scale, _LEAST_EXPONENT, out=scale)
    np.add(scale, _ALIGN, out=scale)
    total = size.view(np.float32)
    np.add(total, scale.view(np.float32), out=total)
    np.right_shift(size, _SHIFT, out=scale)
    np.add(size, scale, out=size)
    np.right_shift(bits, _HALF_WORD, out=scale)
    np.bitwise_and(scale, _SIGN, out=scale)
    np.add(size, scale, out=size)
    short = out.view(np.uint16)
    short[...] = size  # the lower half; the exponent's bits above the mantissa are gone with the upper one
    np.add(short, _REBIAS, out=short)


# --- what other packages offer --------------------------------------------------------------------------------------


class _Package:
    """Conversions of a package that the program may have imported.

    Args:
        name: of the module.
        make: returns the conversions by their name here, from the module; None if this is not the moment to try.
    """

    def __init__(self, name: str, make: Callable[[Any], dict[str, Convert] | None]) -> None:
        self.name = name
        self._make = make
        self._ways: dict[str, Convert] = {}
        self._settled = False

    def way(self, name: str) -> Convert | None:
        """A conversion that gives the bits it must; None if there is none (yet)."""
        if not self._settled:
            module = sys.modules.get(self.name)
            spec = getattr(module, "__spec__", None)
            if module is None or getattr(spec, "_initializing", False):  # another thread is importing it
                return None
            proven = self._proven(module)
            if proven is None:
                return None
            self._ways, self._settled = proven, True
        return self._ways.get(name)

    def _proven(self, module: Any) -> dict[str, Convert] | None:
        try:
            ways = self._make(module)
        except Exception as e:  # an old version, or one built for another NumPy
            _log.debug("%s cannot convert half types: %s", self.name, e)
            return {}
        if ways is None:
            return None
        good = {}
        for name, way in ways.items():
            try:
                with np.errstate(all="ignore"):
                    fault = _PROOFS[name](way)
            except Exception as e:
                fault = f"{type(e).__name__}: {e}"
            if fault:
                _log.debug("%s is not used to %s: %s", self.name, name, fault)
            else:
                good[name] = way
        return good


def _of_ml_dtypes(module: Any) -> dict[str, Convert]:
    kind = np.dtype(module.bfloat16)

    def widen(values: Flat, out: Flat) -> None:
        out[...] = values.view(kind)

    def narrow(values: Flat, out: Flat) -> None:
        out.view(kind)[...] = values

    return {"widen bfloat16": widen, "narrow bfloat16": narrow}


def _of_torch(module: Any) -> dict[str, Convert] | None:
    tensor, bfloat16 = module.from_numpy, module.bfloat16
    modes = module._C._len_torch_dispatch_stack  # modes such as FakeTensorMode would catch what is done here
    if modes():
        return None

    def convert(values: Flat, out: Flat) -> None:
        if modes() or not values.flags.writeable:  # torch warns of memory that may not be written
            _cast(values, out)
        else:
            tensor(out).copy_(tensor(values))

    def narrow(values: Flat, out: Flat) -> None:
        if modes() or not values.flags.writeable:
            _round_bfloat16(values, out)
        else:
            tensor(out.view(np.int16)).view(bfloat16).copy_(tensor(values))

    return {"widen float16": convert, "narrow float16": convert, "narrow bfloat16": narrow}


_ml_dtypes = _Package("ml_dtypes", _of_ml_dtypes)
_torch = _Package("torch", _of_torch)


# --- proofs ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _critical() -> Flat:
    """float32 of every sign and exponent, with mantissas on, just above and just below the ties of both types."""
    top = np.array([0, 1, 2, 0x3F, 0x7E, 0x7F], np.uint32) << 16
    low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    ends = np.arange(512, dtype=np.uint32) << 23
    return (ends[:, None, None] | top[:, None] | low).reshape(-1).view(np.float32)


def _compare_narrow(way: Convert, reference: Convert, halves: Flat) -> str | None:
    values = _critical()
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].copy()
        block = block[block == block]
        given, expected = np.empty(block.size, halves.dtype), np.empty(block.size, halves.dtype)
        way(block, given)
        reference(block, expected)
        wrong = np.flatnonzero(given.view(np.uint16) != expected.view(np.uint16))
        if wrong.size:
            return f"{block[wrong[0]]!r} becomes {given.view(np.uint16)[wrong[0]]:#06x}"
    return None


def _compare_widen(way: Convert, reference: Convert, halves: Flat) -> str | None:
    for start in range(0, halves.size, BLOCK):
        block = halves[start : start + BLOCK].copy()
        given, expected = np.empty(block.size, np.float32), np.empty(block.size, np.float32)
        way(block, given)
        reference(block, expected)
        nan = np.isnan(expected)
        same = np.where(nan, np.isnan(given), given.view(np.uint32) == expected.view(np.uint32))
        if not same.all():
            return f"{block.view(np.uint16)[np.flatnonzero(~same)[0]]:#06x} becomes something else"
    return None


_ALL = np.arange(1 << 16, dtype=np.uint16)
_PROOFS: dict[str, Callable[[Convert], str | None]] = {
    "widen bfloat16": lambda way: _compare_widen(way, _widen_bfloat16, _ALL),
    "widen float16": lambda way: _compare_widen(way, _look_up_float16, _ALL.view(np.float16)),
    "narrow bfloat16": lambda way: _compare_narrow(way, _round_bfloat16, _ALL),
    "narrow float16": lambda way: _compare_narrow(way, _cast, _ALL.view(np.float16)),
}


# --- the choice -----------------------------------------------------------------------------------------------------

_FEW = 512
"""Below so many elements one call that is slow per element beats several fast ones."""
_MANY = 4096
"""From so many on several fast calls beat one that is a little slower per element."""


def widen_bfloat16(values: Flat, out: Flat) -> None:
    """float32 of bfloat16 (as uint16)."""
    (_ml_dtypes.way("widen bfloat16") or _widen_bfloat16)(values, out)


def narrow_bfloat16(values: Flat, out: Flat) -> None:
    """The bfloat16 (as uint16) nearest to float32."""
    way = _torch.way("narrow bfloat16") if values.size > _MANY else None
    way = way or _ml_dtypes.way("narrow bfloat16")
    if way is None and values.size > _FEW:
        way = _torch.way("narrow bfloat16")
    (way or _round_bfloat16)(values, out)
    _unify_nans(values, out, 0x7FC0)


def widen_float16(values: Flat, out: Flat) -> None:
    """float32 of float16."""
    if values.size < _FEW:
        _cast(values, out)
    else:
        (_torch.way("widen float16") or _look_up_float16)(values, out)


def narrow_float16(values: Flat, out: Flat) -> None:
    """The float16 nearest to float32."""
    way = _torch.way("narrow float16") if values.size >= _FEW else None
    if way is not None:
        way(values, out)
        _unify_nans(values, out, 0x7E00)
    elif values.size > _MANY:
        _round_float16(values, out)
    else:
        _cast_float16(values, out)


class Half(NamedTuple):
    """The conversions of one type, for at most ``BLOCK`` contiguous elements.

    Attributes:
        widen: from elements (bfloat16 as uint16) to float32; exact.
        narrow: from float32 to the nearest elements.
    """

    widen: Convert
    narrow: Convert


HALVES = {
    "bfloat16": Half(widen_bfloat16, narrow_bfloat16),
    "float16": Half(widen_float16, narrow_float16),
}
