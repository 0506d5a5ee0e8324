"""The simulated device follows CUDA's rules: late execution, order, reuse of memory, captures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.simulated_nccl import family as simulated_family  # noqa: F401 - registers the family
from tests.simulated_nccl.cuda import Simulation
from unicoll.arrays import cuda as streams
from unicoll.arrays.conversion import as_buffer
from unicoll.arrays.cuda import CudaError
from unicoll.testing.families import family

Make = Callable[..., Simulation]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes simulations, on whose devices arrays are created from then on."""
    made: list[Simulation] = []

    def begin(*args: Any, **kwargs: Any) -> Simulation:
        made.append(Simulation(*args, **kwargs))
        arrays.use(made[-1])
        return made[-1]

    yield begin
    arrays.use(None)
    for each in made:
        each.close()


@pytest.fixture
def sim(make: Make) -> Simulation:
    return make()


# --- streams and events ---


def test_no_operation_runs_when_it_is_posted(make: Make) -> None:
    sim = make(patience=60.0)
    x = arrays.full(4, 7.0)
    assert sim.memory.view(x.ptr, 8).tobytes() == b"\xcb" * 8
    assert x.numpy().tolist() == [7.0] * 4
    assert sim.faults == []


@pytest.mark.parametrize(("policy", "seen"), [("newest", 0.0), ("oldest", 1.0)])
def test_the_policy_decides_between_streams(make: Make, policy: str, seen: float) -> None:
    sim = make(policy=policy)
    x, y = arrays.full(1, 0.0), arrays.empty(1)
    sim.synchronize()
    older, newer = arrays.Stream(), arrays.Stream()
    with sim.hold():
        with older:
            x.fill(1.0)
        with newer:
            y[...] = x
    sim.synchronize()
    assert y.numpy().tolist() == [seen]
    assert "race" in sim.faults[0]  # found under each policy


def test_the_random_policy_repeats_itself(make: Make) -> None:
    def order(seed: int) -> list[float]:
        sim = make(policy="random", seed=seed)
        x = arrays.full(1, 0.0)
        sim.synchronize()
        made = [arrays.Stream() for _ in range(8)]
        with sim.hold():
            for i, stream in enumerate(made):
                with stream:
                    x *= 3
                    x += i
        sim.synchronize()
        return [float(v) for v in x.numpy()]

    assert order(1) == order(1)
    assert len({order(seed)[0] for seed in range(4)}) > 1


def test_an_event_orders_streams(make: Make) -> None:
    sim = make(policy="newest")
    x, y = arrays.full(1, 0.0), arrays.empty(1)
    first, second = arrays.Stream(), arrays.Stream()
    first.wait_for(arrays.Stream(handle=0))
    second.wait_for(arrays.Stream(handle=0))
    with sim.hold():
        with first:
            x.fill(5.0)
        second.wait_for(first)
        with second:
            y[...] = x
    second.synchronize()
    with second:
        assert y.numpy().tolist() == [5.0]
    assert sim.faults == []


def test_an_event_includes_the_operations_before_its_recording(make: Make) -> None:
    sim = make(patience=60.0)
    cuda, stream = sim.cuda, arrays.Stream()
    event = cuda.create_event(0)
    assert cuda.event_done(event)  # never recorded
    cuda.wait_event(stream.ptr, event)
    with stream:
        x = arrays.full(1, 1.0)
        cuda.record(event, stream.ptr)
        with sim.hold():
            assert not cuda.event_done(event)
        cuda.wait_for_event(event)
        assert cuda.event_done(event)
        x += 1.0
        assert cuda.event_done(event)
        assert not cuda.stream_done(stream.ptr)


def test_recording_again_does_not_change_earlier_waits(make: Make) -> None:
    sim = make(policy="newest")
    cuda = sim.cuda
    a, b = arrays.Stream(), arrays.Stream()
    event = cuda.create_event(0)
    with sim.hold():
        cuda.record(event, a.ptr)
        cuda.wait_event(b.ptr, event)
        with a:
            x = arrays.full(1, 1.0)
        cuda.record(event, a.ptr)
        with b:
            y = arrays.full(1, 2.0)
    b.synchronize()
    assert sim.memory.view(y.ptr, 8).tobytes() == np.float64(2).tobytes()
    with a:
        assert x.numpy().tolist() == [1.0]


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(make: Make) -> None:
    sim = make(policy="newest")
    x = arrays.full(1, 0.0)
    blocking, free = arrays.Stream(blocking=True), arrays.Stream()
    with sim.hold():
        x.fill(1.0)
        with blocking:
            x += 1.0
        x *= 5.0
        assert sim.faults == []
        with free:
            arrays.empty(1)[...] = x
        assert "race" in sim.faults[0]
    assert x.numpy().tolist() == [10.0]


def test_a_kernel_that_does_not_end_does_not_block_other_streams(sim: Simulation) -> None:
    from tests.simulated_nccl.streams import LATER, Op

    stuck, other = arrays.Stream(), arrays.Stream()
    op = sim.scheduler.put(sim.cuda.stream(stuck.ptr), Op("endless", lambda op: LATER))
    with other:
        assert arrays.full(1, 3.0).numpy().tolist() == [3.0]
    assert not sim.cuda.stream_done(stuck.ptr)
    sim.scheduler.finish(op)
    stuck.synchronize()


def test_the_device_runs_operations_while_the_host_makes_no_calls(make: Make) -> None:
    from tests.simulated_nccl.streams import Op

    sim = make(patience=0.001)
    ran = threading.Event()
    sim.scheduler.put(sim.cuda.stream(0), Op("ring", lambda op: ran.set()))
    assert ran.wait(10.0)


def test_a_host_that_blocks_while_it_holds_the_device_gets_an_error(sim: Simulation) -> None:
    x = arrays.full(1, 1.0)
    with sim.hold(), pytest.raises(CudaError, match="holds the device"):
        x.numpy()


def test_the_trace_names_the_function_that_blocked(sim: Simulation) -> None:
    x = arrays.full(1, 1.0)
    event = sim.cuda.create_event(0)
    sim.cuda.record(event, 0)
    sim.cuda.event_done(event)
    assert sim.scheduler.blocking_calls() == []
    x.numpy()
    (call,) = sim.scheduler.blocking_calls()
    assert call.call == "synchronize"
    assert "test_the_trace_names_the_function_that_blocked" in call.where
    sim.scheduler.forget()
    assert not sim.scheduler.trace


def test_waiting_for_an_event_as_backends_do(sim: Simulation) -> None:
    import time

    event = sim.cuda.create_event(0)
    arrays.full(1, 1.0)
    sim.cuda.record(event, 0)
    assert streams.await_event(sim.cuda, event, time.monotonic() + 60)
    assert sim.scheduler.blocking_calls() == []
    with sim.hold():
        sim.cuda.record(event, 0)
        assert not streams.await_event(sim.cuda, event, time.monotonic() + 0.01)


def test_destroyed_handles_are_refused(sim: Simulation) -> None:
    stream, event = sim.cuda.create_stream(0), sim.cuda.create_event(0)
    sim.cuda.destroy_stream(stream)
    with pytest.raises(CudaError, match="no stream"):
        sim.cuda.record(event, stream)
    sim.cuda.destroy_event(event)
    with pytest.raises(CudaError, match="no event"):
        sim.cuda.event_done(event)
    assert len(sim.faults) == 2


def test_streams_and_events_belong_to_devices(make: Make) -> None:
    sim = make(2)
    event = sim.cuda.create_event(1)
    with pytest.raises(CudaError, match="device 1"):
        sim.cuda.record(event, sim.cuda.create_stream(0))
    sim.cuda.record(event, sim.cuda.create_stream(1))
    sim.cuda.wait_event(sim.cuda.create_stream(0), event)
    assert sim.cuda.facts(0).uuid != sim.cuda.facts(1).uuid
    assert sim.cuda.current_device() == -1
    sim.cuda.set_device(1)
    assert arrays.full(1, 1.0).device == 1


def test_leftovers_are_reported(sim: Simulation) -> None:
    stream, event, ptr = sim.cuda.create_stream(0), sim.cuda.create_event(0), sim.cuda.allocate(0, 8)
    with arrays.Stream():
        x = arrays.full(4, 1.0)
    assert x.size == 4
    assert len(sim.leftovers()) == 3
    sim.cuda.destroy_stream(stream)
    sim.cuda.destroy_event(event)
    sim.cuda.free(ptr)
    assert sim.leftovers() == []


# --- memory ---


def test_copies_read_and_write_when_they_run(make: Make) -> None:
    sim = make(policy="oldest")
    cuda = sim.cuda
    pinned, device = cuda.pin(8), cuda.allocate(0, 8)
    assert cuda.device_of(device + 3) == 0
    assert cuda.device_of(pinned) == cuda.device_of(0xDEAD) == -1
    stream = cuda.create_stream(0)
    with sim.hold():
        sim.memory.view(pinned, 8)[:] = 1
        cuda.copy(device, pinned, 8, stream)
        sim.memory.view(pinned, 8)[:] = 2  # before the copy has run
    sim.synchronize_stream(stream)
    assert sim.memory.view(device, 8).tolist() == [2] * 8
    cuda.free(device)
    with pytest.raises(CudaError, match="not the address"):
        cuda.free(device)
    with pytest.raises(CudaError, match="neither device nor pinned"):
        cuda.copy(0xDEAD, pinned, 8, stream)


def test_the_pool_reuses_at_once_and_by_stream(sim: Simulation) -> None:
    x = arrays.full(100, 1.0)
    where = x.ptr
    del x
    with arrays.Stream():
        assert arrays.empty(100).ptr != where
    assert arrays.empty(1000).ptr != where
    y = arrays.full(100, 2.0)
    assert y.ptr == where
    assert y.numpy().tolist() == [2.0] * 100
    assert sim.faults == []


@pytest.mark.parametrize("held", [False, True])
def test_memory_freed_too_early_is_a_fault(make: Make, held: bool) -> None:
    """The pool's stream reuses the memory before the other stream has read it."""
    sim = make(policy="oldest")
    x, y = arrays.full(1, 1.0), arrays.empty(1)
    side = arrays.Stream()
    side.wait_for(arrays.Stream(handle=0))
    with sim.hold():
        with side:
            y[...] = x
        keep = x if held else None
        del x
        z = arrays.full(1, 9.0)
    side.synchronize()
    with side:
        assert y.numpy().tolist() == ([1.0] if held else [9.0])
    del keep, z
    assert bool(sim.faults) is not held
    assert held or "freed too early" in sim.faults[0]


def test_memory_may_be_freed_once_the_streams_are_ordered(make: Make) -> None:
    sim = make(policy="oldest")
    x, y = arrays.full(1, 1.0), arrays.empty(1)
    main, side = arrays.Stream(handle=0), arrays.Stream()
    side.wait_for(main)
    with sim.hold():
        with side:
            y[...] = x
        main.wait_for(side)
        del x
        arrays.full(1, 9.0)
    assert y.numpy().tolist() == [1.0]
    assert sim.faults == []


def test_memory_may_be_freed_once_the_host_has_seen_the_event(sim: Simulation) -> None:
    x, y = arrays.full(1, 1.0), arrays.empty(1)
    side = arrays.Stream()
    side.wait_for(arrays.Stream(handle=0))
    with side:
        y[...] = x
        event = sim.cuda.create_event(0)
        sim.cuda.record(event, side.ptr)
    sim.cuda.wait_for_event(event)
    del x
    assert sim.faults == []


def test_use_after_free_is_a_fault(sim: Simulation) -> None:
    ptr = sim.cuda.allocate(0, 64)
    stream = sim.cuda.create_stream(0)
    sim.cuda.copy(ptr, ptr + 32, 32, stream)
    sim.cuda.free(ptr)
    assert sim.faults == []  # cudaFree waited
    sim.cuda.copy(ptr, ptr + 32, 32, stream)
    assert "use after free" in sim.faults[0]
    assert sim.cuda.device_of(ptr) == -1


def test_a_crash_on_the_device_is_permanent(sim: Simulation) -> None:
    from tests.simulated_nccl.streams import Op

    def crash(op: Op) -> None:
        sim.memory.view(0xDEAD, 8)

    sim.scheduler.put(sim.cuda.stream(0), Op("crash", crash))
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        sim.synchronize()
    with pytest.raises(CudaError, match="cudaErrorIllegalAddress"):
        arrays.full(1, 1.0)


# --- captures ---


def test_a_graph_runs_when_it_is_launched_and_again(sim: Simulation) -> None:
    stream, side = arrays.Stream(), arrays.Stream()
    with stream:
        x = arrays.full(2, 1.0)
        y = arrays.full(2, 0.0)
        with sim.capture(stream.ptr) as made:
            x += 1.0
            assert sim.cuda.capturing(stream.ptr)
            assert not sim.cuda.capturing(side.ptr)
            side.wait_for(stream)
            assert sim.cuda.capturing(side.ptr)
            with side:
                y += x
            stream.wait_for(side)
            x *= 2.0
        assert not sim.cuda.capturing(side.ptr)
        (graph,) = made
        assert graph.size == 3
        assert x.numpy().tolist() == [1.0, 1.0]
        for _ in range(2):
            sim.launch(graph, stream.ptr)
        assert x.numpy().tolist() == [10.0, 10.0]
        assert y.numpy().tolist() == [7.0, 7.0]
        graph.destroy()
        with pytest.raises(CudaError, match="destroyed"):
            sim.launch(graph, stream.ptr)
    assert sim.faults == []


def test_a_graph_keeps_nothing_alive(sim: Simulation) -> None:
    stream = arrays.Stream()
    with stream:
        x = arrays.full(2, 1.0)
        with sim.capture(stream.ptr) as made:
            x += 1.0
        del x
        sim.launch(made[0], stream.ptr)
    assert "use after free" in sim.faults[0]


def _query_an_event_of_the_capture(sim: Simulation, stream: arrays.Stream) -> None:
    event = sim.cuda.create_event(0)
    sim.cuda.record(event, stream.ptr)
    sim.cuda.event_done(event)


def _wait_for_an_event_outside(sim: Simulation, stream: arrays.Stream) -> None:
    event, other = sim.cuda.create_event(0), sim.cuda.create_stream(0)
    sim.cuda.record(event, other)
    sim.cuda.wait_event(stream.ptr, event)


_ILLEGAL: dict[str, Callable[[Simulation, arrays.Stream], Any]] = {
    "query": _query_an_event_of_the_capture,
    "outside": _wait_for_an_event_outside,
    "synchronize": lambda sim, stream: stream.synchronize(),
    "stream query": lambda sim, stream: sim.cuda.stream_done(stream.ptr),
    "malloc": lambda sim, stream: sim.cuda.allocate(0, 8),
    "copy to the host": lambda sim, stream: arrays.empty(1).numpy(),
}


@pytest.mark.parametrize("what", _ILLEGAL)
def test_unsafe_calls_invalidate_a_capture(sim: Simulation, what: str) -> None:
    stream = arrays.Stream()
    with stream:
        arrays.full(1, 1.0)
        sim.begin_capture(stream.ptr, "global")
        with pytest.raises(CudaError, match="Capture"):
            _ILLEGAL[what](sim, stream)
        with pytest.raises(CudaError, match="Invalidated"):
            arrays.full(1, 1.0)
        with pytest.raises(CudaError, match="Invalidated"):
            sim.end_capture(stream.ptr)
        assert arrays.full(1, 1.0).numpy().tolist() == [1.0]


def test_a_fork_must_be_joined(sim: Simulation) -> None:
    stream, side = arrays.Stream(), arrays.Stream()
    with stream:
        x = arrays.full(1, 1.0)
        sim.begin_capture(stream.ptr)
        x += 1.0
        side.wait_for(stream)
        with side:
            x += 1.0
        with pytest.raises(CudaError, match="Unjoined"):
            sim.end_capture(stream.ptr)
        assert x.numpy().tolist() == [1.0]


def test_queries_of_other_threads_invalidate_a_global_capture_unless_they_ignore_captures(
    sim: Simulation,
) -> None:
    event, stream = sim.cuda.create_event(0), arrays.Stream()
    sim.cuda.record(event, 0)
    found: list[str] = []

    def ask(ignores: bool) -> None:
        if ignores:
            sim.cuda.ignore_captures()
        try:
            sim.cuda.event_done(event)
            found.append("asked")
        except CudaError as e:
            found.append(str(e).partition(":")[0])

    def elsewhere(ignores: bool) -> None:
        thread = threading.Thread(target=ask, args=(ignores,))
        thread.start()
        thread.join()

    sim.begin_capture(stream.ptr, "global")
    elsewhere(True)
    elsewhere(False)
    with pytest.raises(CudaError, match="cudaEventQuery was called"):
        sim.end_capture(stream.ptr)
    with sim.capture(stream.ptr, "relaxed"):
        elsewhere(False)
    assert found == ["asked", "cudaErrorStreamCaptureUnsupported", "asked"]


# --- the current device ---


@pytest.mark.parametrize(
    ("devices", "before", "after"), [(4, -1, 2), (4, 0, 0), (1, -1, 0), (2, -1, -1)], ids=str
)
def test_a_mesh_selects_the_device_of_the_local_rank(
    make: Make, monkeypatch: pytest.MonkeyPatch, devices: int, before: int, after: int
) -> None:
    """If the thread has none. With one visible device it is that one; with too few, none is selected."""
    sim = make(devices)
    sim.cuda.set_device(before)
    monkeypatch.setattr(streams, "_installed", sim.cuda)
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
        sim.cuda.set_device(-1)


# --- arrays ---


def test_arrays_of_every_layout_keep_to_their_memory(sim: Simulation) -> None:
    made = family("simulated")
    for dtype in (np.float32, np.int8, ml_dtypes.bfloat16, np.bool_):
        values = np.arange(6).reshape(3, 2).astype(dtype)
        for layout in made.layouts:
            held = made.hold(values, layout)
            assert held.read().tolist() == values.tolist()
            assert held.intact()
            assert held.array.contiguous is (layout == "contiguous")
        held = made.hold(values, "rows")
        spill = arrays.empty(values.nbytes, np.uint8)
        sim.cuda.copy(held.array.ptr, spill.ptr, values.nbytes, 0)
        assert not held.intact()


def test_buffers_of_simulated_arrays(sim: Simulation) -> None:
    stream = arrays.Stream()
    with stream:
        x = arrays.array(np.arange(6, dtype=np.float32).reshape(2, 3))
        plain, packed = as_buffer(x), as_buffer(x.T)
        assert (plain.ptr, plain.count, plain.stream) == (x.ptr, 6, stream.ptr)
        assert str(plain.device) == "cuda:0"
        assert (packed.shape, packed.count) == ((3, 2), 6)
        assert packed.ptr != x.ptr
        twice = arrays.full(6, 9, np.float32)
        sim.cuda.copy(packed.ptr, twice.ptr, 24, stream.ptr)
        assert x.numpy()[0, 0] == 0
        packed.write_back()
        assert (x.numpy() == 9).all()


def test_a_host_that_waits_for_a_finished_operation_is_ordered_after_it(sim: Simulation) -> None:
    side = arrays.Stream()
    x = arrays.full(8, 1.0)
    while not sim.cuda.stream(0).tail.done:
        time.sleep(0.001)
    sim.synchronize()
    with side:
        x += 1.0
    side.synchronize()
    assert sim.faults == []
