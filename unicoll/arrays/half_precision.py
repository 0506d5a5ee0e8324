"""Conversion of float16 and bfloat16 to float32 and back, in blocks.

NumPy's float16 arithmetic is not vectorised, and NumPy has no bfloat16. This module rounds float32
with integer operations on whole blocks. If the program has already imported torch or ml_dtypes,
their faster conversions are used; this module imports neither.

All conversions give the same bits, since the ranks of a group may use different ones: widening is
exact, narrowing rounds to nearest, ties to even, overflow becomes infinity (IEEE 754), and every
NaN becomes the positive quiet NaN without payload. A package's conversion is used only after it has
passed a check of these rules.

The functions expect NumPy's floating-point warnings to be off, see
:func:`unicoll.arrays.kernels.quiet_runner`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unicoll.process import logs

Flat = npt.NDArray[Any]
Convert = Callable[[Flat, Flat], None]

BLOCK = 1 << 15
"""Maximum elements per conversion: as float32 they fit into the L2 cache. torch splits larger
conversions over threads (its grain size), which would take cores from the other ranks of the host.
"""

_log = logs.logger("arrays")


# This is no pool: each thread has two blocks of fixed size, which it never returns.
class _ScratchBuffers(threading.local):
    """Per-thread memory for intermediate results."""

    def __init__(self) -> None:
        size = BLOCK * 4
        self._first, self._second = np.empty(size, np.uint8), np.empty(size, np.uint8)
        self._views: dict[np.dtype[Any], tuple[Flat, Flat]] = {}
        self.bits = np.empty(BLOCK, np.uint32)
        self.more_bits = np.empty(BLOCK, np.uint32)

    def pair(self, dtype: np.dtype[Any]) -> tuple[Flat, Flat]:
        """Two arrays of ``BLOCK * 4`` bytes each, which the conversions do not use."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = (self._first.view(dtype), self._second.view(dtype))
        return found


scratch = _ScratchBuffers()


def _uint32(value: int) -> Flat:
    # A 0-d array is twice as fast an operand as a NumPy scalar.
    return np.array(value, np.uint32)


_ONE, _SIXTEEN, _BELOW_TIE = _uint32(1), _uint32(16), _uint32(0x7FFF)
_MAGNITUDE, _EXPONENT, _SIGN = _uint32(0x7FFFFFFF), _uint32(0x7F800000), _uint32(0x8000)
_LEAST_EXPONENT, _ALIGN, _SHIFT = _uint32(113 << 23), _uint32(13 << 23), _uint32(13)
_REBIAS = np.array(-(126 << 10) & 0xFFFF, np.uint16)
_OVERFLOW = 0x47800000
"""65536 as float32. Smaller magnitudes round to at most float16's infinity; larger ones would
overflow its exponent."""


def _unify_nans(values: Flat, out: Flat, nan: int) -> None:
    """Write ``nan`` to ``out`` where ``values`` is NaN. (CPUs and packages differ in the sign and
    payload of NaNs.)"""
    # It is NaN if any value is.
    largest = np.maximum.reduce(values)
    if largest != largest:
        out.view(np.uint16)[np.isnan(values)] = nan


# --- bfloat16 -------------------------------------------------------------------------------------


def _widen_bfloat16(values: Flat, out: Flat) -> None:
    bits = out.view(np.uint32)
    bits[...] = values
    np.left_shift(bits, _SIXTEEN, out=bits)


def _round_bfloat16(values: Flat, out: Flat) -> None:
    """Round to nearest even: add 0x7FFF plus the result's last bit, then truncate. The result for
    NaN is arbitrary."""
    bits = values.view(np.uint32)
    rounded = scratch.bits[: values.size]
    np.right_shift(bits, _SIXTEEN, out=rounded)
    np.bitwise_and(rounded, _ONE, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.add(rounded, _BELOW_TIE, out=rounded)
    np.right_shift(rounded, _SIXTEEN, out=rounded)
    out[...] = rounded


# --- float16 --------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _table() -> Flat:
    """The float32 value of every float16."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def _look_up_float16(values: Flat, out: Flat) -> None:
    # In the other modes np.take writes to a buffer first. No index is out of range, so this one
    # clips nothing.
    np.take(_table(), values.view(np.uint16), out=out, mode="clip")


def _cast(values: Flat, out: Flat) -> None:
    """NumPy's own conversion, not vectorised; the fastest for small arrays."""
    out[...] = values


def _cast_float16(values: Flat, out: Flat) -> None:
    _cast(values, out)
    _unify_nans(values, out, 0x7E00)


def _round_float16(values: Flat, out: Flat) -> None:
    """Round by adding a power of two such that the sum's unit in the last place is float16's.

    For a magnitude in [2^e, 2^(e+1)) that is 2^(e+13), at least 2^-1 (for float16's subnormals).
    The addition rounds to nearest even. The sum's exponent is then that of the result except for
    the bias, and its mantissa is the result in units of the last place. No intermediate result is
    subnormal in float32, so CPUs that flush subnormals to zero give the same bits.
    """
    bits, n = values.view(np.uint32), values.size
    size, scale = scratch.bits[:n], scratch.more_bits[:n]
    np.bitwise_and(bits, _MAGNITUDE, out=size)
    # Infinities and NaN are among these.
    if np.maximum.reduce(size) >= _OVERFLOW:
        _cast_float16(values, out)
        return
    np.bitwise_and(size, _EXPONENT, out=scale)
    np.maximum(scale, _LEAST_EXPONENT, out=scale)
    np.add(scale, _ALIGN, out=scale)
    total = size.view(np.float32)
    np.add(total, scale.view(np.float32), out=total)
    np.right_shift(size, _SHIFT, out=scale)
    np.add(size, scale, out=size)
    np.right_shift(bits, _SIXTEEN, out=scale)
    np.bitwise_and(scale, _SIGN, out=scale)
    np.add(size, scale, out=size)
    short = out.view(np.uint16)
    # The cast keeps the lower 16 bits, and drops the exponent's bits above the mantissa.
    short[...] = size
    np.add(short, _REBIAS, out=short)


# --- conversions of other packages ----------------------------------------------------------------


class _Package:
    """Conversions of a package, used if the program has imported it.

    Args:
        make: takes the module, returns its conversions by name (``"narrow float16"``); None if they
            cannot be checked at present.
    """

    def __init__(self, name: str, make: Callable[[Any], dict[str, Convert] | None]) -> None:
        self.name = name
        self._make = make
        self._conversions: dict[str, Convert] = {}
        self._checked = False

    def conversion(self, name: str) -> Convert | None:
        """A conversion that has passed its check; None if the package has none or is not imported
        (yet)."""
        if not self._checked:
            module = sys.modules.get(self.name)
            spec = getattr(module, "__spec__", None)
            # In the second case another thread is importing it.
            if module is None or getattr(spec, "_initializing", False):
                return None
            passed = self._passing(module)
            if passed is None:
                return None
            # The conversions are set first: another thread, which takes no lock, uses them as soon
            # as it sees that they were checked.
            self._conversions, self._checked = passed, True
        return self._conversions.get(name)

    def _passing(self, module: Any) -> dict[str, Convert] | None:
        try:
            conversions = self._make(module)
        except Exception as e:
            # It is an old version, or one built for another NumPy.
            _log.debug("%s cannot convert half types: %s", self.name, e)
            return {}
        if conversions is None:
            return None
        good = {}
        for name, conversion in conversions.items():
            try:
                with np.errstate(all="ignore"):
                    fault = _CHECKS[name](conversion)
            except Exception as e:
                fault = f"{type(e).__name__}: {e}"
            if fault:
                _log.debug("%s is not used for %s: %s", self.name, name, fault)
            else:
                good[name] = conversion
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
    # Modes such as FakeTensorMode would intercept the conversion.
    modes = module._C._len_torch_dispatch_stack
    if modes():
        return None

    def convert(values: Flat, out: Flat) -> None:
        # Torch warns about read-only memory.
        if modes() or not values.flags.writeable:
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


# --- checks ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _critical() -> Flat:
    """float32 values of every sign and exponent, with mantissas at, just above and just below both
    types' ties."""
    top = np.array([0, 1, 2, 0x3F, 0x7E, 0x7F], np.uint32) << 16
    low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    ends = np.arange(512, dtype=np.uint32) << 23
    return (ends[:, None, None] | top[:, None] | low).reshape(-1).view(np.float32)


def _compare_narrow(convert: Convert, reference: Convert, halves: Flat) -> str | None:
    values = _critical()
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].copy()
        # NaN is left out, since its bits are made equal after each conversion.
        block = block[block == block]
        actual, expected = np.empty(block.size, halves.dtype), np.empty(block.size, halves.dtype)
        convert(block, actual)
        reference(block, expected)
        wrong = np.flatnonzero(actual.view(np.uint16) != expected.view(np.uint16))
        if wrong.size:
            return f"{block[wrong[0]]!r} becomes {actual.view(np.uint16)[wrong[0]]:#06x}"
    return None


def _compare_widen(convert: Convert, reference: Convert, halves: Flat) -> str | None:
    for start in range(0, halves.size, BLOCK):
        block = halves[start : start + BLOCK].copy()
        actual, expected = np.empty(block.size, np.float32), np.empty(block.size, np.float32)
        convert(block, actual)
        reference(block, expected)
        nan = np.isnan(expected)
        same = np.where(nan, np.isnan(actual), actual.view(np.uint32) == expected.view(np.uint32))
        if not same.all():
            return (
                f"{block.view(np.uint16)[np.flatnonzero(~same)[0]]:#06x} is widened to a wrong"
                " value"
            )
    return None


_ALL = np.arange(1 << 16, dtype=np.uint16)
_CHECKS: dict[str, Callable[[Convert], str | None]] = {
    "widen bfloat16": lambda convert: _compare_widen(convert, _widen_bfloat16, _ALL),
    "widen float16": lambda convert: _compare_widen(
        convert, _look_up_float16, _ALL.view(np.float16)
    ),
    "narrow bfloat16": lambda convert: _compare_narrow(convert, _round_bfloat16, _ALL),
    "narrow float16": lambda convert: _compare_narrow(convert, _cast, _ALL.view(np.float16)),
}


# --- selection ------------------------------------------------------------------------------------

_SMALL = 512
"""Below this size one call that is slow per element is faster than several vectorised calls."""
_LARGE = 4096
"""Above this size several vectorised calls are faster than one call that is a little slower per
element."""


def widen_bfloat16(values: Flat, out: Flat) -> None:
    """Convert bfloat16 (as uint16) to float32."""
    (_ml_dtypes.conversion("widen bfloat16") or _widen_bfloat16)(values, out)


def narrow_bfloat16(values: Flat, out: Flat) -> None:
    """Round float32 to bfloat16 (as uint16)."""
    convert = _torch.conversion("narrow bfloat16") if values.size > _LARGE else None
    convert = convert or _ml_dtypes.conversion("narrow bfloat16")
    if convert is None and values.size > _SMALL:
        convert = _torch.conversion("narrow bfloat16")
    (convert or _round_bfloat16)(values, out)
    _unify_nans(values, out, 0x7FC0)


def widen_float16(values: Flat, out: Flat) -> None:
    """Convert float16 to float32."""
    if values.size < _SMALL:
        _cast(values, out)
    else:
        (_torch.conversion("widen float16") or _look_up_float16)(values, out)


def narrow_float16(values: Flat, out: Flat) -> None:
    """Round float32 to float16."""
    convert = _torch.conversion("narrow float16") if values.size >= _SMALL else None
    if convert is not None:
        convert(values, out)
        _unify_nans(values, out, 0x7E00)
    elif values.size > _LARGE:
        _round_float16(values, out)
    else:
        _cast_float16(values, out)


class HalfConversion(NamedTuple):
    """The conversions of one type, for up to ``BLOCK`` contiguous elements.

    Attributes:
        widen: from elements (bfloat16 as uint16) to float32; exact.
        narrow: from float32 to the nearest elements.
    """

    widen: Convert
    narrow: Convert


HALVES = {
    "bfloat16": HalfConversion(widen_bfloat16, narrow_bfloat16),
    "float16": HalfConversion(widen_float16, narrow_float16),
}
"""Conversions by the type's name."""
