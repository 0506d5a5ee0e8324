"""The NCCL backend follows NCCL's rules for threads and memory, which the simulated NCCL checks."""

from __future__ import annotations

import pytest

from tests.nccl import nccl_thread_jobs as jobs
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.worker import enter, leave


def test_threads_with_their_own_groups_use_nccl_one_at_a_time() -> None:
    with SimulatedJob(2) as job:
        job.call(enter)
        job.results()
        job.call(jobs.two_groups_on_two_threads)
        assert job.results(60) == [[[8.0, 8.0]] * 2] * 2
        job.call(leave)
        assert job.results() == [[]] * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("version", [22807, 23007])
def test_no_thread_is_in_nccl_when_a_group_is_aborted(version: int) -> None:
    """From 2.28.7 on, which has ncclCommRevoke; an older one is aborted while the thread is in it."""
    with SimulatedJob(2, version=version) as job:
        job.call(enter)
        job.results()
        job.call(jobs.stuck_in_a_first_operation)
        for said in job.results(60):
            assert "timed out after 1 s" in said
        job.call(leave)
        assert job.results(60) == [[]] * 2


def test_a_group_is_not_destroyed_during_a_sweep() -> None:
    with SimulatedJob(2) as job:
        job.call(enter)
        job.results()
        job.call(jobs.closed_during_a_sweep)
        assert job.results(60) == [[]] * 2


@pytest.mark.every(2)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_that_nccl_reports_first_names_the_rank(victim: int) -> None:
    with SimulatedJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.reported_by_nccl_first, victim)
        for outcome in job.collect(30, [r for r in range(3) if r != victim]):
            assert outcome.failure is None, outcome.failure
            assert outcome.value.startswith("RankLostError")
            assert f"rank {victim} " in outcome.value


def test_symmetric_memory_outlives_the_work_with_it() -> None:
    with SimulatedJob(2) as job:
        job.call(enter)
        job.results()
        job.call(jobs.drop_symmetric_memory)
        assert job.results(60) == [[]] * 2
        job.call(leave)
        assert job.results() == [[]] * 2
