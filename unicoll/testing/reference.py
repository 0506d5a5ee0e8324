"""What every collective must deliver, computed by NumPy from all ranks' inputs, with exact integers
and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from functools import reduce as fold
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from unicoll.arrays.types import BY_NAME, ReduceOp, Reduction

Array = npt.NDArray[Any]
Inputs = Sequence[Sequence[Array]]
"""For each rank of the group the arrays that it gives."""

_WITHOUT_INFINITY = ("float8_e4m3fn",)
_FLOAT16_STEPS = 7
"""float8 is computed in float16, whose own rounding is at most 2 ** -7 of float8's."""
_UFUNC: dict[str, Any] = {
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@dataclass(frozen=True)
class Arithmetic:
    """What a backend's documentation leaves open in reductions of floating-point numbers; by
    default nothing.

    Attributes:
        rounds_hops: float16, bfloat16 and float8 may be rounded after every operation, and the
            ranks may be taken in any order. Otherwise they are accumulated in float32, and rounded
            once.
        saturates: a float8 that is too large or infinite may become the largest finite one, at
            every hop.
        drops_nan: MIN and MAX may be those of the numbers, where some ranks have a NaN.
        truncates: roundings to bfloat16 may be towards zero.
    """

    rounds_hops: bool = False
    saturates: bool = False
    drops_nan: bool = False
    truncates: bool = False

    def rounding(self, name: str) -> float:
        """How much a rounding changes a number at most, in halves of a unit in its last place."""
        if name.startswith("float8"):
            # The value is rounded to float16 first.
            return 1 + 2.0**-_FLOAT16_STEPS
        return 2.0 if self.truncates and name == "bfloat16" else 1.0


STRICT = Arithmetic()
NCCL = Arithmetic(rounds_hops=True, saturates=True, drops_nan=True)


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype of an element type; None where neither NumPy nor an installed ml_dtypes has
    it."""
    if BY_NAME[name].native:
        storage: np.dtype[Any] = BY_NAME[name].storage
        return storage
    try:
        import ml_dtypes
    except ImportError:
        return None
    scalar = getattr(ml_dtypes, name, None)
    return None if scalar is None else np.dtype(scalar)


class _Format(NamedTuple):
    """Bits of the mantissa, exponent of the smallest subnormal number, and the largest number."""

    mantissa: int
    smallest: int
    largest: float


@lru_cache
def _format(name: str) -> _Format:
    """The format of a floating-point type, or of a complex type's parts."""
    dtype = numpy_dtype(name)
    find = np.finfo if BY_NAME[name].native else import_module("ml_dtypes").finfo
    found: Any = find(dtype)
    return _Format(found.nmant, int(np.log2(float(found.smallest_subnormal))), float(found.max))


PERIOD = 10_007
"""Elements after which large arrays of random values begin anew."""


def factor_of(name: str) -> complex | float | int:
    """The factor that PREMUL_SUM is tested with: one that an element type can hold exactly."""
    return {"c": 0.5 - 1.5j, "f": 0.375}.get(BY_NAME[name].kind, 3)


def reduction_of(name: str, dtype: str) -> Reduction:
    """A reduction by its name; PREMUL_SUM with :func:`factor_of`."""
    if name == "PREMUL_SUM":
        return ReduceOp.PREMUL_SUM(factor_of(dtype))
    found: Reduction = getattr(ReduceOp, name)
    return found


def values(
    name: str, reduce: str | None, shape: tuple[int, ...], rng: np.random.Generator, special: bool
) -> Array:
    """Random elements; integers of the full range.

    They repeat after :data:`PERIOD` elements, because generating random values is slow; a prime
    divides no chunk.
    """
    count = math.prod(shape)
    drawn = _draw(name, reduce, min(count, PERIOD), rng, special)
    return (drawn if count <= PERIOD else np.resize(drawn, count)).reshape(shape)


def _draw(
    name: str, reduce: str | None, count: int, rng: np.random.Generator, special: bool
) -> Array:
    dtype = numpy_dtype(name)
    assert dtype is not None
    shape = (count,)
    kind = BY_NAME[name].kind
    if kind == "x":
        bits = BY_NAME[name].storage
        return rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(dtype)
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind in "ui":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    raw: Array = rng.uniform(-4, 4, shape)
    if kind == "c":
        raw = raw + 1j * rng.uniform(-4, 4, shape)
    elif special and count:
        odd = np.array([math.nan, math.inf, -math.inf, 0.0, -0.0])
        where = rng.random(shape) < 0.4
        raw = np.where(where, rng.choice(odd, shape), raw)
    elif special is False and reduce is None and BY_NAME[name].itemsize > 1 and count:
        raw = raw * 10.0 ** rng.integers(-3, 3, shape)
    with np.errstate(all="ignore"):
        return np.asarray(raw).astype(dtype)


def contributions(
    op: str, inputs: Inputs, rank: int, root: int, counts: Array | None = None
) -> list[list[Array]]:
    """For each output of a rank the arrays of which it is the reduction (or, alone, the copy),
    flat.

    In an all_to_all_single ``counts[i, j]`` elements go from rank i to rank j.
    """
    size = len(inputs)
    first: list[Array] = [arrays[0].reshape(-1) for arrays in inputs if arrays]
    if op == "barrier":
        return []
    if op == "broadcast":
        return [[first[root]]]
    if op == "all_reduce":
        return [first]
    if op == "scan":
        return [first[: rank + 1]]
    if op == "exscan":
        # Rank 0 keeps its array.
        return [first[:rank] or [first[0]]]
    if op == "reduce":
        return [first if rank == root else [first[rank]]]
    if op in ("all_gather", "gather"):
        return [[x] for x in first] if op == "all_gather" or rank == root else []
    if op == "all_gather_into_tensor":
        return [[np.concatenate(first)]]
    if op == "scatter":
        return [[inputs[root][rank].reshape(-1)]]
    if op == "reduce_scatter":
        return [[arrays[rank].reshape(-1) for arrays in inputs]]
    if op == "reduce_scatter_tensor":
        return [[np.split(x, size)[rank] for x in first]]
    if op == "all_to_all":
        return [[arrays[rank].reshape(-1)] for arrays in inputs]
    if op == "all_to_all_single":
        assert counts is not None
        ends = np.cumsum(counts, axis=1)
        parts = [first[i][ends[i, rank] - counts[i, rank] : ends[i, rank]] for i in range(size)]
        return [[np.concatenate(parts)]]
    raise AssertionError(f"no reference for {op}")


def complaint(
    name: str,
    reduce: str | None,
    given: Sequence[Array],
    got: Array,
    arithmetic: Arithmetic = STRICT,
) -> str | None:
    """What is wrong with ``got`` as the reduction (copy, where ``reduce`` is None) of ``given``;
    None if right."""
    got = got.reshape(-1)
    if got.size != given[0].size:
        return f"{got.size} elements in place of {given[0].size}"
    if reduce is None:
        wrong = np.flatnonzero(_bits(got) != _bits(given[0]))
        return _describe(wrong, got, given[0])
    if BY_NAME[name].kind in "bui":
        expected = _exact(reduce, given)
        return _describe(np.flatnonzero(got != expected), got, expected)
    found, wide = _wide(got), [_wide(x) for x in given]
    with np.errstate(all="ignore"):
        if reduce in ("MIN", "MAX"):
            expected, right = _extreme(name, reduce, wide, found, arithmetic)
        elif reduce.startswith("EXACT_") or not (arithmetic.rounds_hops and BY_NAME[name].half):
            expected, right = _rounded_once(name, reduce, wide, found)
        else:
            saturates = arithmetic.saturates and name.startswith("float8")
            more = arithmetic.rounding(name)
            if reduce == "PRODUCT":
                expected, right = _product_of_hops(name, wide, found, saturates, more)
            else:
                expected, right = _sum_of_hops(name, reduce, wide, found, saturates, more)
    return _describe(np.flatnonzero(~right), got, expected)


def _bits(array: Array) -> Array:
    """Each element's bytes as one item, so that NaNs and zeros are compared by what they are made
    of."""
    return np.ascontiguousarray(array).view(f"V{array.itemsize}")


def _describe(wrong: Array, got: Array, expected: Array) -> str | None:
    if not wrong.size:
        return None
    i = int(wrong[0])
    return (
        f"{wrong.size} of {got.size} elements wrong; element {i} is {got[i]!r}, expected"
        f" {expected[i]!r}"
    )


def _exact(reduce: str, given: Sequence[Array]) -> Array:
    """In the element type's own arithmetic, which wraps around; an average is that of the exact
    sum."""
    dtype = given[0].dtype
    if reduce == "AVG":
        totals = map(sum, zip(*(x.tolist() for x in given), strict=True))
        return np.array([_towards_zero(total, len(given)) for total in totals], dtype)
    with np.errstate(all="ignore"):
        if reduce in _UFUNC:
            result: Array = given[0].copy()
            for other in given[1:]:
                result = _UFUNC[reduce](result, other)
            return result
        if reduce == "PREMUL_SUM":
            given = [x * dtype.type(3) for x in given]
        total: Array = given[0].copy()
        for other in given[1:]:
            total = total + other
        return total


def _towards_zero(total: int, ranks: int) -> int:
    return total // ranks if total >= 0 else -(-total // ranks)


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _same(found: Array, expected: Array) -> Array:
    same: Array = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return same


def _extreme(
    name: str, reduce: str, wide: Sequence[Array], found: Array, arithmetic: Arithmetic
) -> tuple[Array, Array]:
    """The expected minimum or maximum, and where ``found`` is right."""
    expected = numbers = fold(_UFUNC[reduce], wide)
    if arithmetic.drops_nan:
        numbers = fold({"MIN": np.fmin, "MAX": np.fmax}[reduce], wide)
    right = _same(found, expected) | _same(found, numbers)
    if arithmetic.saturates and name.startswith("float8"):
        right |= _same(found, np.clip(numbers, -_format(name).largest, _format(name).largest))
    return expected, right


def _rounded_once(
    name: str, reduce: str, wide: Sequence[Array], found: Array
) -> tuple[Array, Array]:
    """The expected result, and where ``found`` is right; float16, bfloat16 and float8 accumulate in
    float32."""
    ranks, half = len(wide), BY_NAME[name].half
    eps = 2.0 ** -(23 if half else _format(name).mantissa)
    if reduce == "PRODUCT":
        expected = fold(np.multiply, wide)
        error = 4 * ranks * eps * np.prod([np.abs(x) for x in wide], axis=0)
    elif reduce in ("EXACT_SUM", "EXACT_AVG"):
        expected = _summed_exactly(wide) / (ranks if reduce == "EXACT_AVG" else 1)
        # The bound is that of two roundings on each side; the tests in tests/unit are exact.
        error = 4 * _half_ulp(name, np.abs(expected))
    else:
        if reduce == "PREMUL_SUM":
            wide = [x * factor_of(name) for x in wide]
        expected = np.sum(wide, axis=0)
        error = 2 * (ranks + 1) * eps * np.sum([np.abs(x) for x in wide], axis=0)
        if reduce == "AVG":
            expected, error = expected / ranks, error / ranks
    limit = math.inf
    # One rounding at the end: within one unit in the last place.
    if half:
        error = error + 2 * _half_ulp(name, np.abs(expected))
        limit = _format(name).largest
    right = np.abs(found - expected) <= np.nan_to_num(error, nan=0.0, posinf=0.0)
    if name in _WITHOUT_INFINITY:
        overflowed = np.isnan(found)
    else:
        overflowed = np.isinf(found) & (np.sign(found) == np.sign(expected))
    return expected, right | _same(found, expected) | (overflowed & (np.abs(expected) > limit))


def _summed_exactly(wide: Sequence[Array]) -> Array:
    """The exact sum, rounded to float64."""
    if wide[0].dtype.kind == "c":
        return _summed_exactly([x.real for x in wide]) + 1j * _summed_exactly(
            [x.imag for x in wide]
        )
    # The sum may be one of infinities and NaNs.
    total: Array = np.sum(wide, axis=0)
    for i in np.flatnonzero(np.isfinite(total)):
        total[i] = math.fsum(x[i] for x in wide)
    return total


def _half_ulp(name: str, magnitude: Array) -> Array:
    """The most that rounding to the element type changes a number of a magnitude."""
    _, exponent = np.frexp(magnitude)
    last = np.where(magnitude > 0, exponent - 1 - _format(name).mantissa, _format(name).smallest)
    half: Array = np.ldexp(0.5, np.maximum(last, _format(name).smallest))
    return half


def _rounding(name: str, magnitude: Array) -> Array:
    """The most that rounding to the element type changes a number: nothing where that is an
    element."""
    half = _half_ulp(name, magnitude)
    rounded: Array = np.where(np.fmod(magnitude, 2 * half) == 0, 0, half)
    return rounded


def _unit(name: str) -> float:
    """The largest part of a number that rounding to the nearest element changes."""
    return 2.0 ** (-1 - _format(name).mantissa)


def _sum_of_hops(
    name: str, reduce: str, wide: Sequence[Array], found: Array, saturates: bool, more: float
) -> tuple[Array, Array]:
    """The expected sum, and where ``found`` is one that was rounded after every operation, in
    whatever order.

    A rounding changes a number by ``more`` halves of a unit in its last place at most. The numbers
    rounded are the terms, where they have a factor, n - 2 partial sums, none of them larger than
    that of all positive or of all negative terms, and the sum. The factor 1/n of an average is
    rounded, too, which changes the sum by as small a part of it.

    What saturates is changed by no more than the terms' total exceeds the largest number.
    """
    ranks, limit, unit = len(wide), _format(name).largest, _unit(name) * more
    factor = {"PREMUL_SUM": factor_of(name), "AVG": 1 / ranks}.get(reduce, 1)
    terms = [x * factor for x in wide]
    expected = total = np.sum(terms, axis=0)
    if saturates:
        terms = [np.clip(x, -limit, limit) for x in terms]
        total = np.sum(terms, axis=0)
    positive, negative = (
        np.sum([np.maximum(sign * x, 0) for x in terms], axis=0) for sign in (1, -1)
    )
    largest = np.maximum(positive, negative)
    if ranks & (ranks - 1) and reduce == "AVG":
        before = np.sum([_half_ulp(name, np.abs(x) * (1 + unit)) for x in terms], axis=0) * more
        before = before + unit * np.abs(total)
    else:
        before = np.sum([_rounding(name, np.abs(x)) for x in terms], axis=0) * more
    error = before
    # The errors may take a number to where units are larger.
    for _ in range(2 if ranks > 1 else 0):
        partial, last = _half_ulp(name, largest + error), _half_ulp(name, np.abs(total) + error)
        error = before + ((ranks - 2) * partial + last) * more
    if saturates:
        overflowed = np.zeros(total.shape, bool)
        error = error + np.maximum(positive + negative - limit, 0)
    else:
        up, down = positive + error > limit, negative + error > limit
        overflowed = np.where(
            np.isnan(found), up & down, np.isinf(found) & np.where(found > 0, up, down)
        )
        overflowed &= ~np.isnan(total)
    return expected, (np.abs(found - total) <= error) | _same(found, expected) | overflowed


def _product_of_hops(
    name: str, wide: Sequence[Array], found: Array, saturates: bool, more: float
) -> tuple[Array, Array]:
    """The expected product, and where ``found`` is one that was rounded after every operation, in
    whatever order.

    Partial products are at most that of all factors above 1. Where that is too large, what
    saturates may become anything; else it becomes infinite, or a NaN.
    """
    hops, limit, unit = len(wide) - 1, _format(name).largest, _unit(name) * more
    expected = fold(np.multiply, wide)
    most = fold(np.multiply, [np.maximum(np.abs(x), 1) for x in wide])
    growth = (1 + unit) ** hops
    error = (
        hops
        * growth
        * (unit * np.abs(expected) + more * 2.0 ** (_format(name).smallest - 1) * most)
    )
    right = _same(found, expected) | (
        np.abs(found - expected) <= np.nan_to_num(error, nan=0.0, posinf=0.0)
    )
    open_ended = ~fold(np.logical_or, [np.isnan(x) for x in wide]) & (most * growth > limit)
    return expected, right | (open_ended if saturates else open_ended & ~np.isfinite(found))
