"""What ranks with a simulated device do in several tests of the NCCL backend, and in tests of other folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import unicoll as dist
from nccl_comm.backend import NCCLBackend
from tests.simulated_nccl import arrays, ranks
from tests.simulated_nccl.streams import LATER, Op
from tests.support.order import await_true

__all__ = [
    "backend_of",
    "busy",
    "calling",
    "connect",
    "error_of",
    "new_group",
    "timed",
    "untimed",
]


def connect() -> None:
    """One all_reduce, so that all are connected."""
    x = arrays.full(2, 1.0)
    dist.all_reduce(x)
    x.numpy()


def new_group(**options: Any) -> Any:
    """A group of NCCL alone of all ranks, connected when it is made."""
    return dist.new_group(backend="cuda:nccl", device_id=dist.get_rank(), pg_options=options or None)


def error_of(attempt: Callable[[], Any]) -> str:
    """Type and message of a call's error."""
    try:
        attempt()
    except dist.DistError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def backend_of(group: Any = None) -> NCCLBackend:
    """The NCCL backend of a group."""
    found = (group or dist.group.WORLD)._backends.for_device("cuda")
    assert isinstance(found, NCCLBackend)
    return found


@contextmanager
def calling(name: str, before: Callable[..., Any], after: Callable[[], Any] = int) -> Iterator[None]:
    """Within the block call functions before, with its arguments, and after one of NCCL's functions."""
    nccl = ranks.nccl()
    inner = getattr(nccl, name)

    def call(*arguments: Any) -> Any:
        before(*arguments)
        found = inner(*arguments)
        after()
        return found

    setattr(nccl, name, call)
    try:
        yield
    finally:
        delattr(nccl, name)


def busy(stream: int) -> Callable[[], None]:
    """Put an operation on a stream that runs until the returned function is called."""
    sim = ranks.simulation()
    finished = False

    def body(op: Op) -> Any:
        return None if finished else LATER

    op = sim.scheduler.put(sim.cuda.stream(stream), Op("busy", body))

    def finish() -> None:
        nonlocal finished
        with sim.scheduler.lock:
            finished = True
            if op.running:
                sim.scheduler.finish(op)

    return finish


def timed() -> dict[str, Any]:
    """Durations of operations on the device."""
    here = ranks.simulation()
    connect()
    group: Any = dist.group.WORLD
    x = arrays.full(4, 1.0)
    found: dict[str, Any] = {}
    work = group.all_reduce(x, async_op=True)
    found["not asked"] = error_of(work.duration)
    work.wait()
    view = group.using(timing=True)
    found["view"] = repr(view)
    made = []
    took = []
    for _ in range(10):
        await_true(
            lambda: not backend_of().resources.in_flight.operations
        )  # the watchdog has removed the last
        started = time.perf_counter()
        with here.hold():  # the device is idle for a while
            work = view.all_reduce(x, async_op=True)
            time.sleep(0.02)
        took.append(0 < work.duration() < time.perf_counter() - started - 0.02)
        made.append(sum(event.timing for event in here.cuda.events.values()))
    found["took"] = took
    found["again"] = work.duration() == work.duration()
    dist.barrier(group=view, async_op=True).duration()  # on the host's backend
    found["events"] = set(made)
    other = new_group(timing=True)
    found["barrier"] = dist.barrier(group=other, async_op=True).duration() > 0
    found["coalesced"] = other.all_reduce_coalesced([x, arrays.full(2, 1.0)], async_op=True).duration() > 0
    work = other.using(timing=False).all_reduce(x, async_op=True)
    found["off"] = error_of(work.duration)
    work.wait()
    stream = arrays.Stream()
    with stream:
        y = arrays.full(4, 1.0)
        stream.synchronize()
        with here.capture(stream.ptr) as graphs:
            work = other.all_reduce(y, async_op=True)
            work.wait()
        found["captured"] = error_of(work.duration)
    graphs[0].destroy()
    dist.destroy_process_group(other)
    return found


def untimed() -> int:
    """The number of events with timing when no durations are measured."""
    x = arrays.full(4, 1.0)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x)
    return sum(event.timing for event in ranks.simulation().cuda.events.values())


def timed_by_a_host_backend() -> list[bool]:
    """Durations of operations on device arrays by a backend of the host, sends and receives included."""
    me, n = dist.get_rank(), dist.get_world_size()
    view: Any = dist.group.WORLD.using(timing=True)  # type: ignore[union-attr]
    x, y, sent, first, second = (
        arrays.full((4, 4), 1.0) for _ in range(5)
    )  # no array is in two operations at once
    works = [view.all_reduce(x, async_op=True), view.all_reduce(y.T, async_op=True)]
    works += [view.irecv(first, (me - 1) % n), view.isend(sent, (me + 1) % n)]
    works += view.batch_isend_irecv([(True, sent, (me + 1) % n, 0), (False, second, (me - 1) % n, 0)])
    return [work.duration() > 0 for work in works]
