"""Symmetric memory in groups of the backend mpi: that of gloo beside it, each call compared by MPI's agreement."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.gloo import symmetric_jobs as jobs
from tests.gloo.test_symmetric import (
    DIRECT,
    KINDS,
    gradient_buckets,
    test_a_group_of_one_rank,  # noqa: F401
    test_arrays_survive_their_group,  # noqa: F401
    test_callbacks_may_call_collectives_during_an_allocation,  # noqa: F401
    test_calls_in_the_background,  # noqa: F401
    test_memory_lasts_as_long_as_its_views,  # noqa: F401
    test_ranks_that_ask_for_different_sizes_are_named,  # noqa: F401
    test_too_much_memory_raises_on_all_ranks,  # noqa: F401
    test_views_of_the_other_ranks_arrays,  # noqa: F401
)
from tests.mpi import small_array_jobs
from tests.mpi.mpi_ranks import MpiJob, library, unavailable_reason
from tests.mpi.victims import check_victim_is_named
from tests.support.ranks import Pool, pools
from tests.support.worker import enter
from unicoll.calls.ops import OPS

if unavailable_reason():
    pytest.skip(unavailable_reason(), allow_module_level=True)

Pools = Callable[[int], Pool]
_Job = partial(MpiJob, backend="mpi", env={"UNICOLL_TRANSPORT": "auto"})


@pytest.fixture(scope="module")
def pool() -> Iterator[Pools]:
    with pools(partial(_Job, warm_up=True)) as made:
        yield made


@pytest.mark.every(n=2)
@pytest.mark.sampled("name", "kind", 2)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", jobs.OPERATIONS)
@pytest.mark.parametrize("size", [2, 3])
def test_results_are_the_same_bytes_without_the_slots(
    size: int, name: str, kind: tuple[str, str], pool: Pools
) -> None:
    dtype, reduction = kind
    if reduction in OPS[name].refuses:
        reduction = "SUM"
    count = 1_300_011 if dtype == "uint8" else 650_011
    taken = pool(size).run(jobs.equal_results, name, count, dtype, reduction, 1, True, None)
    assert taken == [[DIRECT[name]]] * size


@pytest.mark.parametrize("name", jobs.OPERATIONS)
def test_one_rank_with_ordinary_arrays(name: str, pool: Pools) -> None:
    taken = pool(3).run(jobs.equal_results, name, 600_011, "float32", "SUM", 0, True, 1)
    # only the root's list counts in a scatter
    assert taken == [["scatter"] if name == "scatter" else []] * 3


@pytest.mark.parametrize("count", [1, 400, 4000])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "scatter", "all_to_all_single"])
def test_small_arrays(name: str, count: int, pool: Pools) -> None:
    assert pool(3).run(jobs.equal_results, name, count, "int32", "SUM", 1, False, None) == [[]] * 3


def test_gradient_buckets(pool: Pools) -> None:
    pool(2).run(gradient_buckets, False)


# --- no shared memory -----------------------------------------------------------------------------------------------


def test_ranks_on_several_hosts() -> None:
    with _Job(2, prepare=(small_array_jobs.pretend_own_host, library().rank)) as job:
        job.call(enter)
        job.results()
        job.call(small_array_jobs.no_symmetric_memory)
        for texts in job.results():
            for name, text in zip(("symmetric_empty", "peer_view"), texts, strict=True):
                assert text.startswith(f"BackendUnavailableError: {name}: ")
                assert "the ranks of group 'world' are on node0, node1" in text


def test_shared_memory_that_is_switched_off() -> None:
    with MpiJob(2, backend="mpi", env={"UNICOLL_TRANSPORT": "tcp"}) as job:
        job.call(enter)
        job.results()
        job.call(small_array_jobs.no_symmetric_memory)
        for allocation, view in job.results():
            assert (
                "symmetric_empty(float32[10]): no shared memory for host arrays: unicoll (gloo) over sockets"
                in allocation
            )
            assert "shares no memory with rank" in view


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["operation", "allocation"])
def test_another_call_on_one_rank_is_named(how: str) -> None:
    with _Job(3) as job:
        job.call(enter)
        job.results()
        job.call(small_array_jobs.another_symmetric_call, how)
        texts = job.results()
    assert len(set(texts)) == 1
    assert "all_reduce(float32[200000]" in texts[0]
    assert {"operation": "broadcast(float32[200000]", "allocation": "symmetric_empty"}[how] in texts[0]


@pytest.mark.every(n=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_killed_or_stopped_in_the_middle_is_named(number: signal.Signals) -> None:
    start = partial(_Job, recover=True, warm_up=True)
    # all calls before the rank stops have to end within the timeout
    timeout = 60.0 if number == signal.SIGKILL else 5.0
    env = {"UNICOLL_TRANSPORT": "auto"}
    check_victim_is_named(number, small_array_jobs.symmetric_loop, timeout, start=start, env=env)
