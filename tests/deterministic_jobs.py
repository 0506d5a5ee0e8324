"""What ranks do in the tests of deterministic reductions."""

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
    """Numbers whose sum depends on the order: of very different sizes. A longer array begins as a shorter one."""
    return _numbers(rank)[:count].astype(dtype)


@cache
def _numbers(rank: int) -> Any:
    rng = np.random.default_rng(rank)
    return rng.standard_normal(max(COUNTS)) * 10.0 ** rng.integers(-3, 4, max(COUNTS))


def digests(deterministic: bool | None, late: float = 0.0) -> dict[str, str]:
    """What reductions of several sizes give, as digests; for each rank the same where it gets the same."""
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
            for count in COUNTS[:-1]:  # an element's bits do not depend on how many others travel with it
                same = whole[max(COUNTS)][:count]
                np.testing.assert_array_equal(whole[count].view(np.uint8), same.view(np.uint8))
            found[f"{dtype} {op}"] = hashlib.sha256(whole[max(COUNTS)].tobytes()).hexdigest()
    return found


def explained() -> str:
    """How a deterministic group moves its data."""
    group = dist.new_group(pg_options=dist.Options(deterministic=True))
    dist.barrier(group)
    return str(group.describe())


def options_differ() -> None:
    """A group for which one rank wants what the others do not."""
    group = dist.new_group(pg_options={"deterministic": dist.get_rank() == 1})
    dist.all_reduce(np.ones(3), group=group)


def unknown_option() -> None:
    """A group with an option that there is not."""
    dist.new_group(pg_options={"determinstic": True})
