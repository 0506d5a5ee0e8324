"""The NCCL backend around NCCL itself: default streams, deadlines, deaths, threads, ends, and memory of NCCL's."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import nccl_safety_jobs as jobs
import pytest
from simulated_ranks import SimulatedJob

from nccl_comm.flights import Flight
from nccl_comm.watchdog import Watchdog
from unicoll import streams
from unicoll.backend import Call
from unicoll.ops import OPS
from unicoll.testing.ranks import Pool, joined, pools
from unicoll.testing.worker import leave


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


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_an_operation_that_has_ended_is_never_late(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.late_but_landed) == [False] * 2


def test_a_death_is_named_though_nccl_reports_an_error_first() -> None:
    with joined(3, SimulatedJob) as job:
        job.call(jobs.an_error_before_the_news, 2)
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


def test_who_waits_for_all_members_with_a_first_message_is_told_so() -> None:
    with joined(3, SimulatedJob) as job:
        job.call(jobs.a_first_message_between_two_of_three)
        first, second, third = job.results()
        for said, sums in (first, second):
            assert "waits to start NCCL, which takes all its members; have not come: rank 2 (" in said
            assert "give device_id= to init_process_group" in said
            assert sums == "[2.0, 2.0]"
        assert third == ["[2.0, 2.0]"]
        job.call(leave)
        assert job.results() == [[]] * 3


# --- threads and ends ------------------------------------------------------------------------------------------------


def test_one_thread_at_a_time_puts_operations_on_a_device(pool: Callable[[int], Pool]) -> None:
    assert pool(1).run(jobs.two_threads_with_a_group_each) == [1]


def test_a_group_is_split_when_nothing_is_under_way() -> None:
    with joined(2, SimulatedJob, backend="nccl", bound=True) as job:
        job.call(jobs.split_under_way)
        assert job.results() == [[0, 0]] * 2
        job.call(leave)
        assert job.results() == [[]] * 2


def test_a_thread_in_nccl_comes_out_before_the_communicator_is_aborted() -> None:
    with joined(2, SimulatedJob) as job:
        job.call(jobs.a_thread_in_nccl, True)
        for log in job.results():
            assert log == ["in", "revoke", "out", "OperationTimeoutError", "abort"]


def test_an_old_nccl_is_aborted_under_a_thread_that_does_not_come_out() -> None:
    with joined(2, SimulatedJob, version=22705) as job:
        job.call(jobs.a_thread_in_nccl, False)
        for log in job.results():
            assert log == ["in", "abort", "out", "OperationTimeoutError"]


# --- memory of NCCL's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["operation", "kernel"])
def test_symmetric_memory_goes_when_the_device_has_done_with_it(by: str, pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.symmetric_memory_dropped, by) == [[("unicoll-nccl-end", 0)]] * 2


# --- what ranks cannot know of each other ----------------------------------------------------------------------------


def test_lists_side_by_side_and_apart_are_gathered_in_the_same_way(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.gathered_into_lists) == [[[1.0] * 4, [2.0] * 4]] * 2


# --- looking after what is on its way ----------------------------------------------------------------------------


class _Slow:
    """A group at which the watchdog looks for long."""

    def __init__(self) -> None:
        self.looking = threading.Event()
        self.log: list[str] = []

    def sweep(self, now: float) -> bool:
        self.looking.set()
        time.sleep(0.3)
        self.log.append("looked")
        return False


def test_a_group_that_closes_waits_for_a_look_at_it_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "cuda", lambda: SimpleNamespace(ignore_captures=lambda: None))
    watchdog, group = Watchdog(), _Slow()
    watchdog.watch(group)
    try:
        assert group.looking.wait(10)
        watchdog.unwatch(group)
        group.log.append("closed")
        assert group.log[-2:] == ["looked", "closed"]
    finally:
        watchdog.close()


class _Contested(list[Callable[[], None]]):
    """Callbacks that another thread takes right after somebody has seen that there are some."""

    def __len__(self) -> int:
        count = super().__len__()
        self.clear()
        return count


def test_two_threads_may_find_the_same_end() -> None:
    flight = Flight((Call(OPS["barrier"], (), (), 1.0),), 1, 1, False)
    called: list[bool] = []
    flight.callbacks = _Contested([lambda: called.append(True)])
    flight.finish()
    flight.finish()
    assert called == [True]
