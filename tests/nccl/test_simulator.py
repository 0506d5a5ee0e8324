"""The simulated device and NCCL report what they are for: races, memory used too late, forbidden calls.

Calls of CUDA and NCCL that are wrong on a real device are faults. What NCCL does on one rank is compared with a GPU by
tests/conformance/test_one_rank.py; test_nccl_programs.py removes safeguards of the backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.simulated_nccl.cuda import Simulation
from tests.simulated_nccl.nccl import SimulatedNccl
from tests.simulated_nccl.ranks import run
from tests.support.order import await_true
from unicoll.device_collectives.interface import DATA_TYPES, SUM, Config
from unicoll.devices import runtimes
from unicoll.devices.device_runtime import DeviceError

F64 = DATA_TYPES["float64"]


def mismatched(way: str) -> list[str]:
    """Calls of NCCL that differ between two ranks."""
    from tests.simulated_nccl import ranks

    me, nccl = dist.get_rank(), ranks.nccl()
    dist.all_reduce(arrays.full(2, 1.0))
    (comm,) = nccl._comms
    x = arrays.full(2, 1.0)
    stream = ranks.simulation().cuda.create_stream(me)
    if way == "message":
        call = partial((nccl.send, nccl.recv)[me], x.ptr, 1 + me, F64, 1 - me)
    else:
        count, op = (1 + me, SUM) if way == "count" else (1, me)
        call = partial(nccl.all_reduce, x.ptr, x.ptr, count, F64, op)
    ranks.simulation().synchronize()
    call(comm, stream)
    await_true(lambda: nccl.comm_state(comm)[1] == 0 and nccl.machine.mismatches)
    dist.group.WORLD.abort()  # type: ignore[union-attr]
    ranks.simulation().synchronize()
    ranks.simulation().cuda.destroy_stream(stream)
    found, nccl.machine.mismatches[:] = list(nccl.machine.mismatches), []
    return found


@pytest.mark.parametrize(
    ("way", "words"), [("count", "2 float64"), ("op", "op 1"), ("message", "a send of 8 bytes")]
)
def test_calls_of_nccl_that_differ_are_reported(way: str, words: str) -> None:
    for found in run(2, mismatched, way):
        assert words in found[0]


# --- wrong calls of CUDA and NCCL -------------------------------------------------------------------------------------


class World:
    """A rank alone with its NCCL, a communicator, two streams and an array of 512 elements."""

    def __init__(self) -> None:
        self.sim = Simulation(2)
        arrays.use(self.sim)
        self.cuda, self.nccl = self.sim.cuda, SimulatedNccl(self.sim)
        self.cuda.set_device(0)
        self.config = Config(blocking=True)
        self.comm = self.communicator()
        self.side, self.stream = arrays.Stream(), arrays.Stream()
        self.x = arrays.full(512, 1.0)
        self.memory, self.spare = self.nccl.mem_alloc(4096)[1], self.cuda.allocate(0, 64)
        self.sim.synchronize()

    def communicator(self) -> int:
        code, slot = self.nccl.comm_init(1, [self.nccl.unique_id()[1]], 0, self.config)
        assert code == 0
        assert slot.value is not None
        return slot.value

    def reduce(self, comm: int | None = None, count: int = 512, ptr: int = 0) -> int:
        at = ptr or self.x.ptr
        return self.nccl.all_reduce(at, at, count, F64, SUM, comm or self.comm, self.stream.ptr)

    def together(self, *calls: Callable[[], Any]) -> None:
        """Two calls on two threads, which are in NCCL at the same time."""
        self.nccl.active_calls.pause = threading.Barrier(2, timeout=60).wait
        threads = [threading.Thread(target=self.with_device, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.nccl.active_calls.pause = lambda: None

    def with_device(self, call: Callable[[], Any]) -> None:
        self.cuda.set_device(0)
        call()

    def close(self) -> None:
        arrays.use(None)
        self.nccl.close()
        self.sim.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def _race(w: World) -> None:
    with w.side:
        w.x += 1.0
    w.reduce()


def _read_without_an_order(w: World) -> None:
    with w.side:
        w.x += 1.0
    with w.stream:
        w.x.copy()


def _freed_too_early(w: World) -> None:
    y = w.x.copy()
    w.side.wait_for(arrays.Stream(handle=0))
    with w.sim.hold():
        with w.side:
            y += 1.0
        del y


def _used_by_a_graph_after_it_is_freed(w: World) -> None:
    with w.stream:
        y = arrays.full(2, 1.0)
        with w.sim.capture(w.stream.ptr) as made:
            y += 1.0
        del y
        w.sim.launch(made[0], w.stream.ptr)


def _window(w: World) -> int:
    made = w.nccl.window_register(w.comm, w.memory, 4096, True)[1].value
    assert made is not None
    return made


def _window_in_use(w: World) -> None:
    window = _window(w)
    with w.sim.hold():
        w.reduce(ptr=w.memory)
        w.nccl.window_deregister(w.comm, window)


def _freed_in_use(w: World) -> None:
    with w.sim.hold():
        w.reduce(ptr=w.memory)
        w.nccl.mem_free(w.memory)


def _split_with_work(w: World) -> None:
    with w.sim.hold():
        w.reduce()
        w.nccl.comm_split(w.comm, None, 0, w.config)


def _handle_to_a_dropped_slot(w: World) -> None:
    with w.sim.scheduler.lock:  # the split completes after its slot has been dropped
        w.nccl.comm_split(w.comm, 0, 0, Config(blocking=False))
    await_true(lambda: w.sim.faults or not w.nccl.comm_state(w.comm))


_FAULTS: list[tuple[str, Callable[[World], Any]]] = [
    ("race on", _race),
    ("race on", _read_without_an_order),
    ("freed too early", _freed_too_early),
    ("use after free", _used_by_a_graph_after_it_is_freed),
    ("use after free", lambda w: [w.cuda.free(w.spare), w.cuda.copy(w.spare, w.x.ptr, 32, w.stream.ptr)]),
    ("goes beyond", lambda w: w.reduce(count=100_000)),
    ("freed before NCCL all_reduce on stream", _freed_in_use),
    ("window deregistered before NCCL all_reduce on stream", _window_in_use),
    ("freed while it is registered", lambda w: [_window(w), w.nccl.mem_free(w.memory)]),
    ("before its memory was deregistered", lambda w: [_window(w), w.nccl.comm_destroy(w.comm)]),
    ("has been destroyed", lambda w: [w.nccl.comm_destroy(w.comm), w.reduce()]),
    ("ncclCommSplit before NCCL all_reduce on stream", _split_with_work),
    ("was freed", _handle_to_a_dropped_slot),
    ("in NCCL on device 0", lambda w: w.together(w.reduce, partial(w.reduce, w.communicator(), 0))),
    (
        "in NCCL of one communicator",
        lambda w: w.together(partial(w.reduce, count=0), partial(w.nccl.comm_unique_id, w.comm)),
    ),
    (
        "in NCCL of one communicator",
        lambda w: w.together(partial(w.nccl.comm_state, w.comm), partial(w.nccl.comm_abort, w.comm)),
    ),
]


@pytest.mark.parametrize(("fault", "wrong"), _FAULTS)
def test_a_wrong_call_is_a_fault(fault: str, wrong: Callable[[World], Any], world: World) -> None:
    wrong(world)
    assert any(fault in text for text in world.sim.faults), world.sim.faults


def _ordered_by_an_event(w: World) -> None:
    with w.side:
        w.x += 1.0
    w.stream.wait_for(w.side)
    w.reduce()


def _freed_once_the_streams_are_ordered(w: World) -> None:
    y = w.x.copy()
    w.side.wait_for(arrays.Stream(handle=0))
    with w.side:
        y += 1.0
    arrays.Stream(handle=0).wait_for(w.side)
    del y


def _threads_in_turns_and_a_query(w: World) -> None:
    w.with_device(w.reduce)
    w.together(partial(w.reduce, count=0), partial(w.nccl.comm_state, w.comm))


@pytest.mark.parametrize(
    "right", [_ordered_by_an_event, _freed_once_the_streams_are_ordered, _threads_in_turns_and_a_query]
)
def test_an_ordered_program_has_no_fault(right: Callable[[World], None], world: World) -> None:
    right(world)
    world.sim.synchronize()
    assert world.sim.faults == []


@pytest.mark.parametrize(
    "call",
    [
        lambda w: w.stream.synchronize(),
        lambda w: w.cuda.stream_done(w.stream.ptr),
        lambda w: w.cuda.allocate(0, 8),
        lambda w: w.x.numpy(),
    ],
)
def test_unsafe_calls_invalidate_a_capture(call: Callable[[World], Any], world: World) -> None:
    world.sim.begin_capture(world.stream.ptr, "global")
    with pytest.raises(DeviceError, match="Capture"):
        call(world)
    with pytest.raises(DeviceError, match="Invalidated"):
        world.sim.end_capture(world.stream.ptr)


# --- a mesh on the simulated devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "before", "after"), [(4, -1, 2), (4, 0, 0), (1, -1, 0), (2, -1, -1)], ids=str
)
def test_a_mesh_selects_the_device_of_the_local_rank(
    monkeypatch: pytest.MonkeyPatch, count: int, before: int, after: int
) -> None:
    """If the thread has none. With one visible device it is that one; with too few, none is selected."""
    sim = Simulation(count)
    sim.cuda.set_device(before)
    monkeypatch.setitem(runtimes._installed, "cuda", sim.cuda)
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo")
    try:
        dist.init_device_mesh("cpu", (1,))
        assert sim.cuda.current_device() == before
        dist.init_device_mesh("cuda", (1,))
        assert sim.cuda.current_device() == after
    finally:
        dist.destroy_process_group()
        sim.close()
