"""Jobs of the tests of deterministic reductions."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from typing import Any

import numpy as np

import unicoll as dist

COUNTS = (37, 20_011, 150_011)
DTYPES = ("float16", "float32", "float64", "complex64")


def contribution(rank: int, count: int, dtype: str) -> Any:
    """Numbers of very different magnitudes: their sum depends on the order. Shorter arrays are prefixes of longer."""
    return _numbers(rank)[:count].astype(dtype)


@cache
def _numbers(rank: int) -> Any:
    rng = np.random.default_rng(rank)
    return rng.standard_normal(max(COUNTS)) * 10.0 ** rng.integers(-3, 4, max(COUNTS))


def digests(deterministic: bool | None, late: float = 0.0) -> dict[str, str]:
    """Digests of the results of reductions of several sizes; equal on all ranks."""
    options = None if deterministic is None else {"deterministic": deterministic}
    group = dist.new_group(pg_options=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for dtype in DTYPES:
        for op in ("SUM", "AVG", "PRODUCT") if dtype == "float32" else ("SUM",):
            whole = {}
            for count in COUNTS:
                time.sleep(late * (rank == count % size))
                x = contribution(rank, count, dtype)
                dist.all_reduce(x, op=op, group=group)
                whole[count] = x
                y = contribution(rank, count, dtype)
                dist.reduce(y, 1, op=op, group=group)
                if rank == 1:
                    np.testing.assert_array_equal(y.view(np.uint8), x.view(np.uint8))
                z = np.zeros(count, dtype)
                inputs = [contribution(rank, count, dtype) for _ in range(size)]
                dist.reduce_scatter(z, inputs, op=op, group=group)
                np.testing.assert_array_equal(z.view(np.uint8), x.view(np.uint8))
            for count in COUNTS[:-1]:  # an element's bits do not depend on the size of its array
                same = whole[max(COUNTS)][:count]
                np.testing.assert_array_equal(whole[count].view(np.uint8), same.view(np.uint8))
            found[f"{dtype} {op}"] = hashlib.sha256(whole[max(COUNTS)].tobytes()).hexdigest()
    return found


def explained() -> str:
    """The description of a deterministic group."""
    group = dist.new_group(pg_options=dist.Options(deterministic=True))
    dist.barrier(group)
    return str(group.describe())


def options_differ() -> None:
    """Create a group whose options differ on one rank."""
    group = dist.new_group(pg_options={"deterministic": dist.get_rank() == 1})
    dist.all_reduce(np.ones(3), group=group)


def unknown_option() -> None:
    """Create a group with an unknown option."""
    dist.new_group(pg_options={"determinstic": True})
