"""Ranks that wait for each other in a cycle all raise DeadlockError; others do not.

``UNICOLL_TEST_FULL=1`` makes 1,000 circles and 1,000 programs without one. Times are printed, not judged.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.faults import deadlock_jobs as jobs
from tests.support import selection
from tests.support.on_ranks import on_ranks
from tests.support.outcomes import leave_cleanly, values_of
from tests.support.ranks import Pool, joined
from unicoll.testing import sampling

CIRCLES, PROGRAMS = (1000, 1000) if sampling.wants_full() else (6, 20) if selection.is_short() else (24, 40)
TRANSPORTS = [("tcp", "plain"), ("hierarchical", "plain"), ("tcp", "mac"), ("tcp", "tls")]


def test_every_rank_of_a_circle_names_it(pool: Callable[[int], Pool], seed: int) -> None:
    slowest = 0.0
    for i in range(CIRCLES):
        found = pool(4).run(jobs.circle, f"{seed} {i}")
        circle, stuck = found[0]["circle"], found[0]["stuck"]
        last = max(found[rank]["entered"] for rank in stuck)
        for rank in stuck:
            failure = found[rank]["failure"]
            assert failure is not None, f"circle {i}: rank {rank} did not fail: {found}"
            assert failure.type == "DeadlockError", failure.traceback
            assert failure.fields["group"] == found[rank]["group"]
            own = next(line for line in failure.message.split("\n  ") if line.startswith(f"rank {rank} "))
            seq = failure.fields.get("seq")
            assert f": {failure.fields['op']}(" in own
            assert (f" #{seq} on group" in own) if seq else " #" not in own
            first, *lines = failure.message.split("\n  ")
            assert first == f"deadlock: {len(circle)} ranks wait for each other in a cycle:"
            lowest = circle.index(min(circle))
            order = circle[lowest:] + circle[:lowest]
            for line, one, following in zip(lines, order, [*order[1:], order[0]], strict=False):
                assert line.startswith(f"rank {one} (host "), failure.message
                assert f"on group {found[one]['group']!r} at " in line
                assert "deadlock_jobs.py:" in line
                assert line.endswith(f" waits for rank {following}")
            rest = lines[len(circle) :]
            assert len(rest) == (len(stuck) - len(circle) + 1 if len(stuck) > len(circle) else 0)
            slowest = max(slowest, found[rank]["raised"] - last)
        assert all(o["failure"] is None for rank, o in enumerate(found) if rank not in stuck)
        pool(4).run(jobs.end_groups)
    print(f"{CIRCLES} circles; the slowest was named {slowest:.2f} s after the last rank had come")


def test_programs_without_a_circle_are_not_reported(pool: Callable[[int], Pool], seed: int) -> None:
    for i in range(0, PROGRAMS, 10):
        seeds = [f"{seed} {i + j}" for j in range(10)]
        for failures in pool(4).run(jobs.programs, seeds, timeout=120):
            assert failures == [None] * 10
        pool(4).run(jobs.end_groups)


@on_ranks(2)
def test_a_rank_that_waits_for_itself() -> None:
    """For what it has not sent."""
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(np.ones(2), 0, group, 1)
        with pytest.raises(dist.DeadlockError) as raised:
            dist.recv(np.ones(2), 0, group, 2)
        assert str(raised.value).startswith("deadlock: a rank waits for itself:\n  rank 0 (host ")
    jobs.end_groups()


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_a_send_that_waits_for_room_in_shared_memory(asynchronous: bool) -> None:
    """Rank 0 sends more than the shared memory between the ranks holds, rank 1 waits for another call of rank 0."""
    group, other, me = dist.new_group(), dist.new_group(), dist.get_rank()
    x = np.ones(1 << 16, np.uint8)
    for _ in range(3):  # the shared memory is used from the second message on
        if me == 0:
            dist.send(x, 1, group=group)
        else:
            dist.recv(x, 0, group=group)
        dist.barrier(group)
    sent = 0
    with pytest.raises(dist.DeadlockError, match=r": barrier\(\)" if me else r": send\(uint8\[65536\]"):
        if me == 1:
            dist.barrier(other)
        while sent < 1000:
            sent += 1
            work: Any = dist.isend(x, 1, group=group) if asynchronous else dist.send(x, 1, group=group)
            if asynchronous:
                work.wait()
    assert sent > 1 or me == 1
    jobs.end_groups()


@pytest.mark.parametrize("count", [12 if sampling.wants_full() else 3])
@on_ranks(3)
def test_sends_that_a_waiting_rank_reads_are_not_reported(count: int) -> None:
    """Rank 0 sends to rank 1, which first receives from rank 2, which waits for a call of rank 0 after its sends."""
    group, pair, me = dist.new_group(), dist.new_group([0, 2]), dist.get_rank()
    x, y = np.full(min(jobs.UNBUFFERED, 1 << 28) >> 3, 3.0 if me == 0 else 0.0), np.ones(1)
    for _ in range(count):
        if me == 0:
            for _ in range(2):
                dist.send(x, 1, group=group)
            dist.barrier(pair)
        elif me == 2:
            dist.barrier(pair)
            dist.send(y, 1, group=group)
        else:
            dist.recv(y, 2, group=group)
            for _ in range(2):
                dist.recv(x, 0, group=group)
            assert (x[0], x[-1]) == (3.0, 3.0)
    jobs.end_groups()


def _late(call: Any) -> None:
    """As a slow transport; to the monitor, in another module, a function of the library and not a callback."""
    execute(call)  # type: ignore[name-defined]  # noqa: F821
    time.sleep(1.5)


@on_ranks(3)
def test_a_member_that_destroys_a_group_while_another_is_in_its_last_call_is_not_reported() -> None:
    """What rank 1, the root, has sent takes a second to arrive on rank 0."""
    group, me = dist.new_group(), dist.get_rank()
    x = np.full(4, float(me))
    dist.broadcast(x, 2, group)  # connected
    if me == 0:
        host: Any = group._backends.host
        names = {"__name__": "gloo_fallback", "time": time, "execute": host._collectives["broadcast"]}
        host._collectives = {**host._collectives, "broadcast": FunctionType(_late.__code__, names)}
        host.needs_thread = lambda call: True  # the main thread waits for it
    x[:] = me
    work = dist.broadcast(x, 1, group, async_op=True)
    assert work is not None
    work.wait()
    assert (x == 1).all()
    dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2)
def test_a_message_that_the_other_rank_has_not_read_hides_no_circle() -> None:
    """Rank 0 sends and receives, rank 1 first waits for another call of rank 0."""
    group, other = dist.new_group(), dist.new_group()
    with pytest.raises(dist.DeadlockError):
        if dist.get_rank() == 0:
            dist.send(np.ones(3), 1, group=group)
            dist.recv(np.ones(3), 1, group=group)
        else:
            dist.barrier(other)
    jobs.end_groups()


@on_ranks(2)
def test_messages_to_and_fro_are_not_a_circle() -> None:
    """Each rank always waits for the other."""
    me, count, x, stop = dist.get_rank(), 0, np.zeros(1), time.monotonic() + 1.5
    while not x[0]:
        if me == 0:
            x[0] = count > 10 and time.monotonic() > stop
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            dist.recv(x, 0)
            dist.send(x, 0)
        count += 1


@on_ranks(3)
def test_a_callback_that_ends_a_wait_counts() -> None:
    """Rank 1 waits for a call that a callback on rank 0 makes, after work for which rank 2 comes late."""
    me = dist.get_rank()
    first, second, third = dist.new_group(), dist.new_group([0, 1]), dist.new_group([0, 1])
    x, y = np.ones(2), np.ones(2)
    if me == 2:
        time.sleep(1.5)
    work: Any = dist.all_reduce(x, group=first, async_op=True)
    if me == 1:
        dist.all_reduce(y, group=second)
        dist.barrier(third)
    elif me == 0:
        work.add_done_callback(lambda: dist.all_reduce(y, group=second))
        dist.barrier(third)
    work.wait()
    assert x.tolist() == [3.0, 3.0]
    jobs.end_groups()


@on_ranks(2)
def test_a_daemon_thread_that_can_end_a_wait_counts() -> None:
    """Rank 0 waits for rank 1, which waits for a daemon thread of rank 0 that sleeps."""
    first, second = dist.new_group(), dist.new_group()
    x = np.ones(2)

    def later() -> None:
        time.sleep(1.5)
        dist.all_reduce(x, group=second)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=later, name="test-later", daemon=True)
        thread.start()
        dist.barrier(first)
        thread.join()
    else:
        dist.all_reduce(x, group=second)
        dist.barrier(first)
    assert x.tolist() == [2.0, 2.0]
    jobs.end_groups()


@on_ranks(2)
def test_a_daemon_thread_of_another_library_hides_no_circle() -> None:
    """A daemon thread, which cannot call unicoll, waits."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="test-idle", daemon=True)
    thread.start()
    group = dist.new_group()
    with pytest.raises(dist.DeadlockError):
        dist.recv(np.ones(2), 1 - dist.get_rank(), group=group)
    end.set()
    thread.join()
    jobs.end_groups()


@on_ranks(2, env={})
def test_a_wait_with_a_shorter_timeout_is_not_a_deadlock() -> None:
    """Rank 0 gives up waiting for rank 1 in time, then does what that waits for."""
    first, second = dist.new_group(), dist.new_group()
    x = np.ones(2)
    if dist.get_rank() == 0:
        with pytest.raises(dist.OperationTimeoutError):
            dist.all_reduce(x.copy(), group=first, timeout=1.5)
    dist.all_reduce(x, group=second)
    assert x.tolist() == [2.0, 2.0]


@pytest.mark.every(n=4)
@pytest.mark.parametrize(("transport", "channel"), TRANSPORTS)
def test_circles_over_other_transports(transport: str, channel: str, seed: int) -> None:
    with joined(3, env={"UNICOLL_TRANSPORT": transport, "UNICOLL_CHANNEL": channel}) as job:
        for i in range(4):
            kinds = jobs.CALLS if channel == "plain" else (*jobs.SENDS, "recv")
            job.call(jobs.circle, f"{transport} {seed} {i}", kinds)
            found = job.results()
            for rank in found[0]["stuck"]:
                assert found[rank]["failure"].type == "DeadlockError", found[rank]["failure"]
            job.call(jobs.end_groups)
            job.results()
        leave_cleanly(job, range(3))


def _make_group(ranks: list[int]) -> None:
    """A group of some ranks, with connections."""
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        dist.barrier(group)


@pytest.mark.parametrize("before", [True, False])
def test_a_circle_is_named_after_the_relay_has_moved(before: bool) -> None:
    """``before``: the ranks are blocked when the relay's process, which was stopped, dies."""
    with joined(3) as job:
        job.call(_make_group, [1, 2])
        job.results()
        if before:
            job.signal(0, signal.SIGSTOP)
            job.call(jobs.receive_from_each_other, [1, 2], ranks=[1, 2])
            job.await_note(1)
            job.await_note(2)
        job.signal(0, signal.SIGKILL)
        if not before:
            job.call(jobs.receive_from_each_other, [1, 2], ranks=[1, 2])
        for failure in values_of(job, [1, 2]):
            assert failure.type == "DeadlockError", failure.traceback
            assert "rank 1 (host" in failure.message
            assert failure.message.endswith("waits for rank 1")
        leave_cleanly(job, [1, 2])
