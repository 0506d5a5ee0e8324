"""Programs whose results a missing wait, or memory freed too early, makes wrong: producers are late, consumers early.

Each takes a kit and raises AssertionError for a wrong result; some return measurements.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import unicoll as dist
from tests.gpu.check import call_counts
from tests.gpu.check.kits import Kit
from tests.gpu.check.record import Skip

__all__ = ["PROGRAMS", "every_operation", "expect"]

_COUNT, _FEW = 1 << 20, 1 << 12
_LATE_S = 0.2
_LONG_S = 0.6
Program = Callable[[Kit], Any]


def _count(k: Kit) -> int:
    """Elements of an array; few if times are meaningless."""
    return _FEW if k.simulated else _COUNT


def _start(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    work = call(*args, async_op=True, **more)
    assert work is not None
    return work


def _sum(k: Kit) -> int:
    n = dist.get_world_size()
    return n * (n + 1) // 2


def expect(k: Kit, array: Any, value: float, what: str) -> None:
    """Compare an array's elements with the value that all of them should have."""
    found = np.asarray(k.numpy(array))
    wrong = int((found != value).sum())
    assert not wrong, f"{what}: {wrong} of {found.size} elements are not {value}: {found[found != value][:4]}"


def a_late_producer_on_the_current_stream(k: Kit) -> None:
    """The array is written long after the call: the group's stream must wait for it."""
    x = k.full(_count(k), 0.0)
    k.synchronize()
    with k.late(_LATE_S):
        x += dist.get_rank() + 1
        work = _start(dist.all_reduce, x)
        work.wait()
    expect(k, x, _sum(k), "all_reduce of a late array")


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
    expect(k, y, 2 * _sum(k), "all_reduce of an array of a side stream")


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
        expect(k, x, _sum(k) + 1, "a blocking all_reduce between two kernels")


def the_result_is_used_right_after_wait(k: Kit) -> None:
    """wait() orders the current stream after the operation."""
    x = k.full(_count(k), float(dist.get_rank() + 1))
    k.synchronize()
    with k.late(_LATE_S):
        work = _start(dist.all_reduce, x)
        work.wait()
        y = x * 2
    expect(k, y, 2 * _sum(k), "a kernel right after wait()")


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
                place = k.ptr(x)
                work = _start(dist.all_gather_into_tensor, out, x)
            with elsewhere:
                work.wait()  # so that the array's own stream is not ordered after the end
            del work, x
            with mine:
                again = k.full(_count(k), 99.0)
            reused = k.ptr(again) == place
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
    for _, call in calls:  # connections between ranks are made at the first use of each
        call(False)
        call(True).synchronize()
    k.synchronize()
    before, took = call_counts.of_this_thread(), {}
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
    counts = call_counts.of_this_thread() - before
    k.synchronize()
    assert busy, f"the calls took {host_s:.3f} s, and the device was through when they returned"
    waits = {name: counts[name] for name in call_counts.WAITING_CALLS if counts[name]}
    assert not waits, f"this thread waited for the device: {waits}"
    return {
        "host_s": host_s,
        "until_released_s": whole_s,
        "device_still_busy": busy,
        "us_by_operation": took,
        "asked_of_cuda": _named(counts),
    }


def _named(counts: Counter[str]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if n}


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
            expect(k, x, _sum(k) + 9 * dist.get_world_size() + i, f"stream {i}")


PROGRAMS: list[Program] = [
    a_late_producer_on_the_current_stream,
    a_late_producer_on_a_side_stream,
    a_blocking_call_on_a_side_stream,
    the_result_is_used_right_after_wait,
    strided_arrays_are_unpacked_in_order,
    memory_in_flight_is_not_used_again,
    memory_comes_back,
    no_call_waits_for_the_device,
    wait_orders_and_synchronize_blocks,
    callbacks_come_at_the_end,
    several_streams_take_turns,
]
