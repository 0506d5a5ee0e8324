"""Jobs of the tests of MIN and MAX of floats with NaN and -0.0 on some ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

import unicoll as dist

OPS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")


def contributions(size: int, dtype: str, count: int, odd: float | None, where: Sequence[int]) -> list[Any]:
    """``size * count`` random elements of each rank, some of them 0.0, or ``odd`` on the ranks ``where``."""
    drawn = [np.random.default_rng(r).uniform(-4, 4, size * count).astype(dtype) for r in range(size)]
    for rank, x in enumerate(drawn):
        x[:: 7 + rank] = 0.0
        if odd is not None and rank in where:
            x[::7] = odd
    return drawn


def extremes(op: str, dtype: str, count: int, odd: float | None, where: Sequence[int]) -> list[str]:
    """Compare MIN and MAX bitwise with a reduction in rank order; returns the differences. All NaNs count as equal."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = contributions(size, dtype, count, odd, where)
    wrong = []
    for name, fold in (("MIN", np.minimum), ("MAX", np.maximum)):
        expected, got = reduce(fold, inputs), inputs[rank].copy()
        kind = getattr(dist.ReduceOp, name)
        if op == "all_reduce":
            dist.all_reduce(got, op=kind)
        elif op == "reduce":
            dist.reduce(got, 1, op=kind)
            if rank != 1:
                continue
        else:
            out = np.empty(count, dtype)
            if op == "reduce_scatter":
                dist.reduce_scatter(out, np.split(got, size), op=kind)
            else:
                dist.reduce_scatter_tensor(out, got, op=kind)
            got, expected = out, expected[rank * count : (rank + 1) * count]
        same = (got.view(f"V{got.itemsize}") == expected.view(f"V{got.itemsize}")) | (
            np.isnan(got) & np.isnan(expected)
        )
        if not same.all():
            i = int(np.flatnonzero(~same)[0])
            wrong.append(f"{op} {name}: element {i} is {got[i]!r}, expected {expected[i]!r}")
    return wrong
