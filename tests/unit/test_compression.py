"""The codecs: error bounds, values and sizes; tests/gloo/test_compressed.py has the options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from unicoll.arrays.compression import BLOCK, codec_for
from unicoll.arrays.types import COMPRESSED, COMPRESSIONS

EXTREMES = (0.0, 1e-45, -3e-39, 1.2e-38, 3e-36, -1.0, 1 / 3, 127.5, 6e4, -1e30, 3.3e38, -3.4028234e38)
COUNTS = (1, 2, 255, 256, 257, 1023, 40_000, 100_001)
ROUNDING = {"float32": 1e-4, "float64": 1e-12}
"""Relative to half a step of int8: the roundings of the arithmetic itself."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def round_trip(compression: str, values: Any) -> Any:
    codec = codec_for(compression, values.dtype)
    size = codec.nbytes(values.size)
    assert size % 8 == 0
    assert size <= 2 * -(-values.size // BLOCK) * BLOCK
    data = np.full(size + 16, 0xA5, np.uint8)
    before = values.tobytes()
    codec.encode(values, data)
    assert values.tobytes() == before
    assert (data[size:] == 0xA5).all()
    out = np.full(values.size, 7, values.dtype)
    codec.decode(data[:size], out)
    return out


def largest(values: Any) -> Any:
    """For each element the largest magnitude of its block."""
    padded = np.zeros(-(-values.size // BLOCK) * BLOCK, values.dtype)
    padded[: values.size] = np.abs(values)
    return padded.reshape(-1, BLOCK).max(axis=1).repeat(BLOCK)[: values.size]


def bound(compression: str, values: Any) -> Any:
    """The documented error bound of each element, in float64."""
    wide = np.abs(values).astype(np.float64)
    if compression == "bfloat16":
        return np.maximum(wide * 2.0**-8, 2.0**-134)
    least = float(np.finfo(values.dtype).tiny) * 256
    return np.maximum(largest(values).astype(np.float64), least) / 254 * (1 + ROUNDING[values.dtype.name])


def adversarial(dtype: str, count: int) -> Iterator[Any]:
    """Arrays whose roundings are as bad as can be."""
    rng = np.random.default_rng(count)
    yield rng.standard_normal(count).astype(dtype)
    yield (rng.standard_normal(count) * 10.0 ** rng.integers(-37, 38, count)).astype(dtype)
    ties = (
        rng.integers(-127, 127, count) + 0.5
    ) / 127  # midway between two steps where a block's largest is 1
    ties[::BLOCK] = 1
    yield ties.astype(dtype)
    midway = 1 + (2 * rng.integers(0, 64, count) + 1) / 256  # midway between two bfloat16
    yield (midway * 2.0 ** rng.integers(-100, 100, count)).astype(dtype)
    yield rng.choice(np.array(EXTREMES), count).astype(dtype)
    yield np.full(count, np.finfo(np.float32).max, dtype)


@pytest.mark.parametrize("dtype", COMPRESSED)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_bounds_are_kept_and_reached(compression: str, dtype: str) -> None:
    """Reached, so that the data would show a codec that is twice as coarse."""
    worst = 0.0
    for values in (values for count in COUNTS for values in adversarial(dtype, count)):
        found = round_trip(compression, values)
        wide = values.astype(np.float64)
        overflows = (np.abs(wide) >= (2 - 2.0**-8) * 2.0**127) & (compression == "bfloat16")
        np.testing.assert_array_equal(np.isinf(found), overflows)
        np.testing.assert_array_equal(np.sign(found[overflows]), np.sign(values[overflows]))
        error = (np.abs(found.astype(np.float64) - wide) / bound(compression, values))[~overflows]
        assert (error <= 1).all()
        worst = max(worst, float(error.max(initial=0.0)))
        if compression == "int8":
            assert (np.abs(found) <= np.maximum(largest(values), np.finfo(dtype).tiny * 256)).all()
    assert worst > 0.98


@pytest.mark.parametrize("dtype", COMPRESSED)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_zeros_and_small_integers_are_exact(compression: str, dtype: str) -> None:
    assert codec_for(compression, np.dtype(dtype)).nbytes(0) == 0
    assert round_trip(compression, np.empty(0, dtype)).size == 0
    values = np.zeros(2 * BLOCK + 5, dtype)
    np.testing.assert_array_equal(round_trip(compression, values), values)
    values[:] = np.arange(values.size) % 255 - 127
    values[::BLOCK] = 127
    assert np.abs(round_trip(compression, values) - values).max() <= (
        0 if compression == "bfloat16" else 1e-4
    )


def test_float64_keeps_its_range_in_int8() -> None:
    values = np.array([1e300, -2e299, 1e290, 0.0])
    np.testing.assert_allclose(round_trip("int8", values), values, atol=1e300 / 254 * (1 + 1e-12))
    assert np.isinf(round_trip("bfloat16", values)[:2]).all()


def test_backends_do_not_see_the_compression_of_a_call() -> None:
    options = dist.CallOptions(max_ctas=4, compression="int8")
    assert options.for_backend() == dist.CallOptions(max_ctas=4)
    assert dist.CallOptions(compression="int8").for_backend() is None
