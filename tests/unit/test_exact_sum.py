"""Exact sums: against rational arithmetic, bit by bit, by each of the three ways of adding, and in several orders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from unicoll.arrays import exact_arithmetic
from unicoll.arrays.exact_arithmetic import Accumulator, Summation, inexact_flag
from unicoll.arrays.half_precision import HALVES
from unicoll.arrays.kernels import ExactKernel, kernel_for
from unicoll.arrays.types import BY_NAME, ReduceOp, Reduction
from unicoll.testing.reference import numpy_dtype

Array = npt.NDArray[Any]

FORMATS = {
    "float16": (11, -24, 16),
    "bfloat16": (8, -133, 128),
    "float32": (24, -149, 128),
    "float64": (53, -1074, 1024),
}
"""Bits of the mantissa, exponent of the smallest number, and of the first power of two that is too large."""
NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8 << 48}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Warnings off, as in all callers of kernels."""
    with np.errstate(all="ignore"):
        yield


def dtype_of(name: str) -> np.dtype[Any]:
    found = numpy_dtype(name)
    return pytest.importorskip("ml_dtypes").bfloat16 if found is None else found


def rounded(number: Fraction, name: str) -> float:
    """A number rounded to a type: to nearest, ties to even."""
    bits, smallest, too_large = FORMATS[name]
    magnitude = abs(number)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** max(exponent - bits + 1, smallest)
    result = round(magnitude / unit) * unit  # Fraction rounds ties to even
    found = math.inf if result >= Fraction(2) ** too_large else float(result)
    return -found if number < 0 else found


def expected_sum(column: list[float], name: str, divisor: int = 1) -> float:
    if not all(map(math.isfinite, column)):
        return sum(column)
    total = sum(map(Fraction, column)) / divisor
    if total == 0:
        return -0.0 if all(math.copysign(1, x) < 0 for x in column) else 0.0
    return rounded(total, name)


def _normal(rng: np.random.Generator, name: str, count: int) -> Array:
    return rng.standard_normal(count)


def _decades(rng: np.random.Generator, name: str, count: int) -> Array:
    return rng.standard_normal(count) * 2.0 ** rng.integers(-12, 12, count)


def _any_exponent(rng: np.random.Generator, name: str, count: int) -> Array:
    _, smallest, too_large = FORMATS[name]
    return np.ldexp(rng.integers(-8, 9, count).astype(float), rng.integers(smallest, too_large - 5, count))


def _ties(rng: np.random.Generator, name: str, count: int) -> Array:
    return rng.integers(-2, 3, count) * 2.0 ** rng.choice([-90, -53, -26, -12, -9, 0, 1], count)


def _special(rng: np.random.Generator, name: str, count: int) -> Array:
    return rng.choice(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0], count, p=[0.05, 0.1, 0.1, 0.3, 0.3, 0.15]
    )


def _zeros(rng: np.random.Generator, name: str, count: int) -> Array:
    return rng.choice([0.0, -0.0], count, p=[0.1, 0.9])


def _huge(rng: np.random.Generator, name: str, count: int) -> Array:
    largest = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.79e308}[name]
    return rng.choice([1.0, -1.0, 0.3], count) * largest


Draw = Callable[[np.random.Generator, str, int], Array]
DRAWS: tuple[Draw, ...] = (_normal, _decades, _any_exponent, _ties, _special, _zeros, _huge)


def combined(kernel: ExactKernel, parts: list[Array]) -> Array:
    storage = [part.view(kernel.storage) for part in parts]
    out = np.empty_like(storage[0])
    kernel.combine(storage, out, disjoint=True)
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 17])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("op", [ReduceOp.EXACT_SUM, ReduceOp.EXACT_AVG], ids=str)
def test_a_sum_or_average_is_the_exact_one_rounded_once_in_every_order(
    op: Reduction, name: str, ranks: int
) -> None:
    rng = np.random.default_rng(ranks)
    divisor = ranks if op == ReduceOp.EXACT_AVG else 1
    kernel, without_flag = (ExactKernel(BY_NAME[name], op) for _ in range(2))
    without_flag._sum._flag = exact_arithmetic._NoFlag()
    for draw in DRAWS:
        parts = [draw(rng, name, 150).astype(dtype_of(name)) for _ in range(ranks)]
        found = combined(kernel, parts)
        for order in (parts[::-1], [parts[i] for i in rng.permutation(ranks)]):
            assert combined(kernel, order).tobytes() == found.tobytes()
        assert combined(without_flag, parts).tobytes() == found.tobytes()
        columns = np.array([part.astype(float) for part in parts]).T.tolist()
        expected = np.array([expected_sum(column, name, divisor) for column in columns])
        expected = expected.astype(dtype_of(name))
        bits = expected.view(f"u{expected.itemsize}")
        bits[np.isnan(expected.astype(float))] = NAN[name]
        assert found.tobytes() == bits.tobytes(), draw


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 100])
def test_averages_between_two_numbers_are_rounded_to_the_nearest(ranks: int) -> None:
    """Their quotients are in the middle between two numbers of the type, or as near to it as sums of it can be."""
    rng = np.random.default_rng(ranks)
    for name in FORMATS:
        bits, dtype = FORMATS[name][0], dtype_of(name)
        middle = (2 * rng.integers(1 << bits - 1, 1 << bits, 60) + 1) * ranks  # of the last place, doubled
        upper = (middle * 2.0**-20).astype(dtype).astype(float)
        parts = [np.zeros(60, dtype) for _ in range(ranks)]
        parts[0] = upper.astype(dtype)
        rest = [Fraction(int(m), 1 << 20) - Fraction(u) for m, u in zip(middle, upper, strict=True)]
        parts[1] = np.array([float(r) for r in rest]).astype(dtype)
        parts[2] = rng.choice([0.0, 2.0**-24, -(2.0**-24)], 60).astype(dtype)
        found = combined(ExactKernel(BY_NAME[name], ReduceOp.EXACT_AVG), parts)
        columns = np.array([part.astype(float) for part in parts]).T.tolist()
        expected = np.array([expected_sum(column, name, ranks) for column in columns]).astype(dtype)
        assert found.tobytes() == expected.tobytes(), name


def test_the_parts_of_a_complex_number_are_summed_exactly() -> None:
    parts = [np.array([x + 1j, 3 - x * 1j], np.complex64) for x in (2.0**60, 1.0, -(2.0**60), 2.0**-40)]
    out = np.empty(2, np.complex64)
    kernel_for(BY_NAME["complex64"], ReduceOp.EXACT_SUM).combine(parts, out)
    assert out.tolist() == [1 + 4j, 12 - 1j]


@pytest.mark.parametrize("count", [0, 1, 4095, 4097, 40_000])
def test_the_bits_of_an_element_do_not_depend_on_the_others(count: int) -> None:
    rng = np.random.default_rng(count)
    for name in ("float32", "float64"):
        kernel = ExactKernel(BY_NAME[name], ReduceOp.EXACT_SUM)
        parts = [_decades(rng, name, count).astype(name) for _ in range(3)]
        whole = combined(kernel, parts)
        for start, stop in ((0, count // 2), (count // 3, count)):
            assert (
                combined(kernel, [part[start:stop] for part in parts]).tobytes()
                == whole[start:stop].tobytes()
            )
        kernel.combine(parts, parts[1])  # in place
        assert parts[1].tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_an_accumulator_has_the_sum_of_what_was_added_in_every_order(name: str) -> None:
    rng = np.random.default_rng(8)
    dtype, kernel = dtype_of(name), ExactKernel(BY_NAME[name], ReduceOp.EXACT_SUM)
    for draw, has_flag in itertools.product(DRAWS, (True, False)):
        parts = [draw(rng, name, 200).astype(dtype) for _ in range(9)]
        for order in (range(9), rng.permutation(9)):
            made = Accumulator(200, kernel.storage, HALVES.get(name))
            if not has_flag:
                made._flag = exact_arithmetic._NoFlag()
            for i in order:
                made.add(parts[i].view(kernel.storage))
            out = np.empty(200, kernel.storage)
            summation = Summation(kernel.storage, HALVES.get(name), from_float64=True)
            missing = [] if made.missing is None else [-made.missing]
            summation.combine_with_rest([made.total, *missing], made.rest, out)
            assert out.tobytes() == combined(kernel, parts).tobytes(), (draw, has_flag)


def test_many_ranks() -> None:
    parts = [np.array([2.0**-140 if r else 2.0**120, 1.0, 2.0**16], np.float32) for r in range(1 << 16)]
    out = np.empty(3, np.float32)
    kernel_for(BY_NAME["float32"], ReduceOp.EXACT_SUM).combine(parts, out)
    assert out.tolist() == [2.0**120, 2.0**16, 2.0**32]


def test_a_sum_of_partial_sums_is_refused() -> None:
    kernel = kernel_for(BY_NAME["float32"], ReduceOp.EXACT_SUM)
    with pytest.raises(NotImplementedError):
        kernel.reduce_into(np.ones(3, np.float32), np.ones(3, np.float32))


def test_the_flag_is_used_on_the_machines_that_have_it() -> None:
    if exact_arithmetic.platform.machine() in exact_arithmetic._FLAGS:
        assert type(inexact_flag()) is exact_arithmetic.InexactFlag


def test_a_flag_that_is_not_reliable_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    never = type("Never", (), {"clear": lambda self: None, "is_set": lambda self: False})()
    assert not exact_arithmetic._is_reliable(never)
    assert not exact_arithmetic._is_reliable(exact_arithmetic._NoFlag())
    monkeypatch.setattr(exact_arithmetic.platform, "machine", lambda: "unknown")
    assert type(inexact_flag.__wrapped__()) is exact_arithmetic._NoFlag
