"""The simulated NCCL reports threads that NCCL does not allow at the same time, and only those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from nccl_comm.library.interface import IN_PROGRESS, SUCCESS, SUM
from tests.nccl.test_simulated_nccl import F64, PATIENCE_S, World, eventually, threads


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def begin(size: int, **kwargs: Any) -> World:
        w = World(size, **{"blocking": True, **kwargs})
        w.nccl.active_calls.strict = True
        made.append(w)
        return w

    yield begin
    for each in made:
        each.close()


def _reducing(w: World, comm: int, stream: int) -> Callable[[], int]:
    """An all_reduce of an array of its own."""
    (x,) = w.arrays([1.0])
    return lambda: w.nccl.all_reduce(x.ptr, x.ptr, 1, F64, SUM, comm, stream)


def _meeting(w: World, *calls: Callable[[], Any]) -> list[Any]:
    """The results of calls on two threads, which are in NCCL at the same time."""
    w.nccl.active_calls.pause = threading.Barrier(2, timeout=PATIENCE_S).wait
    found = threads(calls)
    w.nccl.active_calls.pause = lambda: None
    return found


def _second(w: World) -> int:
    """Another communicator of one rank on the first device."""
    w.sim.cuda.set_device(0)
    _, unique = w.nccl.unique_id()
    _, slot = w.nccl.comm_init(1, [unique], 0, w.config)
    assert slot.value is not None
    return slot.value


def test_two_threads_do_not_issue_on_one_device(world: Callable[..., World]) -> None:
    w = world(1)
    calls = [_reducing(w, comm, w.streams[0]) for comm in (w.comms[0], _second(w))]
    assert _meeting(w, *calls) == [SUCCESS] * 2
    assert w.sim.faults == [
        "two threads in NCCL on device 0: an all_reduce while another is in an all_reduce"
    ]


def test_without_strict_nothing_is_recorded(world: Callable[..., World]) -> None:
    w = world(1)
    w.nccl.active_calls.strict = False
    _meeting(w, *[_reducing(w, comm, w.streams[0]) for comm in (w.comms[0], _second(w))])
    assert w.sim.faults == []


def test_threads_may_take_turns_and_have_devices_of_their_own(world: Callable[..., World]) -> None:
    w = world(2)
    lock = threading.Lock()
    one, other = (_reducing(w, w.comms[0], w.streams[0]), _reducing(w, _second(w), w.streams[0]))

    def locked(call: Callable[[], int]) -> int:
        with lock:
            return call()

    assert threads([partial(locked, one), partial(locked, other)]) == [SUCCESS] * 2
    xs = w.arrays([1.0], [2.0])

    def reduce(rank: int) -> int:
        w.sim.cuda.set_device(rank)
        ptr = xs[rank].ptr
        return w.nccl.all_reduce(ptr, ptr, 1, F64, SUM, w.comms[rank], w.streams[rank])

    assert _meeting(w, partial(reduce, 0), partial(reduce, 1)) == [SUCCESS] * 2
    assert w.sim.faults == []


def test_a_communicator_is_used_by_one_thread(world: Callable[..., World]) -> None:
    w = world(1)
    split = partial(w.nccl.comm_split, w.comms[0], 0, 0, w.config)
    _meeting(w, _reducing(w, w.comms[0], w.streams[0]), split)
    (fault,) = w.sim.faults
    assert fault.startswith("two threads in NCCL of one communicator: ")
    assert {"an all_reduce", "ncclCommSplit"} == {x for x in ("an all_reduce", "ncclCommSplit") if x in fault}


def test_its_state_may_be_queried_meanwhile_but_not_at_its_end(world: Callable[..., World]) -> None:
    w = world(1)
    ask = partial(w.nccl.comm_state, w.comms[0])
    assert _meeting(w, _reducing(w, w.comms[0], w.streams[0]), ask) == [SUCCESS, (SUCCESS, SUCCESS)]
    assert w.sim.faults == []
    _meeting(w, ask, partial(w.nccl.comm_destroy, w.comms[0]))
    assert "two threads in NCCL of one communicator: " in w.sim.faults[0]


def test_a_group_call_lasts_from_its_first_operation_to_its_end(world: Callable[..., World]) -> None:
    w = world(1)
    call, other = _reducing(w, w.comms[0], w.streams[0]), _reducing(w, _second(w), w.streams[0])
    w.nccl.group_start()
    assert threads([other]) == [SUCCESS]
    assert w.sim.faults == []
    assert call() == SUCCESS
    assert threads([other]) == [SUCCESS]
    assert len(w.sim.faults) == 1
    assert w.nccl.group_end() == SUCCESS
    assert threads([other]) == [SUCCESS]
    assert len(w.sim.faults) == 1


# --- teardown while a thread is in NCCL -------------------------------------------------------------------------------


def _stuck(w: World, call: Callable[[], int]) -> tuple[threading.Thread, list[int]]:
    """A thread that makes a call while NCCL connects, and the list that gets its result code."""
    w.nccl.machine.stuck.set()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    eventually(lambda: w.nccl.active_calls.current or found)
    return thread, found


def test_an_abort_frees_memory_that_a_thread_in_nccl_uses(world: Callable[..., World]) -> None:
    w = world(1)
    call = _reducing(w, w.comms[0], w.streams[0])
    thread, found = _stuck(w, call)
    assert w.nccl.comm_abort(w.comms[0]) == SUCCESS
    thread.join(PATIENCE_S)
    assert found == [3]  # ncclInternalError
    assert w.sim.faults == [
        "two threads in NCCL of one communicator: ncclCommAbort while another is in an all_reduce"
    ]


def test_after_a_revoke_the_thread_returns_before_the_abort(world: Callable[..., World]) -> None:
    w = world(1)
    call = _reducing(w, w.comms[0], w.streams[0])
    thread, found = _stuck(w, call)
    assert w.nccl.comm_revoke(w.comms[0]) == SUCCESS
    thread.join(PATIENCE_S)
    assert found == [3]
    assert w.nccl.comm_abort(w.comms[0]) == SUCCESS
    assert w.sim.faults == []


def test_no_thread_hangs_in_a_non_blocking_communicator(world: Callable[..., World]) -> None:
    w = world(1, blocking=False)
    call = _reducing(w, w.comms[0], w.streams[0])
    thread, found = _stuck(w, call)
    thread.join(PATIENCE_S)
    assert found == [IN_PROGRESS]
    assert w.nccl.comm_abort(w.comms[0]) == SUCCESS
    assert w.sim.faults == []


@pytest.mark.parametrize("blocking", [True, False])
def test_stuck_operations_continue(world: Callable[..., World], blocking: bool) -> None:
    w = world(1, blocking=blocking)
    call = _reducing(w, w.comms[0], w.streams[0])
    thread, found = _stuck(w, call)
    if not blocking:
        thread.join(PATIENCE_S)
        assert [w.nccl.comm_state(w.comms[0])[1] for _ in range(3)] == [IN_PROGRESS] * 3
    w.nccl.machine.stuck.clear()
    thread.join(PATIENCE_S)
    assert found == [SUCCESS if blocking else IN_PROGRESS]
    assert w.settle() == [SUCCESS]
    w.sim.synchronize()
    assert w.sim.faults == []


def test_a_call_by_a_thread_without_a_context_is_a_fault(world: Callable[..., World]) -> None:
    """NCCL makes a context on device 0 for it."""
    w = world(2)
    x, y = w.arrays([1.0], [2.0])
    threads([lambda: w.nccl.all_reduce(y.ptr, y.ptr, 1, F64, SUM, w.comms[1], w.streams[1])])
    threads([lambda: w.nccl.all_reduce(x.ptr, x.ptr, 1, F64, SUM, w.comms[0], w.streams[0])])
    w.settle()
    assert w.sim.faults == ["an all_reduce on device 1, by a thread without a context"]
