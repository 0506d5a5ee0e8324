"""Functions that ranks run in the tests of the flight recorder."""

from __future__ import annotations

import _thread
import threading
import time
import weakref
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.memory import freed
from tests.support.order import await_true, await_word, send_word
from unicoll.backend import flight_recorder, wait_monitor
from unicoll.backend.flight_recorder import ring
from unicoll.group import dispatcher
from unicoll.group.recorded_calls import RecordedCall, recorded_calls

HERE = __file__


def _facts(call: RecordedCall) -> tuple[Any, ...]:
    return call.describe(), call.seq, call.state, call.nbytes, call.blocking, call.peer, call.tag


def _line(call: RecordedCall) -> str:
    """The text of the line at which a call was made."""
    path, _, line = call.site.rpartition(":")
    assert path == HERE, call.site
    with open(path, encoding="utf-8") as source:
        return source.read().splitlines()[int(line) - 1].strip()


def several() -> dict[str, Any]:
    """Calls of each kind: what is recorded of them."""
    me, n = dist.get_rank(), dist.get_world_size()
    ring().clear()
    x = np.ones((2, 3), np.float32)
    group = dist.group.WORLD
    dist.all_reduce(x)
    group.all_reduce(x, dist.ReduceOp.MAX)
    dist.broadcast(x, src=1)
    works = [dist.all_reduce(x, async_op=True)]
    works[0].wait()
    dist.all_gather([np.empty_like(x) for _ in range(n)], x)
    if me == 0:
        dist.send(x, 1, tag=7)
    elif me == 1:
        dist.recv(x, 0, tag=7)
    dist.all_reduce_coalesced([x, x[0]])
    dist.barrier()
    calls = recorded_calls()
    ordered = all(0 < c.created <= c.started <= c.ended <= time.monotonic() for c in calls)
    return {
        "calls": [_facts(c) for c in calls],
        "lines": [_line(c) for c in calls],
        "ordered": ordered,
        "groups": {(c.group, c.ranks, c.backend) for c in calls},
    }


def lines_of_functions_and_methods() -> tuple[list[str], list[str]]:
    """The recorded lines of blocking calls, and what they should begin with."""
    me, n = dist.get_rank(), dist.get_world_size()
    x, all_x = np.ones(n), [np.ones(n) for _ in range(n)]
    ring().clear()
    for group in (None, dist.group.WORLD, dist.new_group()):
        dist.reduce(x, 0, group=group)
        dist.all_to_all(all_x, all_x, group=group)
        dist.gather(x, all_x if me == 0 else None, 0, group=group)
        dist.scatter(x, all_x if me == 0 else None, 0, group=group)
        if me == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
    whole = dist.group.WORLD
    assert whole is not None
    whole.scan(x)
    whole.gather(x, all_x if me == 0 else None, 0)
    whole.using(timeout=20).barrier()
    message = "send" if me == 0 else "recv"
    functions = [f"dist.{op}(" for op in ("reduce", "all_to_all", "gather", "scatter", message)] * 3
    methods = ["whole.scan(", "whole.gather(", "whole.using("]
    return [
        _line(c) for c in recorded_calls() if c.group == "world" or c.op != "barrier"
    ], functions + methods


def called_by_no_python_code() -> int:
    """A thread that runs nothing but a public function; the number of calls recorded."""
    ring().clear()
    _thread.start_new_thread(dist.all_reduce, (np.ones(1),))
    deadline = time.monotonic() + 60
    while not ring() and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(recorded_calls())


def failing() -> list[Any]:
    """Rank 0 calls another operation: the calls of all ranks are failed ones."""
    group = dist.new_group(list(range(dist.get_world_size())))
    ring().clear()
    found = []
    for start in (False, True):
        try:
            if dist.get_rank() == 0:
                work = dist.all_reduce(np.ones(3), group=group, async_op=start)
            else:
                work = dist.broadcast(np.ones(3), 0, group=group, async_op=start)
            if work is not None:
                work.wait()
        except dist.DistError as e:
            found.append(type(e).__name__)
    return [found, [(c.op, c.state, c.error.partition(":")[0]) for c in recorded_calls()]]


def in_progress() -> list[tuple[Any, ...]]:
    """What a thread sees of a call in which another thread waits, and of the calls behind it."""
    if dist.get_rank() != 0:
        await_word()
        dist.all_reduce(np.ones(5))
        dist.all_reduce(np.ones(6), async_op=True).wait()
        dist.barrier()
        return []
    ring().clear()
    thread = threading.Thread(target=dist.all_reduce, args=(np.ones(5),))
    thread.start()
    await_true(lambda: [c.seq for c in recorded_calls() if c.seq])
    work = dist.all_reduce(np.ones(6), async_op=True)
    await_true(lambda: [c.state for c in recorded_calls() if c.seq] == ["started", "scheduled"])
    seen = [(c.describe(), c.state, c.seq, c.ended) for c in recorded_calls()]
    send_word(1)
    thread.join()
    work.wait()
    dist.barrier()
    later = [(c.describe(), c.state, c.seq, c.ended > 0) for c in recorded_calls()]
    return [*seen, *later]


def keeps_no_arrays() -> list[bool]:
    """Arrays of calls that have ended are freed, though the calls are recorded."""
    found = []
    for start in (False, True):
        x = np.ones(1000)
        reference = weakref.ref(x)
        work = dist.all_reduce(x, async_op=start)
        if work is not None:
            work.wait()
        del x, work
        found += freed(reference)
    return found


def keeps_no_arrays_seen_waiting() -> bool:
    """The array of a call that the wait monitor has seen is freed, though the monitor does not look again."""
    if dist.get_rank() == 1:
        await_word()
    else:
        world: Any = dist.group.WORLD
        monitor = world.job.shared("wait monitor", None)
        check = monitor._check

        def check_until_seen() -> None:
            check()
            if monitor._seen:
                wait_monitor._POLL_S = 3600.0
                monitor._check = check
                send_word(1)

        monitor._check = check_until_seen
    x = np.ones(1000)
    reference = weakref.ref(x)
    dist.all_reduce(x)
    del x
    return freed(reference) == [True]


def many(size: int) -> int:
    """The number of entries after more calls than the ring has place for."""
    x = np.ones(1)
    for _ in range(size + 50):
        dist.all_reduce(x)
    return len(recorded_calls())


def unrecorded() -> list[float]:
    """Calls of each kind, with a recorder of no entries whose steps raise."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("this step is for the recorder only")

    me = dist.get_rank()
    x, y = np.ones(1), np.ones(1)
    dispatcher.monotonic = dispatcher.user_frame = flight_recorder.entry = refuse  # type: ignore[assignment]
    flight_recorder.PendingEntry = refuse  # type: ignore[misc, assignment]
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.gather(x, [np.empty(1), np.empty(1)] if me == 0 else None, dst=0)
    dist.all_reduce_coalesced([x, y])
    if me == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if me == 0 else dist.irecv, y, 1 - me)]):
        work.wait()
    return [x.item(), y.item(), len(recorded_calls())]
