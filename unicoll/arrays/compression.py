"""Lossy compression of float32 and float64 for slow links: bfloat16, and int8 with one scale per
block.

A codec turns an array into bytes and back. Decoding gives the same bits from the same bytes on
every rank.

``bfloat16``
    Each value is rounded to the nearest bfloat16, ties to even (float64: to float32 first): the
    error is at most 2^-8 of the value, or 2^-134 where that is more. Magnitudes above 3.39e38
    become infinite; infinities are kept, and NaN stays NaN.
``int8``
    Each block of :data:`BLOCK` consecutive values is divided by 1/127 of its largest magnitude m
    and rounded to the nearest integer: the error is at most m/254, plus a few roundings of the
    element type. m counts as at least 256 times the smallest normal number (3e-36; float64:
    6e-306). All values of a block that has an infinity or NaN become NaN.

The functions expect NumPy's floating-point warnings to be off, see
:func:`unicoll.arrays.kernels.quiet_runner`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np

from unicoll.arrays.half_precision import BLOCK as _CONVERTED
from unicoll.arrays.half_precision import HALVES, Flat, scratch

BLOCK = 256
"""Elements of an array that share a scale."""
_STEPS = 127


class Codec(ABC):
    """One compression of one element type."""

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` compressed elements: a multiple of 8, for whole blocks at most ``2 *
        count``."""

    @abstractmethod
    def encode(self, values: Flat, data: Flat) -> None:
        """Compress a contiguous array into ``data``: uint8, at least ``nbytes(values.size)``,
        aligned to 8 bytes."""

    @abstractmethod
    def decode(self, data: Flat, values: Flat) -> None:
        """The reverse of :meth:`encode`; ``values`` has as many elements as were encoded."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class _BFloat16(Codec):
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._convert = HALVES["bfloat16"]
        self._wide = dtype.itemsize > 4

    def nbytes(self, count: int) -> int:
        return _aligned(2 * count)

    def encode(self, values: Flat, data: Flat) -> None:
        shorts = data[: 2 * values.size].view(np.uint16)
        for start in range(0, values.size, _CONVERTED):
            some = values[start : start + _CONVERTED]
            if self._wide:
                single = _floats(some.size)
                single[...] = some
                some = single
            self._convert.narrow(some, shorts[start : start + some.size])

    def decode(self, data: Flat, values: Flat) -> None:
        shorts = data[: 2 * values.size].view(np.uint16)
        for start in range(0, values.size, _CONVERTED):
            some = values[start : start + _CONVERTED]
            if self._wide:
                single = _floats(some.size)
                self._convert.widen(shorts[start : start + some.size], single)
                some[...] = single
            else:
                self._convert.widen(shorts[start : start + some.size], some)


def _floats(count: int) -> Flat:
    return scratch.pair(np.dtype(np.float32))[0][:count]


class _Int8(Codec):
    """The data are the largest magnitude of each block, in the element type, then one byte for each
    element."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        info = np.finfo(dtype)
        self._dtype = dtype
        self._integer = np.dtype(f"i{dtype.itemsize}")
        # The step and its inverse are normal numbers from here on.
        self._least = np.array(info.tiny * 256, dtype)
        self._steps = np.array(_STEPS, dtype)
        # The step is a little less than 1/127, so that 127 steps never exceed the largest
        # magnitude, which may be the largest one of the type.
        self._step = np.array((1 - 3 * float(info.eps)) / _STEPS, dtype)
        # Added to a small number, it leaves the nearest integer, ties to even, in the lowest bits
        # of the sum.
        self._to_integer = np.array(1.5 * 2.0**info.nmant, dtype)
        self._zero = np.array(0, dtype)

    def nbytes(self, count: int) -> int:
        return _aligned(-(-count // BLOCK) * self._dtype.itemsize + count)

    def _parts(self, data: Flat, count: int) -> tuple[Flat, Flat]:
        at = -(-count // BLOCK) * self._dtype.itemsize
        return data[:at].view(self._dtype), data[at : at + count].view(np.int8)

    def _rows(self, count: int) -> list[tuple[int, int, int]]:
        """Ranges of elements that fit the scratch memory, with the size of their blocks; the last
        may be shorter."""
        whole, step = count // BLOCK * BLOCK, scratch.pair(self._dtype)[0].size
        found = [(at, min(at + step, whole), BLOCK) for at in range(0, whole, step)]
        return [*found, (whole, count, count - whole)] if whole < count else found

    def encode(self, values: Flat, data: Flat) -> None:
        largest, integers = self._parts(data, values.size)
        for start, stop, width in self._rows(values.size):
            blocks = slice(start // BLOCK, -(-stop // BLOCK))
            self._encode(
                values[start:stop].reshape(-1, width),
                largest[blocks],
                integers[start:stop].reshape(-1, width),
            )

    def _encode(self, values: Flat, largest: Flat, integers: Flat) -> None:
        work = scratch.pair(self._dtype)[0][: values.size].reshape(values.shape)
        np.abs(values, out=work)
        # As integers the bits of magnitudes are in the order of the magnitudes, with NaN last, and
        # are faster to compare.
        bits = work.view(self._integer)
        np.maximum.reduce(bits, axis=1, out=largest.view(self._integer))
        np.maximum(largest, self._least, out=largest)
        # Infinity times 0 is NaN: the scale of a block with an infinity or NaN becomes NaN, and so
        # do all its decoded values.
        np.add(largest, largest * self._zero, out=largest)
        np.multiply(values, (self._steps / largest)[:, None], out=work)
        np.add(work, self._to_integer, out=work)
        # The cast keeps the lowest 8 bits, which hold the integer.
        integers[...] = bits

    def decode(self, data: Flat, values: Flat) -> None:
        largest, integers = self._parts(data, values.size)
        steps = largest * self._step
        for start, stop, width in self._rows(values.size):
            some = values[start:stop].reshape(-1, width)
            some[...] = integers[start:stop].reshape(-1, width)
            np.multiply(some, steps[start // BLOCK : -(-stop // BLOCK), None], out=some)


_CODECS = {"bfloat16": _BFloat16, "int8": _Int8}


@lru_cache(maxsize=16)
def codec_for(compression: str, dtype: np.dtype[Any]) -> Codec:
    """The codec of a compression, a key of :data:`unicoll.arrays.types.COMPRESSIONS`, and float32
    or float64."""
    return _CODECS[compression](dtype)
