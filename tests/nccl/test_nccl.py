"""The NCCL backend on a simulated device, beyond the conformance suite: streams, groups, failures, refusals."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.gpu import gpu_jobs
from tests.gpu.check import rank_jobs, streaming_jobs
from tests.nccl.nccl_jobs import backend_of, calling, connect, error_of, new_group
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support import worker
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import Pool, joined, pools
from tests.support.worker import enter, leave


@pytest.fixture(scope="module", params=["oldest", "newest"])
def pool(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy=request.param)) as made:
        yield made


# --- arrays, calls and streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@on_ranks(2, start=run, options=["backend"])
def test_host_arrays_objects_and_barriers_use_another_backend(backend: str) -> None:
    me = dist.get_rank()
    x, host = arrays.full(4, me + 1, np.float32), np.full(3, me + 1.0)
    dist.all_reduce(x)
    dist.all_reduce(host)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": me})
    dist.barrier()
    assert (x.numpy().tolist(), host.tolist()) == ([3.0] * 4, [3.0] * 3)
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert dist.get_backend() == backend
    assert "cuda:nccl" in dist.get_backend_config()
    assert "NCCL 2.30.7 (simulated/libnccl.so.2) on cuda:" in dist.explain()


@on_ranks(2)
def test_a_group_of_nccl_alone_has_a_barrier_and_refuses_host_arrays() -> None:
    group = new_group()
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    said = error_of(lambda: dist.all_reduce(np.ones(2), group=group))
    assert "no backend of group" in said
    assert "serves cpu arrays" in said


@on_ranks(3)
def test_exact_sums_of_device_arrays_go_through_the_host() -> None:
    for dtype, asynchronous in (("float32", False), ("float64", True)):
        x = arrays.full(4, (2.0**60, 1.0, -(2.0**60))[dist.get_rank()], dtype)
        work = dist.all_reduce(x, group=dist.group.WORLD.using(exact=True), async_op=asynchronous)
        if work is not None:
            work.wait()
        assert x.numpy().tolist() == [1.0] * 4
    group = new_group()  # of NCCL alone
    said = error_of(lambda: dist.all_reduce(x, group=group.using(exact=True)))
    assert "backend nccl does not reduce float64 by EXACT_SUM" in said


@pytest.mark.parametrize("policy", ["oldest", "newest"])
def test_no_call_blocks_the_host_and_graphs_replay_operations(policy: str) -> None:
    """By programs of the checks on a GPU."""
    with SimulatedJob(2, policy=policy) as job:
        for function in (rank_jobs.count_cuda_calls, enter):
            job.call(function)
            job.results()
        for program in (
            streaming_jobs.no_call_waits_for_the_device,
            streaming_jobs.wait_orders_and_synchronize_blocks,
            streaming_jobs.a_graph_of_a_blocking_call,
            streaming_jobs.a_graph_of_an_asynchronous_call,
            streaming_jobs.what_cannot_be_recorded_says_so,
        ):
            job.call(gpu_jobs.fails, program.__name__, None)
            assert job.results() == [None, None]
        job.call(leave)
        assert job.results() == [[], []]


@on_ranks(2)
def test_contiguous_and_other_lists_are_gathered_by_the_same_calls() -> None:
    """Rank 0's list is contiguous in memory, the others' are not."""
    me, n = dist.get_rank(), dist.get_world_size()
    whole = arrays.full(8 * n, -1.0)
    step = 4 if me == 0 else 8
    into = [whole[step * r : step * r + 4] for r in range(n)]
    for async_op in (False, True):
        work = dist.all_gather(into, arrays.full(4, float(me + async_op)), async_op=async_op)
        if work is not None:
            work.wait()
    assert [part.numpy().tolist() for part in into] == [[1.0] * 4, [2.0] * 4]


@on_ranks(2)
def test_messages() -> None:
    """A message to oneself in a batch, and refused calls."""
    me = dist.get_rank()
    other = 1 - me
    x, y = arrays.full(5, me, np.int32), arrays.empty(5, np.int32)
    own, mine = arrays.full(3, 10 + me, np.int32), arrays.empty(3, np.int32)
    ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
    ops += [dist.P2POp(dist.isend, own, me), dist.P2POp(dist.irecv, mine, me)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    differ = "batch_isend_irecv: messages to oneself and their receives differ: sent is int32[3]"
    for call, words in (
        (lambda: dist.send(x, dst=other, tag=3), "NCCL has no tags"),
        (lambda: dist.recv(y), "cannot receive from any rank"),
        (lambda: dist.recv(y, other, tag=None), "backend nccl does not support tag=None"),
        (lambda: dist.recv(y, other, status=dist.Status()), "backend nccl does not support status"),
        (
            lambda: dist.send(x, me),
            "backend nccl supports messages to oneself only in a batch with their receives",
        ),
        (lambda: dist.batch_isend_irecv([*ops, dist.P2POp(dist.isend, own, me)]), differ),
        (lambda: dist.batch_isend_irecv([ops[2], dist.P2POp(dist.irecv, y, me)]), differ),
    ):
        assert words in (said := error_of(call)), said
    connect()
    assert [*y.numpy(), *mine.numpy()] == [1 - me] * 5 + [10 + me] * 3


@on_ranks(2)
def test_futures_and_callbacks_are_completed() -> None:
    x = arrays.full(2, 1.0)
    called = threading.Event()
    work = dist.all_reduce(x, async_op=True)
    work.add_done_callback(called.set)
    (result,) = work.get_future().result(timeout=20)
    assert called.wait(60)
    assert result is x
    assert x.numpy().tolist() == [2.0, 2.0]


# --- devices ----------------------------------------------------------------------------------------------------------


@on_ranks(2, start=run)
def test_after_an_array_on_the_same_device_is_refused_a_device_each_works() -> None:
    said = ""
    for device in (0, dist.get_rank()):
        with arrays.device(device):
            x = arrays.full(2, 1.0)
            said = said or error_of(lambda x=x: dist.all_reduce(x))
    dist.all_reduce(x)
    assert "on the same device" in said
    assert x.numpy().tolist() == [2.0, 2.0]


@on_ranks(2, start=partial(run, devices="shared"))
def test_ranks_that_see_the_same_one_device_are_refused() -> None:
    said = error_of(connect)
    assert "rank 0 (pid " in said
    assert "rank 1 (pid " in said
    assert "on the same device" in said


@on_ranks(2, start=partial(run, devices="shared"), env={"UNICOLL_NCCL_SHARE_DEVICE": "1"})
def test_ranks_share_a_device_on_request() -> None:
    connect()


@on_ranks(2)
def test_an_array_on_another_device_is_refused() -> None:
    connect()
    me = dist.get_rank()
    said = error_of(lambda: dist.all_reduce(arrays.full(2, 1.0, on=1 - me)))
    assert said.startswith("DistArgumentError")
    assert f"the array is on cuda:{1 - me}" in said
    assert f"bound to cuda:{me}" in said


@pytest.mark.parametrize("handle", [0, 1, 2])
@on_ranks(2)
def test_default_streams_are_those_of_the_arrays_device(handle: int) -> None:
    """Calls while another device is current; the arrays are ordered by a default stream of the group's device."""
    me = dist.get_rank()
    with arrays.Stream(handle=handle):
        x = arrays.full(2, 1.0)
        with arrays.device(1 - me):
            dist.all_reduce(x)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            work.synchronize()
        assert x.numpy().tolist() == [4.0, 4.0]
        assert ranks.simulation().cuda.current_device() == me


# --- groups -----------------------------------------------------------------------------------------------------------


@on_ranks(3, start=run)
def test_non_blocking_communicators_are_split_and_shrunk() -> None:
    """Also a part for which NCCL returns success before it has made it, and one that outlives the group."""
    me = dist.get_rank()
    options = {"blocking": False}
    group = new_group(**options)
    x = arrays.full(3, 1.0)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    dist.all_reduce_coalesced([x, arrays.full(2, 1.0)], group=group)
    assert x.numpy().tolist() == [27.0] * 3
    part: Any = dist.split_group(group, [[0, 2]], pg_options=options)
    smaller: Any = group.shrink([0], pg_options=options) if me else None
    dist.destroy_process_group(group)
    sums = []
    for each in (part, smaller):
        if each is not None:
            y = arrays.full(1, me + 1.0)
            dist.all_reduce(y, group=each)
            sums.append(y.numpy().tolist())
            dist.destroy_process_group(each)
    assert sums == [[[4.0]], [[5.0]], [[4.0], [5.0]]][me]


@on_ranks(4, start=partial(run, backend="nccl", bound=True))
def test_groups_are_split_from_one_that_has_connected() -> None:
    """By the colors that NCCL gets; the position in the list is the rank."""
    me = dist.get_rank()
    colors: list[Any] = []
    with calling("comm_split", lambda comm, color, key, config: colors.append(color)):
        evens = dist.new_group([0, 2])
        halves = dist.split_group(split_ranks=[[1, 0], [2, 3]])
    x, y = arrays.full(2, me, np.float32), arrays.full(2, me, np.float32)
    if me % 2 == 0:
        dist.all_reduce(x, group=evens)
    gathered = arrays.full(4, -1, np.float32)
    dist.all_gather_into_tensor(gathered, y, group=halves)
    dist.all_reduce(y, group=halves)
    assert gathered.numpy().tolist() == ([1, 1, 0, 0] if me < 2 else [2, 2, 3, 3])
    assert x.numpy().tolist() == [[2.0, 1.0, 2.0, 3.0][me]] * 2
    assert y.numpy().tolist() == [[1.0, 1.0, 5.0, 5.0][me]] * 2
    assert colors == [[0, 0], [None, 0], [0, 2], [None, 2]][me]


# --- deadlines, deaths and errors of NCCL -----------------------------------------------------------------------------


@pytest.mark.every(n=2)
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
@on_ranks(3, start=run, options=["backend"])
def test_a_deadline_names_the_missing_ranks_and_fails_the_group_on_all(backend: str) -> None:
    connect()
    errors = []
    if dist.get_rank() == 1:
        await_true(lambda: backend_of().state.error)
    else:
        work = dist.all_reduce(arrays.full(2, 1.0), async_op=True, timeout=1.0)
        errors = [error_of(work.synchronize)]
        assert errors[0].startswith("OperationTimeoutError: all_reduce(float64[2]")
    errors.append(error_of(lambda: dist.all_reduce(arrays.full(2, 1.0))))
    for error in errors:
        assert "missing: rank 1" in error
        assert dist.get_rank() == 1 or "timed out after 1 s" in error


@on_ranks(2, start=run)
def test_a_deadline_names_calls_that_differ() -> None:
    """Rank 1 passes more elements than the others, which NCCL does not notice, and the deadline comes before the
    comparison."""
    connect()
    backend_of().compare = lambda calls: None  # type: ignore[method-assign]
    x = arrays.full(3 if dist.get_rank() == 1 else 2, 1.0)
    work = dist.all_reduce(x, async_op=True, timeout=1.0)
    said = error_of(work.synchronize)
    ranks.nccl().machine.mismatches.clear()
    assert "timed out after 1 s" in said
    assert "the calls differ: rank " in said


def wait_for_the_dead(victim: int) -> str:
    """An all_reduce that the victim, which is killed meanwhile, never calls."""
    connect()
    worker.send_note("connected")
    if dist.get_rank() == victim:
        threading.Event().wait()
    return error_of(lambda: dist.all_reduce(arrays.full(2, 1.0), async_op=True).synchronize())


def shrink(victim: int) -> list[Any]:
    """After a death: the group of the remaining ranks, and its results."""
    world: Any = dist.group.WORLD
    group = world.shrink([victim])
    x, host = arrays.full(2, dist.get_rank() + 1.0), np.ones(1)
    dist.all_reduce(x, group=group)
    dist.all_reduce(host, group=group)
    found = [group.size(), x.numpy().tolist(), host.tolist()]
    dist.destroy_process_group(group)
    return found


@pytest.mark.every(n=2)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("version", "join"), [(21805, "tcp"), (22705, "tcp"), (23007, "tcp"), (23007, "file")]
)
def test_a_killed_rank_is_named_and_the_others_continue(version: int, join: str, victim: int) -> None:
    """With every version's way to shrink."""
    with joined(3, SimulatedJob, version=version, join=join) as job:
        job.call(wait_for_the_dead, victim)
        job.await_notes()
        job.signal(victim, signal.SIGKILL)
        others = [r for r in range(3) if r != victim]
        for outcome in job.collect(30, others):
            assert outcome.failure is None, outcome.failure
            assert f"rank {victim} " in outcome.value
            assert f"pid {job.pids[victim]}" in outcome.value
        job.call(shrink, victim, ranks=others)
        for outcome in job.collect(30, others):
            assert outcome.failure is None, outcome.failure
            assert outcome.value == [2, [6.0 - (victim + 1)] * 2, [2.0]]
        job.call(leave, ranks=others)
        assert [o.value for o in job.collect(30, others)] == [[], []]


@pytest.mark.parametrize(("code", "word"), [(6, "ncclRemoteError"), (2, "ncclSystemError")])
@on_ranks(2, start=run)
def test_an_asynchronous_error_of_nccl_fails_the_group_on_all_ranks(code: int, word: str) -> None:
    """NCCL reports it on rank 0."""
    connect()
    dist.barrier()
    if dist.get_rank() == 0:
        ranks.nccl().inject(code)
    deadline = time.monotonic() + 60
    said = "nothing"
    while said == "nothing" and time.monotonic() < deadline:
        said = error_of(lambda: dist.all_reduce(arrays.full(2, 1.0), async_op=True).wait())
        time.sleep(0.02)
    assert word in said


# --- what some versions or devices of NCCL lack -----------------------------------------------------------------------


needs_float8 = pytest.mark.skipif(find_spec("ml_dtypes") is None, reason="ml_dtypes is not installed")


@needs_float8
@pytest.mark.parametrize(("size", "average"), [(1, 1.0), (2, 1.5)])
@on_ranks(start=run)
def test_float8_is_averaged_by_one_rank_and_by_several(size: int, average: float) -> None:
    """NCCL refuses the average of float8 in a group of one rank."""
    import ml_dtypes

    x = arrays.full(3, dist.get_rank() + 1.0, ml_dtypes.float8_e5m2)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    dist.reduce(x, 0, op=dist.ReduceOp.AVG)
    assert dist.get_rank() > 0 or float(x.numpy()[0]) == average


@needs_float8
@on_ranks(3, start=partial(run, backend="nccl", bound=True, capabilities=((9, 0), (10, 0), (8, 0))))
def test_float8_is_reduced_if_the_devices_of_all_members_can() -> None:
    """A group with all ranks, whose last one has an older device, and one without it."""
    import ml_dtypes

    x = arrays.full(2, 1.0, ml_dtypes.float8_e5m2)
    said = error_of(lambda: dist.all_reduce(x))
    assert "reduces float8_e5m2 on devices of compute capability 9.0 or later; that of rank 2 (" in said
    assert said.endswith(" has 8.0")
    assert error_of(lambda: dist.all_reduce_coalesced([x, x.copy()])) == said
    dist.broadcast(x, 0)
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    assert [float(value) for value in x.numpy()] == [2.0 if dist.get_rank() < 2 else 1.0] * 2


@pytest.mark.parametrize("version", [22809, 22907])
@on_ranks(1, start=run, options=["version"])
def test_one_rank_multiplies_all_elements_by_a_factor(version: int) -> None:
    """Of sizes around NCCL's blocks: before 2.29.7 it omits the last elements of some sizes."""
    connect()
    factor = dist.ReduceOp.PREMUL_SUM(3)
    calls: dict[str, Any] = {
        "all_reduce": lambda x, out: dist.all_reduce(x, op=factor),
        "reduce": lambda x, out: dist.reduce(x, 0, op=factor),
        "reduce_scatter": lambda x, out: dist.reduce_scatter(out, [x], op=factor),
        "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(out, x, op=factor),
    }
    for dtype in ("int8", "float16", "float32", "complex64"):
        item = np.dtype(dtype).itemsize
        for count in (1, 16385 // item, 32770 // item, (1 << 19) // item + 9):
            for name, call in calls.items():
                values = (np.arange(count) % 7).astype(dtype)
                x, out = arrays.array(values), arrays.empty(count, dtype)
                call(x, out)
                found = (out if name.startswith("reduce_scatter") else x).numpy()
                assert np.array_equal(found, 3 * values), (name, dtype, count)
