"""The NCCL backend on a simulated device, beyond the conformance suite: streams, lifetimes, failures, groups,
refusals."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support.ranks import Pool, joined, pools
from tests.support.worker import leave

POLICIES = ("oldest", "newest")


@pytest.fixture(scope="module", params=POLICIES)
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy=request.param)) as made:
        yield made


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_host_arrays_objects_and_barriers_use_another_backend(backend: str) -> None:
    for found in run(2, jobs.mixed, backend=backend):
        assert isinstance(found, dict)
        assert found["device"] == [3.0] * 4
        assert found["host"] == [3.0] * 3
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["backend"] == backend
        assert "cuda:nccl" in found["config"]
        assert "NCCL 2.30.7 (simulated/libnccl.so.2) on cuda:" in found["explained"]


def test_a_group_of_nccl_alone_has_a_barrier_and_refuses_host_arrays(pool: Callable[[int], Pool]) -> None:
    for said in pool(2).run(jobs.alone):
        assert len(said) == 1
        assert "no backend of group" in said[0]
        assert "serves cpu arrays" in said[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_arrays_may_be_dropped_in_flight(size: int, pool: Callable[[int], Pool]) -> None:
    assert pool(size).run(jobs.asynchronous, 20) == [[True] * 20] * size


def test_nothing_asynchronous_blocks_the_host(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(jobs.not_blocking):
        assert found == {"early": False, "late": True, "blocked": [], "value": [8.0] * 8}


@pytest.mark.parametrize("async_op", [False, True])
def test_strided_results_are_written_back(async_op: bool, pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(jobs.strided, async_op)
    assert first == [3.0, 1.0] * 5
    assert second == [3.0, 2.0] * 5


def test_messages(pool: Callable[[int], Pool]) -> None:
    for me, found in enumerate(pool(2).run(jobs.messages)):
        assert found["first"] == [1 - me] * 5
        assert found["source"] == 1 - me
        assert found["second"] == [1 - me]
        assert found["again"] == [2]
        assert found["own"] == [10 + me] * 3
        no_tags, no_any, *others, alone, twice, size = found["refused"]
        assert "NCCL has no tags" in no_tags
        assert "cannot receive from any rank" in no_any
        for text, what in zip(others, ("tag=None", "status"), strict=True):
            assert f"backend nccl does not support {what}" in text
        assert "backend nccl supports messages to oneself only in a batch with their receives" in alone
        for text in (twice, size):
            assert (
                "batch_isend_irecv: messages to oneself and their receives differ: sent is int32[3]" in text
            )


def test_a_communicator_may_be_non_blocking(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.not_waiting_within_nccl) == [[8.0] * 3] * 2


def test_non_blocking_communicators_are_split_and_shrunk() -> None:
    assert run(3, jobs.split_and_shrunk_without_waiting) == [[[4.0]], [[5.0]], [[4.0], [5.0]]]


def test_a_part_outlives_the_group_that_it_was_split_from() -> None:
    assert run(2, jobs.part_of_a_destroyed_group) == [[2.0]] * 2


def test_coalesced_operations_are_one(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(jobs.coalesced):
        assert found == [[1.0 + 2 * i] * (3 + i) for i in range(4)]


def test_groups_are_split_from_one_that_has_connected() -> None:
    found = run(4, jobs.split_groups, backend="nccl", bound=True)
    for me, each in enumerate(found):
        assert isinstance(each, dict)
        assert each["evens"] == [2.0 if me % 2 == 0 else me] * 2
        assert each["halves"] == [1.0 if me < 2 else 5.0] * 2
        assert each["colors"] == [0 if me % 2 == 0 else None, 0 if me < 2 else 2]


def test_two_ranks_on_one_device_are_refused() -> None:
    for said, values in run(2, jobs.on_devices_of_their_own_after_all):
        assert "on the same device" in said
        assert values == [2.0, 2.0]
    for said in run(2, jobs.shared_device, devices="shared"):
        assert isinstance(said, str)
        assert "rank 0 (pid " in said
        assert "rank 1 (pid " in said
        assert "on the same device" in said


def test_several_ranks_may_share_a_device_on_request() -> None:
    said = run(2, jobs.shared_device, devices="shared", env={"UNICOLL_NCCL_SHARE_DEVICE": "1"})
    assert said == ["accepted", "accepted"]


def test_an_array_on_another_device_is_refused(pool: Callable[[int], Pool]) -> None:
    for me, said in enumerate(pool(2).run(jobs.other_device)):
        assert f"the array is on cuda:{1 - me}" in said
        assert f"bound to cuda:{me}" in said


def test_the_current_device_may_be_another(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.from_another_device) == [[[4.0, 4.0], 1], [[4.0, 4.0], 0]]


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_a_deadline_names_the_missing_ranks_and_fails_the_group_on_all(backend: str) -> None:
    with joined(3, SimulatedJob, backend=backend) as job:
        job.call(jobs.miss, 1)
        first, late, third = job.results(60)
        for errors in (first, third):
            assert len(errors) == 2
            for error in errors:
                assert (
                    "OperationTimeoutError: all_reduce(float64[2] on cuda" in error
                    or "missing: rank 1" in error
                )
                assert "timed out after 1 s" in error
                assert "missing: rank 1" in error
        assert "missing: rank 1" in late[0]
        job.call(leave)
        assert job.results() == [[]] * 3


def test_a_deadline_names_calls_that_differ() -> None:
    for said in run(2, jobs.differ):
        assert isinstance(said, str)
        assert "timed out after 1 s" in said
        assert "the calls differ: rank " in said


@pytest.mark.every(2)
@pytest.mark.parametrize("join", ["tcp", "file"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_others_continue(victim: int, join: str) -> None:
    with joined(3, SimulatedJob, join=join) as job:
        job.call(jobs.wait_for_the_dead, victim)
        job.await_notes()
        job.signal(victim, signal.SIGKILL)
        others = [r for r in range(3) if r != victim]
        for outcome in job.collect(30, others):
            assert outcome.failure is None, outcome.failure
            assert f"rank {victim} " in outcome.value
            assert f"pid {job.pids[victim]}" in outcome.value
        job.call(jobs.shrink, victim, ranks=others)
        for outcome in job.collect(30, others):
            assert outcome.failure is None, outcome.failure
            assert outcome.value == {"size": 2, "x": [6.0 - (victim + 1)] * 2, "host": [2.0]}
        job.call(leave, ranks=others)
        assert [o.value for o in job.collect(30, others)] == [[], []]


@pytest.mark.every(2)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("version", [21805, 22705, 23007])
def test_survivors_shrink_with_every_version(version: int, victim: int) -> None:
    others = [r for r in range(3) if r != victim]
    with joined(3, SimulatedJob, version=version, join="tcp") as job:
        job.call(jobs.wait_for_the_dead, victim)
        job.await_notes()
        job.signal(victim, signal.SIGKILL)
        assert [o.failure for o in job.collect(30, others)] == [None, None]
        job.call(jobs.shrink, victim, ranks=others)
        for outcome in job.collect(30, others):
            assert outcome.failure is None, outcome.failure
            assert outcome.value == {"size": 2, "x": [6.0 - (victim + 1)] * 2, "host": [2.0]}


@pytest.mark.every(2)
@pytest.mark.parametrize(("code", "word"), [(6, "ncclRemoteError"), (2, "ncclSystemError")])
def test_an_asynchronous_error_of_nccl_fails_the_group_on_all_ranks(code: int, word: str) -> None:
    for said in run(2, jobs.sudden_error, code):
        assert isinstance(said, str)
        assert word in said


def test_operations_are_recorded_into_graphs(pool: Callable[[int], Pool]) -> None:
    for found in pool(2).run(jobs.captured):
        assert "do one before capturing" in found["first"]
        assert found["x"] == [4.0] * 4
        assert found["y"] == [6.0] * 4


def test_futures_and_callbacks_are_completed(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.told_of_the_end) == [[True, True, [2.0, 2.0]]] * 2


def test_symmetric_memory(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.symmetric) == [[(2, 3), "<f4", True, [2.0]]] * 2


def test_old_nccl_has_no_symmetric_memory() -> None:
    with pytest.raises(Exception, match=r"windows need NCCL 2\.27; this is 2\.18\.5"):
        run(2, jobs.symmetric, version=21805)


@pytest.mark.parametrize(("size", "average"), [(1, 1.0), (2, 1.5)])
def test_float8_is_averaged_by_one_rank_and_by_several(
    size: int, average: float, pool: Callable[[int], Pool]
) -> None:
    """NCCL refuses the average of float8 in a group of one rank."""
    pytest.importorskip("ml_dtypes")
    assert pool(size).run(jobs.average_of_float8)[0] == [average]


def test_float8_is_reduced_if_the_devices_of_all_members_can() -> None:
    pytest.importorskip("ml_dtypes")
    capabilities = ((9, 0), (10, 0), (8, 0))
    found = run(3, jobs.float8_on_different_devices, backend="nccl", bound=True, capabilities=capabilities)
    for rank, (said, same, values) in enumerate(found):
        assert "reduces float8_e5m2 on devices of compute capability 9.0 or later; that of rank 2 (" in said
        assert said.endswith(" has 8.0")
        assert same
        assert values == [2.0 if rank < 2 else 1.0] * 2


@pytest.mark.parametrize("version", [22809, 22907])
def test_one_rank_multiplies_all_elements_by_a_factor(version: int) -> None:
    """Before 2.29.7 NCCL omits the last elements of some sizes."""
    assert run(1, jobs.scaled_on_one_rank, version=version) == [[]]
