"""Ranks that wait for each other in a cycle all raise DeadlockError; others do not.

``UNICOLL_TEST_FULL=1`` makes 1,000 circles and 1,000 programs without one. Times are printed, not judged.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults import deadlock_jobs as jobs
from tests.support import selection
from tests.support.ranks import Pool, joined
from tests.support.worker import leave
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


def test_a_rank_that_waits_for_itself(pool: Callable[[int], Pool]) -> None:
    failure = pool(2).run(jobs.receive_from_itself)[0]
    assert failure is not None
    assert failure.type == "DeadlockError", failure.traceback
    assert failure.message.startswith("deadlock: a rank waits for itself:\n  rank 0 (host ")
    pool(2).run(jobs.end_groups)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_send_that_waits_for_room_in_shared_memory(pool: Callable[[int], Pool], asynchronous: bool) -> None:
    first, second = pool(2).run(jobs.send_through_rings, asynchronous)
    assert first["sent"] > 1
    for found, call in ((first, "send(uint8[65536]"), (second, "barrier()")):
        assert found["failure"] is not None
        assert found["failure"].type == "DeadlockError", found["failure"].traceback
        assert f": {call}" in found["failure"].message
    pool(2).run(jobs.end_groups)


def test_sends_that_a_waiting_rank_reads_are_not_reported(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(jobs.sends_that_are_read, 12 if sampling.wants_full() else 3)[1] == [3.0, 3.0]
    pool(3).run(jobs.end_groups)


def test_a_message_that_the_other_rank_has_not_read_hides_no_circle(pool: Callable[[int], Pool]) -> None:
    for failure in pool(2).run(jobs.receive_what_was_sent_before):
        assert failure is not None
        assert failure.type == "DeadlockError", failure.traceback
    pool(2).run(jobs.end_groups)


def test_messages_to_and_fro_are_not_a_circle(pool: Callable[[int], Pool]) -> None:
    first, second = pool(2).run(jobs.ping_pong, 5.0 if sampling.wants_full() else 1.5)
    assert first == second > 10


def test_a_callback_that_ends_a_wait_counts(pool: Callable[[int], Pool]) -> None:
    assert pool(3).run(jobs.callback_ends_the_wait) == [[3.0, 3.0]] * 3
    pool(3).run(jobs.end_groups)


def test_a_daemon_thread_that_can_end_a_wait_counts(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.daemon_thread_ends_the_wait) == [[2.0, 2.0]] * 2
    pool(2).run(jobs.end_groups)


def test_a_daemon_thread_of_another_library_hides_no_circle(pool: Callable[[int], Pool]) -> None:
    for failure in pool(2).run(jobs.circle_beside_a_daemon_thread):
        assert failure is not None
        assert failure.type == "DeadlockError", failure.traceback
    pool(2).run(jobs.end_groups)


def test_a_wait_with_a_shorter_timeout_is_not_a_deadlock() -> None:
    with joined(2) as job:
        job.call(jobs.limited_wait)
        assert job.results() == [("OperationTimeoutError", [2.0, 2.0]), ("", [2.0, 2.0])]
        job.call(leave)
        assert job.results() == [[]] * 2


@pytest.mark.every(4)
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
        job.call(leave)
        assert job.results() == [[]] * 3


@pytest.mark.parametrize("before", [True, False])
def test_a_circle_is_named_after_the_relay_has_moved(before: bool) -> None:
    """``before``: the ranks are blocked when the relay's process, which was stopped, dies."""
    with joined(3) as job:
        job.call(jobs.make_group, [1, 2])
        job.results()
        if before:
            job.signal(0, signal.SIGSTOP)
            job.call(jobs.receive_from_each_other, [1, 2], ranks=[1, 2])
            job.await_note(1)
            job.await_note(2)
        job.signal(0, signal.SIGKILL)
        if not before:
            job.call(jobs.receive_from_each_other, [1, 2], ranks=[1, 2])
        for outcome in job.collect(30, [1, 2]):
            assert outcome.failure is None, outcome.failure
            assert outcome.value is not None
            assert outcome.value.type == "DeadlockError", outcome.value.traceback
            assert "rank 1 (host" in outcome.value.message
            assert outcome.value.message.endswith("waits for rank 1")
        job.call(leave, ranks=[1, 2])
        assert [o.value for o in job.collect(30, [1, 2])] == [[], []]
