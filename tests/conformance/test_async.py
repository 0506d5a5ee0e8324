"""Operations in the background: order, handles, futures, asyncio, failures."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.conformance.group_jobs import me, size, total
from tests.support.order import await_word, send_word
from tests.support.outcomes import failure_of
from tests.support.ranks import Pool
from tests.support.worker import Failure


def in_order(count: int) -> None:
    """Many operations in flight, blocking ones between them, keep their order."""
    works, results = [], []
    for i in range(count):
        x = np.full(1 + i * 97 % 5000, i + 1.0)
        if i % 5 == 4:
            dist.all_reduce(x)
        else:
            works.append(dist.all_reduce(x, async_op=True))
        results.append(x)
    for w in reversed(works):
        assert w is not None
        assert w.wait()
        assert w.wait()
    for i, x in enumerate(results):
        assert (x == (i + 1) * size()).all(), i


def in_background() -> tuple[bool, bool]:
    """The call returns before the other ranks make it, and completes while this rank computes."""
    x = np.ones(10)
    if me() != 0:
        await_word()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    early = work.is_completed()
    if me() == 0:
        send_word(1)
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.005)
    done = work.is_completed()
    work.wait()
    assert (x == size()).all()
    return early, done


def work_methods() -> None:
    """Every method of Work, on an operation that succeeds."""
    x = np.full(4, me() + 1.0)
    work: Any = dist.all_reduce(x, async_op=True)
    called = threading.Event()
    future: Future[list[Any]] = work.get_future()
    future.add_done_callback(lambda f: called.set())
    assert work.get_future() is future
    assert future.result(30)[0] is x
    assert called.wait(30)
    assert work.wait(timeout=1.0) is True
    work.synchronize()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert "all_reduce" in repr(work)
    assert "done" in repr(work)
    out = [np.zeros(2) for _ in range(size())]
    gathered: Any = dist.all_gather(out, np.full(2, float(me())), async_op=True)
    assert all(a is b for a, b in zip(gathered.result(), out, strict=True))


def awaited() -> list[float]:
    """Several operations awaited at once in an event loop, which is not blocked."""
    groups = [dist.new_group() for _ in range(3)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            if ticks == 6 and me() != 0:
                send_word(0)
            await asyncio.sleep(0.005)

    async def main() -> list[float]:
        ticking = asyncio.ensure_future(tick())
        if me() == 0:  # comes when the other ranks' loops have gone on while they wait
            for _ in range(size() - 1):
                await asyncio.to_thread(await_word)
        works: list[Any] = [
            dist.all_reduce(np.full(3, k + 1.0), group=g, async_op=True) for k, g in enumerate(groups)
        ]

        async def one(work: Any) -> float:
            return float((await work)[0][0])

        results = await asyncio.gather(*(one(w) for w in works))
        ticking.cancel()
        return list(results)

    results = asyncio.run(main())
    assert ticks > (5 if me() else 0)
    for g in groups:
        dist.destroy_process_group(g)
    return results


def failing() -> list[Any]:
    """Every method of Work reports a failure."""
    group = dist.new_group()
    x = np.ones(3 if me() == 0 else 4)
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    later: Any = dist.all_reduce(np.ones(2), group=group, async_op=True)
    future = work.get_future()
    first = failure_of(work.wait)
    seen = [
        first,
        failure_of(work.synchronize),
        failure_of(lambda: future.result(30)),
        failure_of(work.result),
    ]
    seen.append(failure_of(later.wait))
    seen.append(failure_of(lambda: dist.all_reduce(np.ones(2), group=group)))

    async def main() -> Any:
        return await work

    seen.append(failure_of(lambda: asyncio.run(main())))
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is not None
    dist.destroy_process_group(group)
    assert total() == sum(range(size()))
    return seen


def dropped() -> list[str]:
    """A Work that is never waited for gives a warning; its arrays are kept until it is done."""
    group = dist.new_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if me() == 0:
            x = np.arange(100_000.0)
            dist.all_reduce(x, group=group, async_op=True)
            del x
            dist.barrier()
        else:
            dist.barrier()
            y = np.zeros(100_000)
            dist.all_reduce(y, group=group)
            assert (y == np.arange(100_000.0)).all()
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return [f"{w.category.__name__}: {w.message}" for w in caught]


def calls_from_callbacks() -> float:
    """A callback of a future may start the next operation."""
    x, y = np.ones(3), np.ones(3)
    second: Future[Any] = Future()
    work: Any = dist.all_reduce(x, async_op=True)
    work.get_future().add_done_callback(lambda f: second.set_result(dist.all_reduce(y, async_op=True)))
    following: Any = second.result(30)
    following.wait()
    return float(y[0])


def destroyed_with_work_in_flight() -> tuple[bool, float]:
    """destroy completes the operations posted before it."""
    group = dist.new_group()
    x = np.full(1000, me() + 1.0)
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    if me() == 0:
        time.sleep(0.2)
    dist.destroy_process_group(group)
    work.wait()
    return work.is_success(), float(x[0])


def aborted() -> list[Failure | None]:
    """One rank aborts a group in which the other ranks wait."""
    group = dist.new_group()
    dist.barrier()
    if me() == 0:
        time.sleep(0.2)
        group.abort("the test says so")
    failures = [failure_of(lambda: dist.all_reduce(np.ones(2), group=group)) for _ in range(2)]
    dist.destroy_process_group(group)
    assert total() == sum(range(size()))
    return failures


def blocking_calls_from_callbacks(queued: int) -> tuple[list[float], list[int]]:
    """A callback makes blocking and asynchronous calls of its group, while only rank 0 has more calls in the queue."""
    group = dist.new_group()
    x, y, z = np.ones(200_000), np.ones(3), np.ones(5)
    later = [np.ones(4) for _ in range(queued)]
    works: list[Any] = []
    ended = threading.Event()

    def nested() -> None:
        dist.all_reduce(y, group=group)
        work: Any = dist.all_reduce(z, group=group, async_op=True)
        work.wait()
        ended.set()

    work: Any = dist.all_reduce(x, group=group, async_op=True)
    work.add_done_callback(nested)
    if me() == 0:
        works += [dist.all_reduce(a, group=group, async_op=True) for a in later]
        assert ended.wait(30)
    else:
        assert ended.wait(30)
        works += [dist.all_reduce(a, group=group, async_op=True) for a in later]
    for one in works:
        one.wait()
    dist.destroy_process_group(group)
    return [float(a[0]) for a in (x, y, z, *later)], [one._calls[0].seq for one in works]


# --- tests ------------------------------------------------------------------------------------------

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_order_is_kept(size: int, pool: Pools) -> None:
    pool(size).run(in_order, 60)


def test_it_goes_on_in_the_background(pool: Pools) -> None:
    for rank, (early, done) in enumerate(pool(2).run(in_background)):
        assert done
        assert rank > 0 or not early


@pytest.mark.parametrize("size", [1, 3])
def test_every_method_of_work(size: int, pool: Pools) -> None:
    pool(size).run(work_methods)


def test_await(pool: Pools) -> None:
    assert pool(2).run(awaited) == [[2.0, 4.0, 6.0]] * 2


def test_a_failure_shows_everywhere(pool: Pools) -> None:
    for seen in pool(3).run(failing):
        assert len(seen) == 7
        for failure in seen:
            assert failure is not None
            assert failure.type == "CollectiveMismatchError", failure.traceback
            assert failure.message == seen[0].message


def test_a_dropped_work_is_complained_about_and_done_all_the_same(pool: Pools) -> None:
    first, second = pool(2).run(dropped)
    assert len(first) == 1
    assert first[0].startswith(
        "ResourceWarning: a Work was dropped without wait(): all_reduce(float64[100000]"
    )
    assert second == []


def test_a_callback_may_start_the_next(pool: Pools) -> None:
    assert pool(2).run(calls_from_callbacks) == [2.0, 2.0]


def test_calls_of_a_callback_come_before_what_is_queued(pool: Pools) -> None:
    assert pool(2).run(blocking_calls_from_callbacks, 3) == [([2.0] * 6, [4, 5, 6])] * 2


def test_destroy_finishes_what_was_posted(pool: Pools) -> None:
    assert pool(3).run(destroyed_with_work_in_flight) == [(True, 6.0)] * 3


def test_abort_ends_the_group_everywhere(pool: Pools) -> None:
    for failures in pool(3).run(aborted):
        for failure in failures:
            assert failure is not None
            assert failure.type == "GroupAbortedError", failure.traceback
            assert "the test says so" in failure.message
