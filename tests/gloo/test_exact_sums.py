"""ExactSum: the same bits, however the arrays are spread over the ranks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import unicoll as dist
from tests.support.on_ranks import on_ranks
from tests.support.other_arrays import KINDS, Exported
from tests.support.ranks import run_ranks
from unicoll.arrays.kernels import kernel_for
from unicoll.arrays.types import BY_NAME, ReduceOp

MICRO_BATCHES = 8
COUNT = 5003
DTYPES = ("float16", "float32", "float64", "complex64")


def gradient(number: int, dtype: str) -> Any:
    """Numbers of very different magnitudes; some sums do not fit into two float64 numbers."""
    rng = np.random.default_rng(number)
    spread = 4 if dtype == "float16" else 35
    found = rng.standard_normal(COUNT) * 10.0 ** rng.integers(-spread, spread, COUNT)
    found[:3] = [[np.inf, np.nan, -np.inf][number % 3], -0.0, 1.7e308 * (-1) ** number]
    with np.errstate(all="ignore"):
        return (found + (1j * found[::-1] if dtype.startswith("complex") else 0)).astype(dtype)


def digests(spread: str) -> list[str]:
    """Digests of the sums of all micro-batches, of which each rank has some."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in DTYPES:
        total = dist.ExactSum(np.empty(COUNT, dtype))
        for number in np.random.default_rng(rank).permutation(MICRO_BATCHES):
            if {"in turn": number % size, "blocks": number * size // MICRO_BATCHES, "last": size - 1}[
                spread
            ] == rank:
                total.add(gradient(int(number), dtype))
        total.all_reduce()
        found.append(hashlib.sha256(total.result().tobytes()).hexdigest())
    return found


def test_the_bits_do_not_depend_on_the_number_of_ranks_nor_on_who_adds_what() -> None:
    expected = []
    with np.errstate(all="ignore"):
        for dtype in DTYPES:
            out = np.empty(COUNT, dtype)
            parts = [gradient(i, dtype) for i in range(MICRO_BATCHES)]
            kernel_for(BY_NAME[dtype], ReduceOp.EXACT_SUM).combine(parts, out)
            expected.append(hashlib.sha256(out.tobytes()).hexdigest())
    for size, spread in ((1, "last"), (2, "in turn"), (3, "blocks"), (4, "last"), (8, "in turn")):
        assert run_ranks(size, digests, spread) == [expected] * size, (size, spread)


@on_ranks(2)
def test_lists_and_dicts_of_arrays() -> None:
    rank = dist.get_rank()
    like = [np.zeros((2, 3)), np.zeros(()), np.zeros((4, 4)).T[:2]]
    total = dist.ExactSum(like)
    for factor in (2.0**60, 1.0, -(2.0**60)):
        total.add([np.full(array.shape, factor + rank) for array in like])
    own = total.result()
    assert [array.shape for array in own] == [(2, 3), (), (2, 4)]
    total.all_reduce()
    assert [set(array.ravel().tolist()) for array in total.result(like)] == [{3.0}] * 3
    assert like[2].tolist() == [[3.0] * 4] * 2
    for call in (lambda: total.add(like), total.all_reduce):
        with pytest.raises(dist.DistArgumentError, match=r"reset\(\) begins another one"):
            call()
    total.reset()
    total.add(like)
    assert total.result()[1] == 3
    names = ("a", "b") if rank else ("b", "a")
    arrays = {name: np.full(2, ord(name), np.float32) for name in names}
    named = dist.ExactSum(arrays)
    named.add(dict(reversed(arrays.items())))
    named.all_reduce(dist.group.WORLD, timeout=20)
    assert {name: array.tolist() for name, array in named.result().items()} == {
        name: [2 * ord(name)] * 2 for name in names
    }


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_other_arrays(kind: str) -> None:
    made = KINDS[kind]
    total = dist.ExactSum({"a": made(np.zeros((2, 2), np.float32))})
    for number in (2.0**60, 1.0, -(2.0**60)):
        total.add({"a": made(np.full((2, 2), number, np.float32))})
    total.all_reduce()
    result = total.result()["a"]
    assert (type(result), result.dtype, result.tolist()) == (np.ndarray, np.float32, [[2.0] * 2] * 2)
    out = np.zeros((2, 2), np.float32)
    total.result({"a": made(out)})
    assert out.tolist() == [[2.0] * 2] * 2
    strided = dist.ExactSum(made(np.ones((2, 3)).T))
    strided.add(np.ones((3, 2)))
    assert strided.result().tolist() == [[1.0] * 2] * 3


@pytest.mark.torch
def test_a_type_that_numpy_lacks_needs_out() -> None:
    import torch

    total = dist.ExactSum(Exported(torch.ones(2).bfloat16()))
    total.add(torch.ones(2).bfloat16())
    with (
        mock.patch.dict(sys.modules, {"ml_dtypes": None}),
        pytest.raises(dist.DistTypeError, match=r"ExactSum.result: NumPy has no bfloat16: .* out="),
    ):
        total.result()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    result = total.result()
    assert result.dtype == ml_dtypes.bfloat16
    assert result.tolist() == [1.0, 1.0]
    out = torch.zeros(2).bfloat16()
    total.result(Exported(out))
    assert out.tolist() == [1.0, 1.0]


@pytest.mark.torch
@on_ranks(2)
def test_tensors() -> None:
    import torch

    total = dist.ExactSum(torch.empty(3, dtype=torch.bfloat16))
    for number in (1.0, 2.0**-20, -1.0):
        total.add(torch.full((3,), number, dtype=torch.bfloat16))
    total.all_reduce()
    found = total.result()
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [2.0**-19] * 3


def _other_shapes() -> None:
    dist.ExactSum(np.ones(3)).add(np.ones(4))


def _other_type() -> None:
    dist.ExactSum(np.ones(3)).add(np.ones(3, np.float32))


def _integers() -> None:
    dist.ExactSum(np.ones(3, np.int32))


def _two_types() -> None:
    dist.ExactSum([np.ones(3), np.ones(3, np.float32)])


def _nothing() -> None:
    dist.ExactSum([])


def _other_names() -> None:
    dist.ExactSum({"a": np.ones(3)}).add({"b": np.ones(3)})


def _no_dict() -> None:
    dist.ExactSum({"a": np.ones(3)}).result(np.ones(3))


def _read_only() -> None:
    dist.ExactSum(np.ones(3)).result(np.broadcast_to(0.0, 3))


def _different_arrays() -> None:
    dist.ExactSum(np.ones(3 + dist.get_rank())).all_reduce()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_other_shapes, r"ExactSum.add: got float64\[4\], expected float64\[3\]"),
        (_other_type, r"ExactSum.add: got float32\[3\], expected float64\[3\]"),
        (_integers, "expected arrays of one floating-point type, not float8, got int32"),
        (_two_types, "got float64, float32"),
        (_nothing, "no arrays given"),
        (_other_names, r"ExactSum.add: expected a dict of \['a'\], got \['b'\]"),
        (_no_dict, r"ExactSum.result: expected a dict of \['a'\], got ndarray"),
        (_read_only, "read-only"),
        (
            _different_arrays,
            "ranks 0 and 1 of group 'world' have different arrays: 3 numbers of float64, 4 numbers of",
        ),
    ],
)
@on_ranks(2)
def test_bad_arguments(call: Callable[[], None], words: str) -> None:
    with pytest.raises((dist.DistArgumentError, dist.DistTypeError), match=words):
        call()
    dist.barrier()
