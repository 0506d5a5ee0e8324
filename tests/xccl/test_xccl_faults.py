"""Failures of ranks of the backend xccl: oneCCL neither notices nor ends a call that waits for a rank that is gone."""

from __future__ import annotations

import gc
import signal
import time
import weakref
from functools import partial

import numpy as np
import pytest

import unicoll as dist
from tests.faults import fault_jobs as jobs
from tests.faults.test_faults import survivors_of
from tests.support.calls import invoke
from tests.support.outcomes import CallOutcome, failures_of, outcome_of, values_of
from tests.support.ranks import joined
from tests.support.worker import end
from tests.xccl.xccl_ranks import XcclJob, unavailable_reason

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"])
def test_a_killed_rank_is_named_and_the_others_exit(name: str, victim: int) -> None:
    with joined(3, start=XcclJob) as job:
        survivors = survivors_of(job, victim, name)
        job.call(end, ranks=survivors)  # a thread of rank 1 is in oneCCL
        assert job.wait_for_exit(20, survivors) == [0, 0]


def test_survivors_make_a_smaller_group() -> None:
    with joined(4, start=XcclJob) as job:
        job.call(jobs.call_on, 1, "all_reduce")
        job.await_notes()
        job.collect(30, [0, 2, 3])
        job.signal(2, signal.SIGKILL)
        failures_of(job, [1], "RankLostError")
        job.call(jobs.shrink_smallest, 2, ranks=[0, 1, 3])
        assert values_of(job, [0, 1, 3]) == [
            {"size": 3, "sum": 4.0, "received": before} for before in (3, 0, 1)
        ]


def call_differently(name: str, odd_name: str, count: int, timeout: float) -> CallOutcome:
    """Rank 2 makes another call, or computes for a while."""
    if dist.get_rank() == 2 and not odd_name:
        return outcome_of(partial(time.sleep, 2 * timeout))
    name, count = (odd_name, count) if dist.get_rank() == 2 else (name, 4)
    return outcome_of(partial(invoke, name, count=count, timeout=timeout))


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    with joined(3, start=XcclJob) as job:
        job.call(call_differently, "all_reduce", "", 0, 3.0)
        for failure, _ in values_of(job, [0, 1]):
            assert failure.type == "OperationTimeoutError", failure.traceback
            for words in ("arrived: ranks 0, 1", "missing: rank 2", "not in a collective of this group"):
                assert words in failure.message


def keep_no_reference() -> bool:
    """True if an array that oneCCL may still write to is kept after the deadline."""
    x = np.ones(4)
    kept = weakref.ref(x)
    if dist.get_rank() == 0:
        with pytest.raises(dist.OperationTimeoutError):
            dist.all_reduce(x, timeout=0.5)
    del x
    dist.destroy_process_group()
    gc.collect()
    return kept() is not None


def test_memory_that_oneccl_may_write_to_is_kept_after_the_deadline() -> None:
    with joined(2, start=XcclJob) as job:
        job.call(keep_no_reference, ranks=[0])
        assert values_of(job, [0]) == [True]


def test_calls_that_differ_are_named() -> None:
    with joined(3, start=XcclJob) as job:
        job.call(call_differently, "all_reduce", "broadcast", 4, 60.0)
        for failure, _ in values_of(job, range(3)):
            assert failure.type == "CollectiveMismatchError", failure.traceback
            for words in ("all_reduce(float32[4], SUM)", "broadcast(float32[4], root=0)"):
                assert words in failure.message
