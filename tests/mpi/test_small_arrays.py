"""Arrays that the agreement before each collective carries, so that no other collective of MPI follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.mpi import small_array_jobs as jobs
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.support.ranks import Pool, pools
from tests.support.worker import enter

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(MpiJob, backend="mpi", warm_up=True)) as made:
        yield made


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("fits", [True, False])
def test_the_agreement_carries_arrays_up_to_its_room(
    size: int, fits: bool, pool: Callable[[int], Pool]
) -> None:
    for found in pool(size).run(jobs.at_the_limit, fits):
        assert len(found) == 15
        assert {name for name, calls in found.items() if (calls == 0) != fits} == set()


@pytest.mark.parametrize("size", [2, 3])
def test_sizes_that_only_some_ranks_would_carry(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.of_several_sizes, 500) == [True] * size


def test_a_small_and_a_large_array_differ_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    for failure in pool(2).run(jobs.differ, 1000):
        assert failure is not None
        assert failure.type == "CollectiveMismatchError"
        assert "float64[1]" in failure.message
        assert "float64[1000]" in failure.message


def test_results_that_overflow_give_no_warnings(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.overflow) == [True] * 2


def test_one_thread_makes_all_calls_of_mpi() -> None:
    with MpiJob(2, backend="mpi", env={"UNICOLL_MPI_THREAD_LEVEL": "funneled"}) as job:
        job.call(enter)
        job.results()
        for fits in (True, False):
            job.call(jobs.at_the_limit, fits)
            assert [set(found.values()) == {0} for found in job.results()] == [fits] * 2
