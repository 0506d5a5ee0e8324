"""The flight recorder: what is recorded of calls that have ended, wait, failed, or are enqueued on a device."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.conformance import recorder_jobs as jobs
from tests.nccl import nccl_jobs
from tests.simulated_nccl.ranks import run as run_simulated
from tests.support.ranks import Pool, joined
from tests.support.worker import leave
from unicoll.backend.flight_recorder import user_frame


def test_calls_of_each_kind(pool: Callable[[int], Pool]) -> None:
    for rank, found in enumerate(pool(3).run(jobs.several)):
        messages = [("send(float32[2, 3], peer=1, tag=7)", 1), ("recv(float32[2, 3], peer=0, tag=7)", 0)]
        first = found["calls"][0][1]
        expected = [
            ("all_reduce(float32[2, 3], SUM)", first, "completed", 24, True, -1, 0),
            ("all_reduce(float32[2, 3], MAX)", first + 1, "completed", 24, True, -1, 0),
            ("broadcast(float32[2, 3], root=1)", first + 2, "completed", 24, True, -1, 0),
            ("all_reduce(float32[2, 3], SUM)", first + 3, "completed", 24, False, -1, 0),
            ("all_gather(float32[2, 3])", first + 4, "completed", 24, True, -1, 0),
            *[(text, 0, "completed", 24, True, peer, 7) for text, peer in messages[rank : rank + 1]],
            ("all_reduce(float32[2, 3], SUM)", first + 5, "completed", 24, False, -1, 0),
            ("all_reduce(float32[3], SUM)", first + 5, "completed", 12, False, -1, 0),
            ("barrier()", first + 6, "completed", 0, True, -1, 0),
        ]
        assert found["calls"] == expected
        lines = ["dist.all_reduce(x)", "group.all_reduce(x, dist.ReduceOp.MAX)", "dist.broadcast(x, src=1)"]
        assert found["lines"][:3] == lines
        assert found["lines"][-1] == "dist.barrier()"
        assert found["ordered"]
        assert found["groups"] == {("world", (0, 1, 2), "gloo")}


def test_call_sites_of_functions_and_methods(pool: Callable[[int], Pool]) -> None:
    for lines, beginnings in pool(2).run(jobs.lines_of_functions_and_methods):
        assert len(lines) == len(beginnings)
        for line, beginning in zip(lines, beginnings, strict=True):
            assert line.startswith(beginning)


def test_a_call_without_a_call_site(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.called_by_no_python_code) == [1, 1]


def test_a_users_module_whose_name_begins_as_the_librarys() -> None:
    names = {"__name__": "unicoll_train", "getframe": sys._getframe}
    exec("frame = getframe()", names)
    assert user_frame(names["frame"]).f_globals is names  # type: ignore[arg-type]


def test_calls_that_fail() -> None:
    with joined(2) as job:
        job.call(jobs.failing)
        for rank, (errors, calls) in enumerate(job.results()):
            op = "broadcast" if rank else "all_reduce"
            assert errors == ["CollectiveMismatchError"] * 2
            assert calls == [(op, "failed", "CollectiveMismatchError")] * 2
        job.call(leave)
        assert job.results() == [[], []]


def test_calls_that_wait_and_calls_behind_them(pool: Callable[[int], Pool]) -> None:
    first, second, *later = pool(2).run(jobs.in_progress)[0]
    assert first[:2] == ("all_reduce(float64[5], SUM)", "started")
    assert first[2] > 0
    assert first[3] == 0
    assert second == ("all_reduce(float64[6], SUM)", "scheduled", first[2] + 1, 0)
    assert later == [
        ("all_reduce(float64[5], SUM)", "completed", first[2], True),
        ("all_reduce(float64[6], SUM)", "completed", first[2] + 1, True),
        ("barrier()", "completed", first[2] + 2, True),
    ]


def test_arrays_are_not_kept_alive(pool: Callable[[int], Pool]) -> None:
    assert pool(2).run(jobs.keeps_no_arrays) == [[True, True]] * 2


def test_arrays_are_not_kept_alive_by_the_monitor() -> None:
    with joined(2) as job:
        job.call(jobs.keeps_no_arrays_seen_waiting)
        assert job.results() == [True] * 2
        job.call(leave)
        assert job.results() == [[], []]


@pytest.mark.parametrize("size", [0, 100])
def test_the_size_of_the_ring(size: int) -> None:
    with joined(2, env={"UNICOLL_FLIGHT_RECORDER": str(size)}) as job:
        job.call(jobs.many, size)
        assert job.results() == [size, size]
        job.call(leave)
        assert job.results() == [[], []]


def test_a_ring_of_no_entries_costs_nothing() -> None:
    with joined(2, env={"UNICOLL_FLIGHT_RECORDER": "0"}) as job:
        job.call(jobs.unrecorded)
        assert job.results() == [[8.0, 2.0, 0]] * 2
        job.call(leave)
        assert job.results() == [[], []]


def test_calls_on_a_device_end_when_the_device_has_ended_them() -> None:
    for found in run_simulated(2, nccl_jobs.recorded):
        assert found["enqueued"] in ([], [("all_reduce", "started", False)] * 2)
        assert found["ended"] == [("all_reduce", "completed", False)] * 2
