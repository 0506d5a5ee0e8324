"""Programs whose results a missing wait, or memory freed too early, makes wrong: producers are late, consumers early.

Each takes a kit and raises AssertionError for a wrong result; some return measurements. Then operations in CUDA graphs,
and a trace of the runtime's calls by torch's profiler.
"""

from __future__ import annotations

import gc
import importlib
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check.kits import Kit, kit
from tests.gpu.check.rank_jobs import cuda_calls, expect, sum_of_ranks
from tests.gpu.check.record import Skip
from unicoll.arrays.conversion import as_buffer

_COUNT, _FEW = 1 << 20, 1 << 12
_LATE_S = 0.2
_LONG_S = 0.6
_STEPS = 20
_WAITING_CALLS = ("event_done", "stream_done", "allocate", "free", "pin", "unpin", "destroy_stream")
"""Calls of CUDA that query the device, or may wait for it."""
Program = Callable[[Kit], Any]


def _count(k: Kit) -> int:
    """Elements of an array; few if times are meaningless."""
    return _FEW if k.simulated else _COUNT


def _start(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    work = call(*args, async_op=True, **more)
    assert work is not None
    return work


def a_late_producer_and_an_early_consumer(k: Kit) -> None:
    """The group's stream must wait for the array, which is written long after the call, and wait() orders the current
    stream after the operation."""
    for _ in range(2):  # the first time CuPy compiles its kernels, which takes longer than the delay
        x = k.full(_count(k), 0.0)
        k.synchronize()
        with k.late(_LATE_S):
            x += dist.get_rank() + 1
            work = _start(dist.all_reduce, x)
            work.wait()
            y = x * 2
        expect(k, x, sum_of_ranks(), "all_reduce of a late array")
        expect(k, y, 2 * sum_of_ranks(), "a kernel right after wait()")


def a_late_producer_on_a_side_stream(k: Kit) -> None:
    """A late producer on another stream; the result is used on the main stream after wait()."""
    side = k.stream()
    x = k.full(_count(k), 0.0)
    k.synchronize()
    with side, k.late(_LATE_S):
        x += dist.get_rank() + 1
        work = _start(dist.all_reduce, x)
    work.wait()
    y = x * 2
    expect(k, y, 2 * sum_of_ranks(), "all_reduce of an array of a side stream")


def a_blocking_call_on_a_side_stream(k: Kit) -> None:
    """A blocking call runs on the caller's stream, in order."""
    side = k.stream()
    x = k.full(_count(k), 0.0)
    k.synchronize()
    with side, k.late(_LATE_S):
        x += dist.get_rank() + 1
        dist.all_reduce(x)
        x += 1
    with side:
        expect(k, x, sum_of_ranks() + 1, "a blocking all_reduce between two kernels")


def strided_arrays_are_unpacked_in_order(k: Kit) -> None:
    """Packed before, unpacked after, both on the device."""
    x = k.full(2 * _count(k), 1.0)
    k.synchronize()
    with k.late(_LATE_S):
        x += 1
        work = _start(dist.all_reduce, x[::2])
        work.wait()
        y = x * 1
    found = np.asarray(k.numpy(y))
    assert (found[::2] == 2 * dist.get_world_size()).all(), found[:8]
    assert (found[1::2] == 2).all(), found[:8]


def memory_in_flight_is_not_used_again(k: Kit) -> None:
    """An array is dropped before the group's stream has used it, and memory of the same size is allocated and
    written."""
    n, me = dist.get_world_size(), dist.get_rank()
    blocker, mine, elsewhere = k.stream(), k.stream(), k.stream()
    for _ in range(3):
        small, out = k.full(8, 1.0), k.full(n * _count(k), -1.0)
        k.synchronize()
        with blocker, k.late(_LATE_S):
            first = _start(dist.all_reduce, small)  # the group's stream now waits for the delay
            with mine:
                x = k.full(_count(k), float(me + 1))
                place = as_buffer(x).ptr
                work = _start(dist.all_gather_into_tensor, out, x)
            with elsewhere:
                work.wait()  # so that the array's own stream is not ordered after the end
            del work, x
            with mine:
                again = k.full(_count(k), 99.0)
            reused = as_buffer(again).ptr == place
        first.wait()
        with elsewhere:
            found = np.asarray(k.numpy(out)).reshape(n, _count(k))
        assert (found == np.arange(1, n + 1)[:, None]).all(), f"sent as {me + 1}, gathered as {found[:, 0]}"
        assert not reused, "the memory of an array in flight was handed out again"
        del again


def memory_comes_back(k: Kit) -> None:
    """Once all operations are done and waited for, no references to the arrays remain."""
    x = k.full(_count(k), 1.0)
    try:
        gone: Any = weakref.ref(x)
    except TypeError:
        raise Skip(f"arrays of {k.name} cannot be referred to weakly") from None
    work = _start(dist.all_reduce, x)
    work.wait()
    work.synchronize()
    del work, x
    deadline = time.monotonic() + 5.0
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    holders = [type(h).__name__ for h in gc.get_referrers(gone())] if gone() is not None else []
    assert gone() is None, f"something still holds the array: {holders}"


def every_operation(k: Kit) -> list[tuple[str, Callable[[bool], Any]]]:
    """Every collective by name, as a function of ``async_op``; the arrays are made beforehand."""
    n, me = dist.get_world_size(), dist.get_rank()

    def one(count: int = 1024) -> Any:
        return k.full(count, float(me))

    def many() -> list[Any]:
        return [one() for _ in range(n)]

    a, b, wide, wider = one(), one(), one(1024 * n), one(1024 * n)
    lists, more = many(), many()
    return [
        ("all_reduce", lambda w: dist.all_reduce(a, async_op=w)),
        ("broadcast", lambda w: dist.broadcast(a, 0, async_op=w)),
        ("reduce", lambda w: dist.reduce(a, 0, async_op=w)),
        ("all_gather", lambda w: dist.all_gather(lists, a, async_op=w)),
        ("all_gather_into_tensor", lambda w: dist.all_gather_into_tensor(wide, a, async_op=w)),
        ("reduce_scatter", lambda w: dist.reduce_scatter(a, lists, async_op=w)),
        ("reduce_scatter_tensor", lambda w: dist.reduce_scatter_tensor(a, wide, async_op=w)),
        ("all_to_all", lambda w: dist.all_to_all(lists, more, async_op=w)),
        ("all_to_all_single", lambda w: dist.all_to_all_single(wide, wider, async_op=w)),
        ("gather", lambda w: dist.gather(a, lists if me == 0 else None, 0, async_op=w)),
        ("scatter", lambda w: dist.scatter(a, lists if me == 0 else None, 0, async_op=w)),
        ("all_reduce_coalesced", lambda w: dist.all_reduce_coalesced([a, b], async_op=w)),
        ("all_reduce of a strided array", lambda w: dist.all_reduce(wide[::2], async_op=w)),
    ]


def no_call_waits_for_the_device(k: Kit) -> dict[str, Any]:
    """Every operation, blocking and not, while the device is busy, and the CUDA calls that it makes."""
    calls = every_operation(k)
    if not k.simulated:
        for _, call in calls:  # connections between ranks are made at the first use of each
            call(False)
            call(True).synchronize()
    k.synchronize()
    before, took = cuda_calls(), {}
    with k.late(_LONG_S):
        began = time.perf_counter()
        for name, call in calls:
            start = time.perf_counter()
            call(False)
            call(True).wait()
            took[name] = round((time.perf_counter() - start) * 1e6, 1)
        host_s = time.perf_counter() - began
        busy = k.busy()
    whole_s = time.perf_counter() - began
    counts = cuda_calls() - before
    k.synchronize()
    assert busy, f"the calls took {host_s:.3f} s, and the device was through when they returned"
    waits = {name: counts[name] for name in _WAITING_CALLS if counts[name]}
    assert not waits, f"this thread waited for the device: {waits}"
    return {
        "host_s": host_s,
        "until_released_s": whole_s,
        "device_still_busy": busy,
        "us_by_operation": took,
        "asked_of_cuda": dict(+counts),
    }


def wait_orders_and_synchronize_blocks(k: Kit) -> dict[str, float]:
    """wait() returns while the device is still busy, synchronize() only when it is done."""
    x = k.full(_count(k), 1.0)
    k.synchronize()
    with k.late(_LATE_S):
        work = _start(dist.all_reduce, x)
        began = time.perf_counter()
        work.wait()
        waited = time.perf_counter() - began
        assert k.busy(), f"wait() took {waited:.3f} s, and the device was through"
        assert not work.is_completed()
    work.synchronize()
    blocked = time.perf_counter() - began
    assert work.is_completed()
    assert work.is_success()
    return {"wait_s": waited, "synchronize_s": blocked}


def callbacks_come_at_the_end(k: Kit) -> None:
    """A future has the arrays. It is done once the device is; torch's at once, and its wait is the stream's."""
    x = k.full(_count(k), 1.0)
    k.synchronize()
    with k.late(_LATE_S):
        future = _start(dist.all_reduce, x).get_future()
        assert future.done() == (k.name == "torch")
    assert future.wait()[0] is x
    expect(k, x, dist.get_world_size(), "the array of a future")


def several_streams_take_turns(k: Kit) -> None:
    """Three streams with different delays and many operations each; every one waits for its own."""
    streams = [k.stream() for _ in range(3)]
    arrays = [k.full(4096, 0.0) for _ in streams]
    k.synchronize()
    for turn in range(10):
        for i, (stream, x) in enumerate(zip(streams, arrays, strict=True)):
            with stream:
                if turn % 4 == 0:
                    k.delay(0.01 * (i + 1))
                x *= 0
                x += dist.get_rank() + 1 + turn
                _start(dist.all_reduce, x).wait()
                x += i
    for i, (stream, x) in enumerate(zip(streams, arrays, strict=True)):
        with stream:
            expect(k, x, sum_of_ranks() + 9 * dist.get_world_size() + i, f"stream {i}")


# --- graphs -----------------------------------------------------------------------------------------------------------


def replayed(k: Kit, me: int, n: int, reduce: Callable[[Any], object]) -> Any:
    """Capture a sum over the ranks and a kernel after it, and replay them on new values, which only the replay can have
    used; and a sum outside the graph, after it.

    Args:
        k: the array library.
        me, n: this rank and the number of ranks.
        reduce: replaces an array by its sum over the ranks.

    Returns:
        The array.
    """
    stream = k.stream()
    with stream:
        x, y = k.full(_FEW, 1.0), k.full(_FEW, 0.0)

    def body() -> None:
        reduce(x)
        k.compute(y, lambda xp, given: given * 2, x)

    with stream:
        body()  # makes connections and fills the pool, which may not allocate during a capture
    k.synchronize()
    graph = k.capture(stream, body)
    for turn in range(3):
        with stream:
            k.compute(x, lambda xp, given, value=float(me + turn): given * 0 + value, x)
            graph.launch()
            expect(k, y, 2.0 * sum(r + turn for r in range(n)), f"replay {turn}")
    with stream:
        reduce(x)
    k.synchronize()
    graph.close()
    return x


def a_graph_of_a_blocking_call(k: Kit) -> None:
    """On the capturing stream itself."""
    replayed(k, dist.get_rank(), dist.get_world_size(), dist.all_reduce)


def a_graph_of_an_asynchronous_call(k: Kit) -> None:
    """On the group's stream, and wait(); behind a blocking call in the same graph."""
    n, other = dist.get_world_size(), k.full(8, 1.0)
    k.synchronize()

    def reduce(x: Any) -> None:
        dist.all_reduce(other)
        _start(dist.all_reduce, x).wait()

    replayed(k, dist.get_rank(), n, reduce)
    expect(k, other, n**5, "a blocking call before, in three replays, and after")


def a_graph_of_a_coalesced_call(k: Kit) -> None:
    """Both halves of an array in one group call."""

    def reduce(x: Any) -> None:
        _start(dist.all_reduce_coalesced, [x[: _FEW // 2], x[_FEW // 2 :]]).wait()

    replayed(k, dist.get_rank(), dist.get_world_size(), reduce)


def a_graph_of_an_exchange(k: Kit) -> None:
    """Sends and receives in a graph: each rank receives from every rank."""
    n, me = dist.get_world_size(), dist.get_rank()
    given = k.full(n * 16, float(me))
    taken = k.full(n * 16, -1.0)
    stream = k.stream()
    k.synchronize()
    with stream:
        dist.all_to_all_single(taken, given)
    k.synchronize()
    graph = k.capture(stream, lambda: dist.all_to_all_single(taken, given))
    with stream:
        k.compute(given, lambda xp, x: x + 1, given)
        graph.launch()
        found = np.asarray(k.numpy(taken))
    graph.close()
    assert (found.reshape(n, 16) == np.arange(1, n + 1)[:, None]).all(), found[::16]


def what_cannot_be_recorded_says_so(k: Kit) -> list[str]:
    """The first operation of a group connects its ranks; in a graph it is refused, and the group works afterwards."""
    fresh: Any = dist.new_group(list(range(dist.get_world_size())))
    stream = k.stream()
    x = k.full(8, 1.0)
    k.synchronize()
    with stream:
        dist.all_reduce(x)
        k.compute(x, lambda xp, given: given * 1, x)
    k.synchronize()
    said: list[str] = []

    def body() -> None:
        k.compute(x, lambda xp, given: given * 1, x)
        try:
            dist.all_reduce(x, group=fresh)
        except dist.DistArgumentError as e:
            said.append(str(e))

    k.capture(stream, body).close()
    assert said, "a first operation was recorded"
    assert "graph" in said[0], said
    assert "do one before capturing" in said[0], said
    dist.all_reduce(x, group=fresh)
    k.synchronize()
    dist.destroy_process_group(fresh)
    return said


PROGRAMS: list[Program] = [
    a_late_producer_and_an_early_consumer,
    a_late_producer_on_a_side_stream,
    a_blocking_call_on_a_side_stream,
    strided_arrays_are_unpacked_in_order,
    memory_in_flight_is_not_used_again,
    memory_comes_back,
    no_call_waits_for_the_device,
    wait_orders_and_synchronize_blocks,
    callbacks_come_at_the_end,
    several_streams_take_turns,
    a_graph_of_a_blocking_call,
    a_graph_of_an_asynchronous_call,
    a_graph_of_a_coalesced_call,
    a_graph_of_an_exchange,
    what_cannot_be_recorded_says_so,
]


# --- a trace ----------------------------------------------------------------------------------------------------------


def trace() -> dict[str, Any] | str:
    """Calls of the CUDA runtime, by torch's profiler, in a stretch of asynchronous operations that alternate with
    kernels, with one synchronization at the end; or the reason why there is no trace."""
    torch: Any = importlib.import_module("torch")
    k = kit("torch")
    arrays = [k.full(1 << 16, 1.0) for _ in range(4)]

    def steps() -> None:
        for _ in range(_STEPS):
            works = [_start(dist.all_reduce, x, op=dist.ReduceOp.AVG) for x in arrays]
            for work, x in zip(works, arrays, strict=True):
                work.wait()
                x.mul_(1.0)

    steps()
    k.synchronize()
    own = _traced_calls(torch, lambda: None)
    calls = _traced_calls(torch, steps) - own
    k.synchronize()
    if not calls:
        return "torch's profiler sees no calls of CUDA here"
    waiting = {name: n for name, n in calls.items() if name.endswith("Synchronize")}
    return {"steps": _STEPS, "operations": 4 * _STEPS, "calls": dict(calls), "waiting": waiting}


def _traced_calls(torch: Any, body: Callable[[], object]) -> Counter[str]:
    """Calls of the CUDA runtime and driver, or of HIP, by name, with the profiler's own."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as made:
        body()
    return Counter(e.name for e in made.events() if re.match("cuda|cu[A-Z]|hip[A-Z]", e.name))
