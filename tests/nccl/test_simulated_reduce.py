"""The simulated NCCL computes as NCCL does: the order of the ranks, rounding at every hop, NaN, float8, averages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nccl_comm.library.interface import AVG, DATA_TYPES, MAX, MIN, PROD, SUM
from tests.simulated_nccl.reductions import PREMUL_SUM, Signature, results
from unicoll.testing.conformance import has
from unicoll.testing.reference import numpy_dtype

_INF, _NAN = math.inf, math.nan


def _reduced(
    name: str, op: int, *given: Any, kind: str = "all_reduce", root: int = 0, factor: float | None = None
) -> list[list[float]]:
    """The elements that each rank gets."""
    if not has(name):
        pytest.skip("needs ml_dtypes")
    dtype = numpy_dtype(name)
    count = len(given[0]) // (len(given) if kind == "reduce_scatter" else 1)
    scale = None if factor is None else np.array(factor).astype(dtype).tobytes()
    sent = [(np.array(x).astype(dtype).tobytes(), scale) for x in given]
    found = results(Signature(kind, count, DATA_TYPES[name], op, root), sent)
    return [np.frombuffer(data, dtype).astype(float).tolist() for data in found]


_ORDERED = ([2048, 1, 1], 2048), ([1, 2048, 1], 2048), ([1, 1, 2048], 2050)
"""float16 from the ranks in the order of the hops, and their sum: above 2048 it has even numbers only."""


@pytest.mark.parametrize("root", range(3))
@pytest.mark.parametrize(("hops", "expected"), _ORDERED)
def test_a_reduction_begins_behind_its_root(hops: list[int], expected: int, root: int) -> None:
    given = [[hops[(rank - root - 1) % 3]] for rank in range(3)]
    assert _reduced("float16", SUM, *given, kind="reduce", root=root)[root] == [expected]


@pytest.mark.parametrize(("hops", "expected"), _ORDERED)
def test_each_part_of_a_scattered_reduction_ends_at_its_rank(hops: list[int], expected: int) -> None:
    given = [[hops[(rank - part - 1) % 3] for part in range(3)] for rank in range(3)]
    assert _reduced("float16", SUM, *given, kind="reduce_scatter") == [[expected]] * 3


def test_an_all_reduce_has_a_chunk_of_whole_packs_for_each_rank() -> None:
    given = [[2048] * 20, [1] * 20, [1] * 20]
    # 8 elements are 16 bytes; chunk 0 begins at rank 1, chunk 1 at rank 2, chunk 2 at rank 0
    assert _reduced("float16", SUM, *given) == [[2050] * 8 + [2048] * 12] * 3


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
)
def test_min_and_max_drop_a_nan_unless_all_ranks_have_one(name: str) -> None:
    given = [[_NAN, 1, _NAN], [2, _NAN, _NAN]]
    for op in (MIN, MAX):
        number, other, neither = _reduced(name, op, *given)[0]
        assert (number, other) == (2, 1)
        assert math.isnan(neither)
    assert all(math.isnan(x) for x in _reduced(name, SUM, *given)[0])


def test_float8_saturates_at_every_hop() -> None:
    for name, largest in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        most = [largest]
        assert _reduced(name, SUM, most, most)[0] == most
        assert _reduced(name, PROD, most, most)[0] == most
        minus = [-largest]
        assert _reduced(name, SUM, minus, most, most, kind="reduce")[0] == [0]  # 2 * most would leave most
        assert _reduced(name, SUM, most, minus, most, kind="reduce")[0] == most
    assert _reduced("float8_e5m2", SUM, [_INF], [1]) == [[57344]] * 2
    assert _reduced("float8_e5m2", MAX, [_INF], [1]) == [[57344]] * 2
    assert math.isnan(_reduced("float8_e5m2", SUM, [_INF], [-_INF])[0][0])
    assert _reduced("float8_e5m2", SUM, [_INF]) == [[_INF]]  # a rank alone copies


def test_float16_overflows_to_infinity() -> None:
    assert _reduced("float16", SUM, [-60000], [60000], [60000], kind="reduce")[0] == [_INF]


def test_an_average_multiplies_each_element_by_a_rounded_factor() -> None:
    third = float(np.float16(1 / 3))
    assert _reduced("float16", AVG, [3], [0], [0])[0] == [float(np.float16(3 * third))]
    assert _reduced("float64", AVG, [4], [14], [24])[0] == [14 * (1 / 3) + 24 * (1 / 3) + 4 * (1 / 3)]
    assert _reduced("float8_e5m2", AVG, [1], [1], [1])[0] == [1]  # 3 * 0.3125 is 0.9375
    assert _reduced("float8_e5m2", AVG, [1], [0], [0])[0] == [0.3125]


@pytest.mark.parametrize("name", ["int8", "int32", "int64", "uint8"])
def test_an_average_of_integers_is_divided_towards_zero(name: str) -> None:
    assert _reduced(name, AVG, [7, 1], [4, 0])[0] == [5, 0]
    if name != "uint8":
        least = np.iinfo(name).min
        assert _reduced(name, AVG, [-7, -1, least], [-4, 0, 0])[0] == [-5, 0, least // 2]


def test_each_term_of_a_scaled_sum_is_rounded() -> None:
    x = 1 + 2.0**-10  # times 0.375 it needs 12 bits
    assert _reduced("float16", PREMUL_SUM, [x], [x], factor=0.375)[0] == [2 * float(np.float16(x * 0.375))]
    assert _reduced("float16", PREMUL_SUM, [x], factor=0.375)[0] == [float(np.float16(x * 0.375))]
    assert _reduced("int8", PREMUL_SUM, [50], [-1], factor=3)[0] == [3 * 50 - 3 - 256]
