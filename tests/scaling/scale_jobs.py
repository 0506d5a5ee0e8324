"""Functions of the ranks in the tests with many ranks."""

from __future__ import annotations

import time

import numpy as np

import unicoll as dist


def ready() -> bool:
    return True


def reduce_all() -> float:
    """Run small and large all_reduces and a barrier; returns seconds."""
    start = time.monotonic()
    n = dist.get_world_size()
    for count in (1, 1000, 100_000):
        x = np.full(count, dist.get_rank(), np.int64)
        dist.all_reduce(x)
        assert (x == n * (n - 1) // 2).all()
    dist.barrier()
    return time.monotonic() - start
