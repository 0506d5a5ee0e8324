"""A kernel traps on one rank, which ends its device context: what the ranks raise, and what is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import unicoll as dist
from tests.nccl.nccl_jobs import backend_of, busy, connect, error_of, new_group
from tests.nccl.test_interrupts import STARTS
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.communicators import Result
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support import worker
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true
from tests.support.ranks import joined
from unicoll.device_collectives.backend import DeviceBackend

_TRAPPED = r"cudaErrorLaunchFailure: a kernel on the legacy stream has trapped"
_RANK_1 = (
    r"GroupAbortedError: rank 1 \(.*\) failed while {} group 'world': (DeviceError|DistBackendError): .*"
    + _TRAPPED
)


def _all_reduce(x: Any, y: Any) -> None:
    dist.all_reduce(x)


def _coalesced(x: Any, y: Any) -> None:
    dist.all_reduce_coalesced([x, y])


def _asynchronous(x: Any, y: Any) -> None:
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.synchronize()


def _message(x: Any, y: Any) -> None:
    (dist.send if dist.get_rank() else dist.recv)(x, 1 - dist.get_rank())


def _exchange(x: Any, y: Any) -> None:
    other = 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
        work.wait()


_CALLS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "all_reduce": (_all_reduce, "all_reduce"),
    "coalesced": (_coalesced, "all_reduce(_coalesced)?"),
    "asynchronous": (_asynchronous, "all_reduce"),
    "message": (_message, "send"),
    "exchange": (_exchange, "(send|batch_isend_irecv)"),
}


def _end_context(stream: int) -> None:
    """Put a kernel that traps on a stream, and wait for the end of the context."""
    here = ranks.simulation()
    here.trap(stream)
    here.scheduler.request(here.cuda.stream(stream).tail)
    await_true(lambda: here.scheduler.trapped)


def after_a_trap(name: str) -> tuple[str, str, str, str]:
    """What a call, a second one, ``check()`` and destroy raise after a kernel of rank 1 has trapped."""
    connect()
    group: Any = dist.group.WORLD
    x, y = arrays.full(4, 1.0), arrays.full(4, 1.0)
    y.numpy()
    backend = group._backends.for_device(ranks.simulation().cuda.device_type)
    if isinstance(backend, DeviceBackend):  # the watchdog would notice the trap before the call
        await_true(lambda: not backend.resources.in_flight.operations)
    dist.barrier()
    if dist.get_rank() == 1:
        _end_context(0)

    def attempt() -> None:
        _CALLS[name][0](x, y)
        await_true(lambda: all(backend.failure for backend in group.backends))
        group.check()

    return (
        error_of(attempt),
        error_of(lambda: dist.all_reduce(x)),
        error_of(group.check),
        error_of(dist.destroy_process_group),
    )


@pytest.mark.every(n=6)
@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("start", ["nccl", "oneccl", "staged"])
def test_a_call_after_a_trap_fails_the_group_on_all_ranks(start: str, name: str) -> None:
    """At once, long before the timeout of 60 s; nothing is left, and no second error comes from the teardown."""
    with joined(2, STARTS[start]) as job:
        job.call(after_a_trap, name)
        other, own = job.results(30)
        if start != "oneccl":  # it cannot end a communicator that has failed
            job.call(worker.leave)
            assert job.results() == [[]] * 2
        job.quiet = False
    assert re.match(f"(DeviceError|DistBackendError): .*{_TRAPPED}", own[0]), own
    wanted = _RANK_1.format(f"calling {_CALLS[name][1]} on")
    for raised in (own[1], own[2], *other[:3]):
        assert re.match(wanted, raised), raised
    assert own[3] == other[3] == "nothing"


def trap_in_flight(ended_by: str) -> tuple[str, str]:
    """A kernel of rank 1 traps behind the last operation's call; what a call and destroy raise."""
    connect()
    x, error = arrays.full(4, 1.0), ""
    finish = busy(0) if dist.get_rank() == 1 else int
    if dist.get_rank() == 1:
        ranks.simulation().trap(0)
    dist.all_reduce(x)
    dist.barrier()
    finish()
    if ended_by == "check":
        await_true(lambda: backend_of().failure)
        error = error_of(dist.group.WORLD.check)  # type: ignore[union-attr]
    return error, error_of(dist.destroy_process_group)


@pytest.mark.every(n=3)
@pytest.mark.parametrize("ended_by", ["check", "destroy"])
def test_a_trap_of_the_last_operation_is_raised_on_all_ranks(ended_by: str) -> None:
    with joined(2, SimulatedJob) as job:
        job.call(trap_in_flight, ended_by)
        results = job.results(30)
        job.call(worker.leave)
        assert job.results() == [[]] * 2
        job.quiet = False
    for checked, destroyed in results:
        raised = {"check": checked, "destroy": destroyed}[ended_by]
        assert re.match(_RANK_1.format("using the device of"), raised), raised
        assert (checked, destroyed) in ((raised, "nothing"), ("", raised))


@on_ranks(2, start=partial(run, policy="oldest"))
def test_an_error_in_a_capture_leaves_the_group_as_it_was() -> None:
    connect()
    here, group = ranks.simulation(), dist.group.WORLD
    x = arrays.full(4, 1.0)
    x.numpy()
    with arrays.Stream() as stream:
        for asynchronous in (False, True):
            here.begin_capture(stream.ptr)
            stream_of = here.cuda.stream(stream.ptr)
            assert stream_of.capture is not None
            stream_of.capture.invalidate("the program called a function that a graph cannot record")
            error = error_of(lambda asynchronous=asynchronous: dist.all_reduce(x, async_op=asynchronous))  # type: ignore[misc]
            assert "Invalidated" in error, error
            with pytest.raises(dist.DistError, match="Invalidated"):
                here.end_capture(stream.ptr)
        group.check()  # type: ignore[union-attr]
        dist.all_reduce(x)
        assert x.numpy().tolist() == [2.0] * 4


def refused_on_one(call: str, trapped: bool) -> tuple[str, str, str]:
    """Memory is short, or the context has ended, on rank 1: what registering memory, a call and destroy raise."""
    group = new_group()
    x = arrays.full(4, 1.0)
    dist.all_reduce(x, group=group)
    x.numpy()
    dist.barrier()
    if dist.get_rank() == 1:
        if trapped:
            _end_context(0)
        else:
            ranks.nccl().comm_register = lambda *_: (Result.CUDA_ERROR, 0)  # type: ignore[method-assign]
    attempt = {
        "register": lambda: group.register(x, symmetric=False),
        "symmetric_empty": lambda: group.symmetric_empty(4, "float64"),
    }[call]
    error = error_of(attempt)
    dist.barrier()
    again = error_of(lambda: dist.all_reduce(x, group=group))
    return error, again, error_of(lambda: dist.destroy_process_group(group))


@pytest.mark.every(n=2)
@pytest.mark.parametrize(
    ("call", "trapped"), [("register", False), ("register", True), ("symmetric_empty", True)]
)
def test_registering_memory_fails_the_group_only_if_the_context_has_ended(call: str, trapped: bool) -> None:
    with joined(2, SimulatedJob) as job:
        job.call(refused_on_one, call, trapped)
        other, own = job.results(30)
        job.quiet = False
    if trapped:
        assert "cudaErrorLaunchFailure" in own[0], own
        assert any(re.match(r"GroupAbortedError: rank 1 ", raised) for raised in other), other
    else:
        assert own[0].startswith("DeviceError: ncclCommRegister of 32 bytes"), own
        assert [*own[1:], *other] == ["nothing"] * 5


def check_of_a_group(way: str) -> tuple[str, str, str]:
    """``check()`` before and after the group has failed, and what destroy raises then."""
    connect()
    group: Any = dist.group.WORLD
    before = error_of(group.check)
    dist.barrier()
    if dist.get_rank() == 1:
        if way == "abort":
            group.abort("no more data")
        else:
            ranks.nccl().inject(Result.REMOTE_ERROR)
            return before, error_of(group.check), error_of(dist.destroy_process_group)
    await_true(lambda: backend_of().failure)
    return before, error_of(group.check), error_of(dist.destroy_process_group)


@pytest.mark.parametrize(
    ("way", "raised"),
    [
        ("abort", "GroupAbortedError: group 'world': no more data"),
        ("nccl", r"RankLostError: an operation in progress on group 'world': ncclRemoteError"),
    ],
)
def test_check_raises_with_what_a_group_has_failed(way: str, raised: str) -> None:
    with joined(2, SimulatedJob) as job:
        job.call(check_of_a_group, way)
        results = job.results(30)
        job.quiet = False
    for before, error, destroyed in results:
        assert before == destroyed == "nothing"
        assert re.match(raised, error), error
