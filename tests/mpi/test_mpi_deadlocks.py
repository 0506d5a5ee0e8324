"""Ranks that wait for each other in calls of MPI raise DeadlockError; others do not.

``UNICOLL_TEST_FULL=1`` makes 200 circles and 200 programs without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.faults import deadlock_jobs as jobs
from tests.faults.test_deadlocks import (
    test_a_message_that_the_other_rank_has_not_read_hides_no_circle,  # noqa: F401
    test_messages_to_and_fro_are_not_a_circle,  # noqa: F401
    test_sends_that_a_waiting_rank_reads_are_not_reported,  # noqa: F401
)
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.support.ranks import Pool, pools
from unicoll.testing import sampling

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

CIRCLES, PROGRAMS = (200, 200) if sampling.wants_full() else (4, 10)


@pytest.fixture(scope="module", params=["multiple", "serialized"])
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    """Jobs in which any thread calls MPI, and in which one thread makes all calls of it."""
    env = {"UNICOLL_MPI_THREAD_LEVEL": request.param}
    with pools(partial(MpiJob, backend="mpi", env=env, warm_up=True)) as made:
        yield made


@pytest.mark.every(n=2)
def test_every_rank_of_a_circle_names_it(pool: Callable[[int], Pool], seed: int) -> None:
    for i in range(CIRCLES):
        found = pool(4).run(jobs.circle, f"{seed} {i}", jobs.CALLS_OF_MPI)
        circle = found[0]["circle"]
        for rank in found[0]["stuck"]:
            failure = found[rank]["failure"]
            assert failure is not None, f"circle {i}: rank {rank} did not fail: {found}"
            assert failure.type == "DeadlockError", failure.traceback
            assert failure.message.startswith(f"deadlock: {len(circle)} ranks wait for each other")
        assert all(o["failure"] is None for rank, o in enumerate(found) if rank not in found[0]["stuck"])
        pool(4).run(jobs.end_groups)


@pytest.mark.every(n=2)
def test_programs_without_a_circle_are_not_reported(pool: Callable[[int], Pool], seed: int) -> None:
    for i in range(0, PROGRAMS, 10):
        seeds = [f"{seed} {i + j}" for j in range(10)]
        for failures in pool(4).run(jobs.programs, seeds, timeout=120):
            assert failures == [None] * 10
        pool(4).run(jobs.end_groups)
