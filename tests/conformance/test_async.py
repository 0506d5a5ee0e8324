"""Operations in the background: order, handles, futures, asyncio, failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance import async_jobs as jobs
from tests.support.ranks import Pool

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_order_is_kept(size: int, pool: Pools) -> None:
    pool(size).run(jobs.in_order, 60)


def test_it_goes_on_in_the_background(pool: Pools) -> None:
    for rank, (early, done) in enumerate(pool(2).run(jobs.in_background)):
        assert done
        assert rank > 0 or not early


@pytest.mark.parametrize("size", [1, 3])
def test_every_method_of_work(size: int, pool: Pools) -> None:
    pool(size).run(jobs.work_methods)


def test_await(pool: Pools) -> None:
    assert pool(2).run(jobs.awaited) == [[2.0, 4.0, 6.0]] * 2


def test_a_failure_shows_everywhere(pool: Pools) -> None:
    for seen in pool(3).run(jobs.failing):
        assert len(seen) == 7
        for failure in seen:
            assert failure is not None
            assert failure.type == "CollectiveMismatchError", failure.traceback
            assert failure.message == seen[0].message


def test_a_dropped_work_is_complained_about_and_done_all_the_same(pool: Pools) -> None:
    first, second = pool(2).run(jobs.dropped)
    assert len(first) == 1
    assert first[0].startswith(
        "ResourceWarning: a Work was dropped without wait(): all_reduce(float64[100000]"
    )
    assert second == []


def test_a_callback_may_start_the_next(pool: Pools) -> None:
    assert pool(2).run(jobs.calls_from_callbacks) == [2.0, 2.0]


def test_calls_of_a_callback_come_before_what_is_queued(pool: Pools) -> None:
    assert pool(2).run(jobs.blocking_calls_from_callbacks, 3) == [([2.0] * 6, [4, 5, 6])] * 2


def test_destroy_finishes_what_was_posted(pool: Pools) -> None:
    assert pool(3).run(jobs.destroyed_with_work_in_flight) == [(True, 6.0)] * 3


def test_abort_ends_the_group_everywhere(pool: Pools) -> None:
    for failures in pool(3).run(jobs.aborted):
        for failure in failures:
            assert failure is not None
            assert failure.type == "GroupAbortedError", failure.traceback
            assert "the test says so" in failure.message
