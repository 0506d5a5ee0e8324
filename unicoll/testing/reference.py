"""What every collective must deliver, computed by NumPy from all ranks' inputs, with exact integers and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unicoll.types import BY_NAME

Array = npt.NDArray[Any]
Inputs = Sequence[Sequence[Array]]
"""For each rank of the group the arrays that it gives."""

_MANTISSA = {
    "float16": 10, "bfloat16": 7, "float32": 23, "float64": 52, "complex64": 23, "complex128": 52,
    "float8_e4m3fn": 3, "float8_e5m2": 2,
}  # fmt: skip
_SMALLEST = {"float16": -24, "bfloat16": -133, "float8_e4m3fn": -9, "float8_e5m2": -16}
"""Exponent of the smallest subnormal."""
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_WITHOUT_INFINITY = ("float8_e4m3fn",)
_UFUNC: dict[str, Any] = {
    "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
    "BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor,
}  # fmt: skip


def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype of an element type; None where it needs ml_dtypes and that is not installed."""
    if BY_NAME[name].native:
        storage: np.dtype[Any] = BY_NAME[name].storage
        return storage
    try:
        import ml_dtypes
    except ImportError:
        return None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


PERIOD = 10_007
"""Elements after which large arrays of random values begin anew."""


def factor_of(name: str) -> complex | float | int:
    """The factor that PREMUL_SUM is tested with: one that an element type can hold exactly."""
    return {"c": 0.5 - 1.5j, "f": 0.375}.get(BY_NAME[name].kind, 3)


def values(
    name: str, reduce: str | None, ranks: int, shape: tuple[int, ...], rng: np.random.Generator, special: bool
) -> Array:
    """Random elements; integers of the full range, but for averages, whose sums must not wrap.

    They recur after :data:`PERIOD` elements, a prime that no algorithm counts in: drawing is what takes the time.
    """
    count = math.prod(shape)
    drawn = _draw(name, reduce, ranks, min(count, PERIOD), rng, special)
    return (drawn if count <= PERIOD else np.resize(drawn, count)).reshape(shape)


def _draw(
    name: str, reduce: str | None, ranks: int, count: int, rng: np.random.Generator, special: bool
) -> Array:
    dtype = numpy_dtype(name)
    assert dtype is not None
    shape = (count,)
    kind = BY_NAME[name].kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if kind in "ui":
        info = np.iinfo(dtype)
        share = ranks if reduce == "AVG" else 1
        return rng.integers(info.min // share + share, info.max // share, shape, dtype, endpoint=True)
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
    """For each output of a rank the arrays of which it is the reduction (or, alone, the copy), flat.

    Args:
        op: name in the table.
        inputs: of all ranks.
        rank, root: in the group.
        counts: for all_to_all_single, ``counts[i, j]`` elements go from rank i to rank j.
    """
    size = len(inputs)
    first = [arrays[0].reshape(-1) for arrays in inputs if arrays]
    if op == "barrier":
        return []
    if op == "broadcast":
        return [[first[root]]]
    if op == "all_reduce":
        return [first]
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


def complaint(name: str, reduce: str | None, given: Sequence[Array], got: Array) -> str | None:
    """What is wrong with ``got`` as the reduction (copy, where ``reduce`` is None) of ``given``; None if right."""
    got = got.reshape(-1)
    if got.size != given[0].size:
        return f"{got.size} elements in place of {given[0].size}"
    if reduce is None:
        wrong = np.flatnonzero(_bits(got) != _bits(given[0]))
        return _describe(wrong, got, given[0])
    if BY_NAME[name].kind in "bui":
        expected = _exact(reduce, given)
        return _describe(np.flatnonzero(got != expected), got, expected)
    with np.errstate(all="ignore"):
        expected, tolerance = _approximate(name, reduce, given)
        close = np.abs(_wide(got) - expected) <= tolerance
    same = (got == expected) | (np.isnan(_wide(got)) & np.isnan(expected))
    limit = _LARGEST.get(name, math.inf)
    if name in _WITHOUT_INFINITY:
        overflowed = np.isnan(_wide(got)) & (np.abs(expected) > limit)
    else:
        overflowed = (
            np.isinf(_wide(got)) & (np.abs(expected) > limit) & (np.sign(_wide(got)) == np.sign(expected))
        )
    return _describe(np.flatnonzero(~(close | same | overflowed)), got, expected)


def _bits(array: Array) -> Array:
    """Each element's bytes as one item, so that NaNs and zeros are compared by what they are made of."""
    return np.ascontiguousarray(array).view(f"V{array.itemsize}")


def _describe(wrong: Array, got: Array, expected: Array) -> str | None:
    if not wrong.size:
        return None
    i = int(wrong[0])
    return f"{wrong.size} of {got.size} elements wrong; element {i} is {got[i]!r}, expected {expected[i]!r}"


def _exact(reduce: str, given: Sequence[Array]) -> Array:
    """In the element type's own arithmetic, which wraps around."""
    dtype = given[0].dtype
    with np.errstate(all="ignore"):
        if reduce in _UFUNC:
            result = given[0].copy()
            for other in given[1:]:
                result = _UFUNC[reduce](result, other)
            return result
        if reduce == "PREMUL_SUM":
            given = [x * dtype.type(3) for x in given]
        total = given[0].copy()
        for other in given[1:]:
            total = total + other
        if reduce != "AVG":
            return total
        if dtype.kind == "u":
            quotient: Array = total // dtype.type(len(given))
            return quotient
        return np.array([_towards_zero(int(t), len(given)) for t in total], dtype)


def _towards_zero(total: int, ranks: int) -> int:
    return total // ranks if total >= 0 else -(-total // ranks)


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _approximate(name: str, reduce: str, given: Sequence[Array]) -> tuple[Array, Array]:
    """The result in float64, and how far off the element type's may be."""
    wide = [_wide(x) for x in given]
    zero = np.zeros(wide[0].shape)
    half = BY_NAME[name].half
    eps = 2.0 ** -(23 if half else _MANTISSA[name])
    if reduce in ("MIN", "MAX"):
        result = wide[0]
        for other in wide[1:]:
            result = _UFUNC[reduce](result, other)
        return result, zero
    if reduce == "PREMUL_SUM":
        wide = [x * factor_of(name) for x in wide]
    if reduce == "PRODUCT":
        result = wide[0]
        for other in wide[1:]:
            result = result * other
        error = 4 * len(given) * eps * np.prod([np.abs(x) for x in wide], axis=0)
    else:
        result = np.sum(wide, axis=0)
        error = 2 * (len(given) + 1) * eps * np.sum([np.abs(x) for x in wide], axis=0)
        if reduce == "AVG":
            result, error = result / len(given), error / len(given)
    if half:  # one rounding at the end: within one unit in the last place
        _, exponent = np.frexp(np.abs(result))
        error = error + np.ldexp(1.0, np.maximum(exponent - 1 - _MANTISSA[name], _SMALLEST[name]))
    return result, np.nan_to_num(error, nan=0.0, posinf=0.0)
