"""The key under which the validation of a call is kept: calls of which one may be refused have different ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unicoll.arrays.buffer import Buffer
from unicoll.arrays.types import BY_NAME, CPU, Device, ReduceOp
from unicoll.calls.call import Call
from unicoll.calls.ops import OPS
from unicoll.group.validation_cache import kind_of


def buffer(
    dtype: str = "float32", shape: tuple[int, ...] = (2, 3), device: Device = CPU, writable: bool = True
) -> Buffer:
    return Buffer(None, BY_NAME[dtype], shape, None, writable, device=device, count=int(np.prod(shape)))


def key(form: str, op: str = "all_reduce", reduce: Any = ReduceOp.SUM, root: int = -1, **array: Any) -> Any:
    """The key of a call in place, with one input and output, or with two inputs."""
    made = buffer(**array)
    inputs = (made, buffer()) if form == "two inputs" else (made,)
    outputs = inputs if form == "in place" else (made,)
    return kind_of(Call(OPS[op], inputs, outputs, 1.0, reduce, root))


CUDA = Device("cuda", 0)


@pytest.mark.parametrize("form", ["in place", "one input", "two inputs"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"op": "all_reduce"}, {"op": "broadcast"}),
        ({"dtype": "float32"}, {"dtype": "int32"}),
        ({"shape": (2, 3)}, {"shape": (3, 2)}),
        ({"device": CPU}, {"device": CUDA}),
        ({"device": CUDA}, {"device": Device("cuda", 1)}),
        ({"device": CUDA}, {"device": Device("xpu", 0)}),
        ({"writable": True}, {"writable": False}),
        ({"reduce": ReduceOp.SUM}, {"reduce": ReduceOp.MAX}),
        ({"root": 0}, {"root": 1}),
    ],
)
def test_calls_of_different_kinds_have_different_keys(form: str, one: Any, other: Any) -> None:
    assert key(form, **one) == key(form, **one)
    assert key(form, **one) != key(form, **other)


def test_split_sizes_are_in_the_key() -> None:
    def split(*counts: tuple[int, ...] | None) -> Any:
        call = Call(OPS["all_to_all_single"], (buffer(),), (buffer(),), 1.0)
        call.in_counts, call.out_counts = counts
        return kind_of(call)

    assert len({split(None, None), split((1, 1), None), split(None, (1, 1)), split((2, 0), (1, 1))}) == 4
