"""The NCCL backend and NCCL's rules for threads and memory, which the simulated one holds it to."""

from __future__ import annotations

import nccl_thread_jobs as jobs
import pytest
from simulated_ranks import SimulatedJob

from unicoll.testing.worker import enter


def test_a_group_is_not_given_back_while_its_watchdog_looks() -> None:
    with SimulatedJob(2, strict_threads=True) as job:
        job.call(enter)
        job.results()
        job.call(jobs.closed_while_looked_at)
        assert job.results(60) == [[]] * 2


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_that_nccl_learns_of_first_names_the_rank(victim: int) -> None:
    with SimulatedJob(3) as job:
        job.call(enter)
        job.results()
        job.call(jobs.missed_by_nccl_first, victim)
        for outcome in job.collect(30, [r for r in range(3) if r != victim]):
            assert outcome.failure is None, outcome.failure
            assert outcome.value.startswith("RankLostError")
            assert f"rank {victim} " in outcome.value
