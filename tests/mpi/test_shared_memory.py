"""Large host arrays of a group of the backend mpi on one host: through the shared memory of gloo, without MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.mpi import small_array_jobs as jobs
from tests.mpi.mpi_ranks import MpiJob, unavailable_reason
from tests.mpi.test_conformance_mpi import TestMPI as _OverMPI
from tests.support.ranks import Pool, pools
from tests.support.worker import enter

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

_AUTO = {"UNICOLL_TRANSPORT": "auto"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(MpiJob, backend="mpi", warm_up=True, env=_AUTO)) as made:
        yield made


@pytest.mark.every(n=3)
class TestMPIOnOneHost(_OverMPI):
    """The conformance suite with shared memory for large arrays."""

    sample = 5
    sizes = barrier_sizes = (2, 3)

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls) -> Iterator[Callable[[int], Pool]]:
        with pools(partial(MpiJob, backend="mpi", warm_up=True, env=_AUTO)) as made:
            yield made


@pytest.mark.parametrize("size", [2, 3])
def test_large_arrays_go_through_shared_memory(size: int, pool: Callable[[int], Pool]) -> None:
    for found in pool(size).run(jobs.mpi_calls, 60_000):
        assert set(found.values()) == {0}
    below = 2046  # elements of less than 16 KiB, a multiple of 2 and 3
    for found in pool(size).run(jobs.mpi_calls, below):
        assert 0 not in found.values()


def test_without_shared_memory_mpi_moves_large_arrays() -> None:
    with MpiJob(2, backend="mpi", env={"UNICOLL_TRANSPORT": "tcp"}) as job:
        job.call(enter)
        job.results()
        job.call(jobs.mpi_calls, 60_000)
        assert all(0 not in found.values() for found in job.results())
        job.call(jobs.explained)
        assert all(
            "no shared memory for host arrays: unicoll (gloo) over sockets" in text for text in job.results()
        )


@pytest.mark.parametrize("size", [2, 3])
def test_sizes_that_differ_between_ranks(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.of_several_sizes, 10_000) == [True] * size


def test_a_small_and_a_large_array_differ_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    for failure in pool(2).run(jobs.differ, 100_000):
        assert failure is not None
        assert failure.type == "CollectiveMismatchError"
        assert "float64[1]" in failure.message
        assert "float64[100000]" in failure.message


def test_one_thread_makes_all_calls_of_mpi() -> None:
    with MpiJob(2, backend="mpi", env={"UNICOLL_MPI_THREAD_LEVEL": "funneled"} | _AUTO) as job:
        job.call(enter)
        job.results()
        job.call(jobs.mpi_calls, 60_000)
        assert [set(found.values()) for found in job.results()] == [{0}] * 2


def test_explain_tells_which_arrays_it_is_used_for(pool: Callable[[int], Pool]) -> None:
    for text in pool(2).run(jobs.explained):
        assert "host arrays from 16 KiB in reductions, 256 KiB in other collectives, go through" in text
        assert "the shared memory of gloo;" in text
        assert (
            "go through the shared memory of gloo if the first of them finds that all ranks have it" in text
        )


def test_a_failure_of_the_shared_memory_fails_the_group_on_all_ranks(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(jobs.shared_memory_fails)
    assert [f.type if f else "" for f in first] == ["GroupAbortedError"] * 2
    assert [f.type if f else "" for f in second] == ["OSError", "GroupAbortedError"]
    for failure in (*first, second[1]):
        assert failure is not None
        assert "rank 1" in failure.message
        assert "OSError: injected" in failure.message
