"""Safeguards of the NCCL backend: default streams, deadlines, deaths, threads, teardown, symmetric memory."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nccl_comm.group_state import GroupState
from nccl_comm.in_flight import InFlight, PendingWork
from nccl_comm.watchdog import Watchdog
from tests.nccl import nccl_safety_jobs as jobs
from tests.simulated_nccl.ranks import SimulatedJob, run
from tests.support.ranks import Pool, joined, pools
from tests.support.worker import end, leave
from unicoll.arrays import cuda
from unicoll.backend import Call
from unicoll.backend.ops import OPS


@pytest.fixture(scope="module")
def pool() -> Iterator[Callable[[int], Pool]]:
    with pools(partial(SimulatedJob, policy="newest")) as made:
        yield made


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_are_those_of_the_arrays_device(handle: int, pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.on_a_default_stream, handle) == [[[4.0, 4.0], 0], [[4.0, 4.0], 1]]


def test_the_default_stream_of_another_thread_is_another_stream(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.waited_by_another_thread) == [[True]] * 2


# --- deadlines and deaths ---------------------------------------------------------------------------------------------


def test_an_operation_that_has_ended_is_never_late(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.late_but_ended) == [False] * 2


def test_a_death_is_named_though_nccl_reports_an_error_first() -> None:
    with joined(3, SimulatedJob) as job:
        job.call(jobs.an_error_before_the_death_notice, 2)
        job.await_note(2)
        assert job.await_note(0) == "seen"
        job.signal(2, signal.SIGKILL)
        for outcome in job.collect(60, [0, 1]):
            assert outcome.failure is None, outcome.failure
            assert outcome.value.startswith("RankLostError: ")
            assert (
                f"rank 2 (host {outcome.value.partition('rank 2 (host ')[2].partition(',')[0]}, pid "
                in outcome.value
            )


def test_nccls_error_names_a_rank_that_has_left() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.warm_up)
        job.results()
        job.call(end, ranks=[1])
        assert job.wait_for_exit(60, [1]) == [0]
        job.call(jobs.an_error_of_a_peer, ranks=[0])
        failure = job.collect(60, [0])[0].failure
        assert failure is not None
        assert failure.type == "RankLostError"
        assert failure.fields["rank"] == 1
        assert "ncclRemoteError of NCCL 2.30.7" in failure.message
        assert f"pid {job.pids[1]}) has left the job" in failure.message


@pytest.mark.parametrize("blocking", [True, False])
def test_the_death_of_any_member_ends_a_split(blocking: bool) -> None:
    """Of the other ranks two are in the new group, and one is not."""
    with joined(4, SimulatedJob) as job:
        job.call(jobs.split_without_a_member, 3, blocking)
        job.await_notes()
        job.signal(3, signal.SIGKILL)
        for outcome in job.collect(60, range(3)):
            assert outcome.failure is not None
            assert outcome.failure.type == "RankLostError", outcome.failure
            assert outcome.failure.fields["rank"] == 3


@pytest.mark.parametrize(
    ("way", "doing"), [("init", "connecting"), ("split", "splitting"), ("shrink", "shrinking")]
)
def test_a_rank_that_cannot_connect_is_named_on_all(way: str, doing: str) -> None:
    """At once, and no thread stays in NCCL."""
    with joined(3, SimulatedJob, backend="nccl", bound=way != "init") as job:
        job.call(jobs.with_an_error_on_rank_1, way)
        first, second, third = job.results()
        assert second.startswith("DistNetworkError: ncclComm")
        said = rf"GroupAbortedError: rank 1 \(.*\) failed while {doing} group '.*': {re.escape(second)}"
        assert re.fullmatch(said, first), first
        assert third == ("nothing" if way == "shrink" else first)
        job.call(leave)
        assert job.results() == [[]] * 3


def test_a_start_that_is_given_up_before_nccl_has_written_the_handle_is_aborted() -> None:
    """No thread stays in NCCL."""
    with joined(2, SimulatedJob) as job:
        job.call(jobs.given_up_early)
        assert "nothing" not in job.results()
        job.call(leave)
        assert job.results() == [[]] * 2


@pytest.mark.parametrize(("failing", "calls"), [(0, ["shrink"]), (1, []), (3, [])])
def test_nccl_shrinks_a_communicator_without_an_error(failing: int, calls: list[str]) -> None:
    """With an error on any rank all make a new one."""
    with joined(3, SimulatedJob) as job:
        job.call(jobs.shrunk_after_an_error, failing)
        assert job.results() == [[[3.0, 3.0], calls], [[3.0, 3.0], calls], []]


def test_a_first_message_warns_of_missing_members() -> None:
    with joined(3, SimulatedJob) as job:
        job.call(jobs.a_first_message_between_two_of_three)
        first, second, third = job.results()
        for warning, sums in (first, second):
            assert "waits for all its members to start NCCL; missing: rank 2 (" in warning
            assert "with device_id= of init_process_group or new_group" in warning
            assert sums == "[2.0, 2.0]"
        assert third == ["[2.0, 2.0]"]
        job.call(leave)
        assert job.results() == [[]] * 3


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_waits_in_nccl_warns_of_the_interfaces(blocking: bool) -> None:
    with joined(2, SimulatedJob, env={"NCCL_SOCKET_IFNAME": "eth7"}) as job:
        job.call(jobs.late_in_nccl, blocking)
        (warning,) = job.results()[0]
        assert re.fullmatch(
            r"group '.*': ncclCommInitRankConfig has not returned for 0\.2 s: NCCL has not connected to all ranks\."
            r" NCCL uses sockets on eth7 \(by NCCL_SOCKET_IFNAME\), unicoll lo 127\.0\.0\.1; NCCL_DEBUG=INFO logs .*",
            warning,
        ), warning
        job.call(leave)
        assert job.results() == [[]] * 2


@pytest.mark.parametrize("value", ["0", "1"])
def test_nccls_variable_decides_whether_a_communicator_is_blocking(value: str) -> None:
    found = run(1, jobs.blocking_by_environment, env={"NCCL_COMM_BLOCKING": value})
    assert found == [(value == "1", value == "1")]


# --- threads and teardown ---------------------------------------------------------------------------------------------


def test_one_thread_at_a_time_issues_operations_on_a_device(pool: Callable[[int], Pool]) -> None:
    assert pool(1).run(jobs.two_threads_with_a_group_each) == [1]


def test_a_group_is_split_when_nothing_is_in_flight() -> None:
    with joined(2, SimulatedJob, backend="nccl", bound=True) as job:
        job.call(jobs.split_with_work_in_flight)
        assert job.results() == [[0, 0]] * 2
        job.call(leave)
        assert job.results() == [[]] * 2


def test_a_thread_leaves_nccl_before_the_communicator_is_aborted() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.a_thread_in_nccl, True)
        for log in job.results():
            assert log == ["in", "revoke", "out", "OperationTimeoutError", "abort"]


def test_an_old_nccl_is_aborted_while_a_thread_is_in_it() -> None:
    with joined(2, SimulatedJob, version=22705) as job:
        job.call(jobs.a_thread_in_nccl, False)
        for log in job.results():
            assert log == ["in", "abort", "out", "OperationTimeoutError"]


def test_a_destroyed_group_waits_for_its_operations() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.destroyed_with_work_in_flight)
        for result, warning in job.results():
            assert result == [3.0, 3.0]
            assert re.fullmatch(r"destroying group '\w+' waits for all_reduce\(.*\) #\d+", warning), warning


def test_the_deadline_of_an_operation_ends_the_wait_of_a_destroyed_group_with_an_error() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.destroyed_before_a_deadline)
        first, second = job.results()
        assert "timed out after 0.5 s; arrived: rank 0; missing: rank 1" in first
        assert second == ""


def test_nothing_is_called_while_nccl_has_not_stopped() -> None:
    """A communicator that is aborted meanwhile would be freed."""
    with joined(2, SimulatedJob) as job:
        job.call(jobs.stopped_behind_a_kernel, False)
        for calls in job.results():
            assert sorted(calls) == ["comm_revoke begins", "comm_revoke ends", "timed out"]


def test_a_communicator_is_aborted_when_nccl_has_stopped_late() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.stopped_behind_a_kernel, True)
        for calls in job.results():
            stopped = ["comm_revoke begins", "comm_revoke ends", "timed out"]
            assert sorted(calls) == ["comm_abort begins", "comm_abort ends", *stopped]
        job.call(leave)
        assert job.results() == [[]] * 2


@pytest.mark.parametrize("exiting", [True, False])
def test_a_live_graph_does_not_delay_the_exit(exiting: bool) -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.ended_with_a_graph, exiting)
        for messages in job.results():
            hint = [m for m in messages if m.startswith("CUDA graphs with operations of group")]
            assert len(hint) == (not exiting)
            assert len(messages) == (0 if exiting else 2), messages


def test_the_watchdog_does_not_free_memory(pool: Callable[[int], Pool]) -> None:
    """cudaFree waits for the device."""
    assert pool(2).run(jobs.dropped_arrays) == ["unicoll-nccl-release"] * 2


def test_a_call_that_the_watchdog_has_seen_in_nccl_is_not_kept() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.swept_in_nccl)
        assert job.results() == [True] * 2
        job.call(leave)
        assert job.results() == [[]] * 2


# --- symmetric memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["operation", "kernel"])
def test_symmetric_memory_is_freed_after_its_last_use(by: str, pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.symmetric_memory_dropped, by) == [[("MainThread", 0)]] * 2


# --- choices that must be equal on all ranks --------------------------------------------------------------------------


def test_contiguous_and_other_lists_are_gathered_by_the_same_calls(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.gathered_into_lists) == [[[1.0] * 4, [2.0] * 4]] * 2


# --- the watchdog and finished operations ----------------------------------------------------------------------------


class _Slow:
    """A group whose sweep takes long."""

    def __init__(self) -> None:
        self.sweeping = threading.Event()
        self.failed = threading.Event()
        self.log: list[str] = []

    def sweep_failed(self, cause: BaseException) -> None:
        self.log.append(f"{type(cause).__name__}: {cause}")
        self.failed.set()

    def sweep(self, now: float) -> bool:
        self.sweeping.set()
        time.sleep(0.3)
        self.log.append("swept")
        return False


class _Broken(_Slow):
    """A group whose sweeps raise."""

    def sweep(self, now: float) -> bool:
        raise OSError("injected")


@pytest.mark.parametrize("where", ["a group", "the thread"])
def test_a_watchdog_that_fails_fails_its_groups(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore_captures() -> None:
        if where == "the thread":
            raise OSError("injected")

    monkeypatch.setattr(cuda, "cuda", lambda: SimpleNamespace(ignore_captures=ignore_captures))
    watchdog, group = Watchdog(), _Broken()
    watchdog.watch(group)
    try:
        assert group.failed.wait(60)
        assert group.log[0] == "OSError: injected"
    finally:
        watchdog.close()


def test_works_end_when_the_watchdog_fails() -> None:
    with joined(2, SimulatedJob, quiet=False) as job:
        job.call(jobs.watchdog_fails)
        for text in job.results():
            assert "rank 0 " in text
            assert "'unicoll-nccl-watchdog'" in text
            assert "OSError: injected" in text


def test_a_group_that_closes_waits_for_a_sweep_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cuda", lambda: SimpleNamespace(ignore_captures=lambda: None))
    watchdog, group = Watchdog(), _Slow()
    watchdog.watch(group)
    try:
        assert group.sweeping.wait(60)
        watchdog.unwatch(group)
        group.log.append("closed")
        assert group.log[-2:] == ["swept", "closed"]
    finally:
        watchdog.close()


class _Contested(list[Callable[[], None]]):
    """Callbacks that another thread takes right after their number was read."""

    def __len__(self) -> int:
        count = super().__len__()
        self.clear()
        return count


def test_two_threads_may_finish_one_operation() -> None:
    work = PendingWork((Call(OPS["barrier"], (), (), 1.0),), 1, 1, 1, False)
    called: list[bool] = []
    work.callbacks = _Contested([lambda: called.append(True)])
    work.finish()
    work.finish()
    assert called == [True]


class _Events:
    """The driver's events: those in ``done`` have occurred; ``queries`` counts."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.queries = self._made = 0

    def create_event(self, device: int, timing: bool = False) -> int:
        self._made += 1
        return self._made

    def record(self, event: int, stream: int) -> None:
        pass

    def event_done(self, event: int) -> bool:
        self.queries += 1
        return event in self.done


def _in_flight(streams: list[int]) -> tuple[InFlight, _Events, list[int]]:
    """An operation on each of the streams, and their events."""
    events: Any = _Events()
    in_flight = InFlight(events, 0, 7, GroupState(), Mock(), Mock())
    barrier = (Call(OPS["barrier"], (), (), 1.0),)
    return in_flight, events, [in_flight.add(barrier, stream, stream, False).event for stream in streams]


def test_the_watchdog_queries_few_events_of_operations_on_one_stream() -> None:
    in_flight, events, made = _in_flight([7] * 300)
    events.done.update(made[:200])
    in_flight.reap()
    assert [work.event for work in in_flight.operations] == made[200:]
    assert events.queries < 50


@pytest.mark.parametrize("ended", [{0, 2}, {0, 1, 3}, {1}])
@pytest.mark.parametrize("streams", [[7, 8, 7, 8], [cuda.PER_THREAD_STREAM] * 4])
def test_the_watchdog_takes_no_operation_for_ended_that_has_not(streams: list[int], ended: set[int]) -> None:
    """Operations on different streams end in any order, also those on the default streams of several threads."""
    in_flight, events, made = _in_flight(streams)
    events.done.update(made[i] for i in ended)
    in_flight.reap()
    first_left = next(i for i in range(4) if i not in ended)
    assert [work.event for work in in_flight.operations] == made[first_left:]
    assert not any(work.done for work in in_flight.operations)
