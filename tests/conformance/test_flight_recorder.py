"""The flight recorder: what is recorded of calls that have ended, wait, failed, or are enqueued on a device."""

from __future__ import annotations

import _thread
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.simulated_nccl import arrays
from tests.simulated_nccl.ranks import run as run_simulated
from tests.support.memory import freed
from tests.support.on_ranks import on_ranks
from tests.support.order import await_true, await_word, send_word
from unicoll.calls import flight_recorder
from unicoll.calls.call_site import caller_frame
from unicoll.calls.flight_recorder import ring
from unicoll.diagnosis import wait_monitor
from unicoll.diagnosis.recorder_contents import RecordedCall, recorded_calls
from unicoll.group import dispatcher


def _facts(call: RecordedCall) -> tuple[Any, ...]:
    return call.describe(), call.seq, call.state, call.nbytes, call.blocking, call.peer, call.tag


def _line(call: RecordedCall) -> str:
    """The text of the line at which a call was made."""
    path, _, line = call.site.rpartition(":")
    assert path == __file__, call.site
    with open(path, encoding="utf-8") as source:
        return source.read().splitlines()[int(line) - 1].strip()


@on_ranks(3)
def test_calls_of_each_kind() -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    ring().clear()
    x = np.ones((2, 3), np.float32)
    group: Any = dist.group.WORLD
    dist.all_reduce(x)
    group.all_reduce(x, dist.ReduceOp.MAX)
    dist.broadcast(x, src=1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    dist.all_gather([np.empty_like(x) for _ in range(n)], x)
    if me == 0:
        dist.send(x, 1, tag=7)
    elif me == 1:
        dist.recv(x, 0, tag=7)
    dist.all_reduce_coalesced([x, x[0].copy()])
    dist.barrier()
    calls = recorded_calls()
    messages = [("send(float32[2, 3], peer=1, tag=7)", 1), ("recv(float32[2, 3], peer=0, tag=7)", 0)]
    first = calls[0].seq
    assert [_facts(c) for c in calls] == [
        ("all_reduce(float32[2, 3], SUM)", first, "completed", 24, True, -1, 0),
        ("all_reduce(float32[2, 3], MAX)", first + 1, "completed", 24, True, -1, 0),
        ("broadcast(float32[2, 3], root=1)", first + 2, "completed", 24, True, -1, 0),
        ("all_reduce(float32[2, 3], SUM)", first + 3, "completed", 24, False, -1, 0),
        ("all_gather(float32[2, 3])", first + 4, "completed", 24, True, -1, 0),
        *[(text, 0, "completed", 24, True, peer, 7) for text, peer in messages[me : me + 1]],
        ("all_reduce(float32[2, 3], SUM)", first + 5, "completed", 24, False, -1, 0),
        ("all_reduce(float32[3], SUM)", first + 5, "completed", 12, False, -1, 0),
        ("barrier()", first + 6, "completed", 0, True, -1, 0),
    ]
    lines = [_line(c) for c in calls]
    assert lines[:2] == ["dist.all_reduce(x)", "group.all_reduce(x, dist.ReduceOp.MAX)"]
    assert (lines[2], lines[-1]) == ("dist.broadcast(x, src=1)", "dist.barrier()")
    assert all(0 < c.created <= c.started <= c.ended <= time.monotonic() for c in calls)
    assert {(c.group, c.ranks, c.backend) for c in calls} == {("world", (0, 1, 2), "gloo")}


@on_ranks(2)
def test_call_sites_of_functions_and_methods() -> None:
    me, n = dist.get_rank(), dist.get_world_size()
    x, all_x = np.ones(n), [np.ones(n) for _ in range(n)]
    ring().clear()
    whole: Any = dist.group.WORLD
    for group in (None, whole, dist.new_group()):
        dist.reduce(x, 0, group=group)
        dist.all_to_all(all_x, all_x, group=group)
        dist.gather(x, all_x if me == 0 else None, 0, group=group)
        dist.scatter(x, all_x if me == 0 else None, 0, group=group)
        if me == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
    whole.scan(x)
    whole.gather(x, all_x if me == 0 else None, 0)
    whole.using(timeout=20).barrier()
    message = "send" if me == 0 else "recv"
    beginnings = [f"dist.{op}(" for op in ("reduce", "all_to_all", "gather", "scatter", message)] * 3
    beginnings += ["whole.scan(", "whole.gather(", "whole.using("]
    lines = [_line(c) for c in recorded_calls() if c.group == "world" or c.op != "barrier"]
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)


@on_ranks(2)
def test_a_call_without_a_call_site() -> None:
    """Of a thread that runs nothing but a public function."""
    ring().clear()
    _thread.start_new_thread(dist.all_reduce, (np.ones(1),))
    deadline = time.monotonic() + 60
    while not ring() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(recorded_calls()) == 1


def test_a_users_module_whose_name_begins_as_the_librarys() -> None:
    names = {"__name__": "unicoll_train", "getframe": sys._getframe}
    exec("frame = getframe()", names)
    assert caller_frame(names["frame"]).f_globals is names  # type: ignore[arg-type]


@on_ranks(2, env={})
def test_calls_that_fail() -> None:
    """Rank 0 calls another operation: the calls of all ranks are failed ones."""
    group = dist.new_group([0, 1])
    ring().clear()
    for start in (False, True):
        with pytest.raises(dist.CollectiveMismatchError):
            if dist.get_rank() == 0:
                work = dist.all_reduce(np.ones(3), group=group, async_op=start)
            else:
                work = dist.broadcast(np.ones(3), 0, group=group, async_op=start)
            if work is not None:
                work.wait()
    calls = [(c.op, c.state, c.error.partition(":")[0]) for c in recorded_calls()]
    op = "broadcast" if dist.get_rank() else "all_reduce"
    assert calls == [(op, "failed", "CollectiveMismatchError")] * 2


@on_ranks(2)
def test_calls_that_wait_and_calls_behind_them() -> None:
    """What a thread sees of a call in which another thread waits, and of the calls behind it."""
    if dist.get_rank() != 0:
        await_word()
        dist.all_reduce(np.ones(5))
        dist.all_reduce(np.ones(6), async_op=True).wait()  # type: ignore[union-attr]
        dist.barrier()
        return
    ring().clear()
    thread = threading.Thread(target=dist.all_reduce, args=(np.ones(5),))
    thread.start()
    await_true(lambda: [c.seq for c in recorded_calls() if c.seq])
    work = dist.all_reduce(np.ones(6), async_op=True)
    assert work is not None
    await_true(lambda: [c.state for c in recorded_calls() if c.seq] == ["started", "scheduled"])
    seen = [(c.describe(), c.state, c.seq, c.ended) for c in recorded_calls()]
    send_word(1)
    thread.join()
    work.wait()
    dist.barrier()
    number = seen[0][2]
    assert number > 0
    assert seen == [
        ("all_reduce(float64[5], SUM)", "started", number, 0),
        ("all_reduce(float64[6], SUM)", "scheduled", number + 1, 0),
    ]
    assert [(c.describe(), c.state, c.seq, c.ended > 0) for c in recorded_calls()] == [
        ("all_reduce(float64[5], SUM)", "completed", number, True),
        ("all_reduce(float64[6], SUM)", "completed", number + 1, True),
        ("barrier()", "completed", number + 2, True),
    ]


@on_ranks(2)
def test_arrays_are_not_kept_alive() -> None:
    for start in (False, True):
        x = np.ones(1000)
        reference = weakref.ref(x)
        work = dist.all_reduce(x, async_op=start)
        if work is not None:
            work.wait()
        del x, work
        assert freed(reference) == [True]


@on_ranks(2, env={})
def test_arrays_are_not_kept_alive_by_the_monitor() -> None:
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
    assert freed(reference) == [True]


@pytest.mark.parametrize(
    ("env", "entries"), [({"UNICOLL_FLIGHT_RECORDER": str(entries)}, entries) for entries in (0, 100)]
)
@on_ranks(2)
def test_the_size_of_the_ring(env: dict[str, str], entries: int) -> None:
    x = np.ones(1)
    for _ in range(entries + 50):
        dist.all_reduce(x)
    assert len(recorded_calls()) == entries


@on_ranks(2, env={"UNICOLL_FLIGHT_RECORDER": "0"})
def test_a_ring_of_no_entries_costs_nothing() -> None:
    """Steps for the recorder raise here."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("this step is for the recorder only")

    me = dist.get_rank()
    x, y = np.ones(1), np.ones(1)
    dispatcher.monotonic = dispatcher.caller_frame = flight_recorder.entry = refuse  # type: ignore[assignment]
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
    assert (x.item(), y.item(), recorded_calls()) == (8.0, 2.0, [])


@on_ranks(2, start=run_simulated)
def test_calls_on_a_device_end_when_the_device_has_ended_them() -> None:
    """Rank 0's calls are enqueued while the other rank has not made them."""
    me = dist.get_rank()
    x = arrays.full(4, me + 1, np.float32)
    dist.all_reduce(x)
    dist.barrier()
    ring().clear()
    if me == 1:
        await_word()
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if me == 0:
        time.sleep(0.1)
        enqueued = [(c.op, c.state, c.blocking) for c in recorded_calls()]
        assert enqueued == [("all_reduce", "started", False)] * 2
        send_word(1)
    work.synchronize()
    # The watchdog notices the end of calls for which no thread waits.
    await_true(lambda: not any(c.state == "started" for c in recorded_calls()))
    ended = [(c.op, c.state, c.blocking) for c in recorded_calls()]
    assert ended == [("all_reduce", "completed", False)] * 2
