"""The backend xccl on a simulated XPU, with a oneCCL that neither aborts nor reports errors."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.simulated_nccl.oneccl import SimulatedXpu
from tests.simulated_nccl.ranks import SimulatedJob, run, simulation
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.outcomes import CallOutcome, outcome_of, values_of
from tests.support.ranks import joined
from tests.support.worker import end

on_xpus = partial(run, kind="xpu", policy="newest")


def world() -> Any:
    return dist.group.WORLD


def resources() -> Any:
    """What the group has on its device."""
    return world()._backends.for_device("xpu").resources


@on_ranks(2, start=partial(on_xpus, backend=None))
def test_xpu_arrays_go_to_xccl_by_default() -> None:
    assert dist.get_backend_config() == "cpu:gloo,xpu:xccl"
    x = arrays.full(1000, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert (x.numpy() == 3.0).all()
    assert "xpu arrays: backend xccl: the default for xpu arrays" in dist.explain()
    assert dist.get_default_backend_for_device("xpu:0") == "xccl"


@on_ranks(2, start=partial(on_xpus, backend="xccl"))
def test_a_group_of_xccl_has_a_backend_for_objects_and_barriers() -> None:
    said = [None, None]
    dist.all_gather_object(said, dist.get_rank())
    assert said == [0, 1]
    dist.barrier()
    x = np.ones(3)
    dist.all_reduce(x)
    assert (x == 2).all()


@on_ranks(2, start=partial(on_xpus, backend="gloo"))
def test_xpu_arrays_go_through_host_memory_to_a_backend_of_the_host() -> None:
    x = arrays.full(1000, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert (x.numpy() == 3.0).all()
    assert "xpu arrays through page-locked memory" in dist.explain()


@on_ranks(2, start=partial(on_xpus, backend="cpu:gloo,xpu:xccl"))
def test_an_array_of_a_queue_that_is_not_in_order_is_communicated_on_the_groups_own_stream() -> None:
    """A kernel on such a queue would not wait for the event of the array's producer."""
    runtime = simulation().cuda
    assert isinstance(runtime, SimulatedXpu)
    with arrays.Stream() as stream:
        x = arrays.full(1000, dist.get_rank() + 1.0)
        dist.all_reduce(x)
        assert resources().in_flight.last.runs_on == stream.ptr
        runtime.out_of_order.add(stream.ptr)
        x *= 2.0
        dist.all_reduce(x)
        assert resources().in_flight.last.runs_on == resources().stream
        x *= 2.0
        assert (x.numpy() == 24.0).all()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("frees_in_order", [True, False])
@on_ranks(2, start=partial(on_xpus, backend="cpu:gloo,xpu:xccl"))
def test_an_array_is_kept_if_its_library_would_free_it_before_the_operation_is_done(
    frees_in_order: bool, blocking: bool
) -> None:
    simulation().cuda.frees_in_order = frees_in_order
    dist.all_reduce(arrays.full(4, 1.0))
    with simulation().hold():
        x = arrays.full(1000, 1.0)
        alive = weakref.ref(x)
        work = dist.all_reduce(x, async_op=not blocking)
        if work is not None:
            work.wait()
        del x, work
        gc.collect()
        assert (alive() is None) == frees_in_order
    await_true(lambda: alive() is None)


@on_ranks(2, start=partial(on_xpus, backend="cpu:gloo,xpu:xccl"))
def test_what_oneccl_lacks_is_refused_by_its_name() -> None:
    x = arrays.full(4, 1.0)
    dist.all_reduce(x)
    with pytest.raises(dist.BackendUnavailableError, match="put: one-sided operations need the backend nccl"):
        world().put(x, 1 - dist.get_rank(), x)
    with pytest.raises(dist.BackendUnavailableError, match="windows need the backend nccl"):
        world().symmetric_empty(4)


def wait_for_a_missing_rank(connected: bool) -> CallOutcome:
    """Rank 1 makes no second call; with ``connected`` the ranks have connected in a first one."""

    def call() -> None:
        work = dist.all_reduce(arrays.full(4, 1.0), async_op=True, timeout=1.0)
        assert work is not None
        work.synchronize()

    if connected:
        dist.all_reduce(arrays.full(4, 1.0))
    return outcome_of(call if dist.get_rank() == 0 else lambda: None)


@pytest.mark.parametrize("connected", [True, False])
def test_a_missing_rank_is_named_at_the_deadline_and_the_process_exits(connected: bool) -> None:
    """If the ranks have not connected a thread is in oneCCL, else the operation is on the queue. Nothing ends them."""
    start = partial(SimulatedJob, kind="xpu", backend="cpu:gloo,xpu:xccl", bound=True, quiet=False)
    with joined(2, start) as job:
        job.call(wait_for_a_missing_rank, connected)
        (failure, _), _ = values_of(job, [0, 1])
        assert failure.type == "OperationTimeoutError", failure.traceback
        assert "missing: rank 1" in failure.message
        job.call(end)
        assert job.wait_for_exit(60) == [0, 0]
