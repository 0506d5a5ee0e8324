"""Many processes on one machine. Times are printed, not asserted; a timeout detects hangs."""

from __future__ import annotations

import time

import numpy as np
import pytest

import unicoll as dist
from tests.support.ranks import ProcessJob, end_cleanly
from tests.support.worker import enter


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


# --- tests ------------------------------------------------------------------------------------------

_BOUND_S = 60.0


@pytest.mark.every(n=0)
def test_64_processes_initialise_and_reduce() -> None:
    with ProcessJob(64, join="tcp") as job:
        job.call(ready)  # the interpreters have started
        job.results(_BOUND_S)
        began = time.monotonic()
        job.call(enter)
        outcomes = job.collect(_BOUND_S, fail_fast=True)
        assert not any(o.failure for o in outcomes), job.report()
        print(f"64 ranks joined within {max(o.at for o in outcomes) - began:.1f} s")
        job.call(reduce_all)
        times = job.results(_BOUND_S)
        print(f"three all_reduces and a barrier, the first ever: {max(times):.2f} s")
        end_cleanly(job)
