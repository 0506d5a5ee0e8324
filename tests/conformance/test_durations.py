"""How long operations took: the device's time over NCCL, the host's elsewhere, and nothing where nobody asks."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.nccl import nccl_jobs as jobs
from tests.simulated_nccl.ranks import SimulatedJob
from tests.support.ranks import joined
from tests.support.worker import leave


def run(size: int, job: Any, **options: Any) -> list[Any]:
    """A job of its own, which leaves nothing behind."""
    with joined(size, SimulatedJob, policy="newest", **options) as ranks:
        ranks.call(job)
        values = ranks.results()
        ranks.call(leave)
        assert ranks.results() == [[]] * size
        return values


def test_the_devices_time_is_told_where_it_was_asked_for() -> None:
    for found in run(2, jobs.timed):
        assert "was not timed: make the call through group.using(timing=True)" in found["not asked"]
        assert found["view"].endswith("using timing=True>")
        assert found["took"] == [True] * 10
        assert found["again"]
        assert found["events"] == {2}  # they are used again
        assert found["barrier"]
        assert found["coalesced"]
        assert "was not timed" in found["off"]
        assert "was recorded into a graph" in found["captured"]


def test_nobody_pays_who_does_not_ask() -> None:
    assert run(2, jobs.untimed) == [0, 0]


def test_arrays_of_a_device_have_durations_through_the_host_too() -> None:
    assert run(2, jobs.timed_by_a_host_backend, backend="gloo") == [[True] * 6] * 2


@pytest.fixture
def _alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_on_the_host_it_is_the_hosts_time_without_that_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = dist.group.WORLD
    gate, inside = threading.Event(), threading.Event()
    collectives = group._backends.for_device("cpu")._collectives
    execute = collectives["all_reduce"]

    def slow(call: Any) -> None:
        inside.set()
        gate.wait(20)
        execute(call)

    monkeypatch.setitem(collectives, "all_reduce", slow)
    view = group.using(timing=True)
    started = time.perf_counter()
    first = view.all_reduce(np.ones(3), async_op=True)
    assert inside.wait(20)
    inside.clear()
    second = view.all_reduce(np.ones(3), async_op=True)
    time.sleep(0.05)
    gate.set()
    took, queued = first.duration(), second.duration()
    assert 0.05 <= took < time.perf_counter() - started
    assert 0 < queued < time.perf_counter() - started - 0.05
    untimed = group.all_reduce(np.ones(3), async_op=True)
    with pytest.raises(dist.DistArgumentError, match=r"all_reduce\(float64\[3\], SUM\) was not timed"):
        untimed.duration()
    untimed.wait()


@pytest.mark.parametrize("how", ["option", "dict", "variable"])
def test_a_group_is_asked_by_its_options_or_the_environment(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"option": dist.Options(timing=True), "dict": {"timing": True}}.get(how)
    if how == "variable":
        monkeypatch.setenv("UNICOLL_TIMING", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    try:
        work = dist.all_reduce(np.ones(3), async_op=True)
        assert work is not None
        assert work.duration() > 0
        assert "using nothing" in repr(dist.group.WORLD.using())  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_timing_is_a_known_word_of_using() -> None:
    with pytest.raises(dist.DistArgumentError, match=r"profiler_tag, compression, exact, timing$"):
        dist.group.WORLD.using(timimg=True)  # type: ignore[union-attr]
