"""``await work`` beside other coroutines and event loops; tests/conformance/test_async.py has results and errors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

import unicoll as dist
from tests.support.ranks import run_ranks


def started(work: Any) -> Any:
    assert work is not None
    return work


async def messages_and_reductions_at_once() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    received, data = np.zeros(10), np.full(50_000, float(rank))
    works = [started(dist.all_reduce(data, async_op=True))]
    works.append(started(dist.isend(np.full(10, float(rank)), (rank + 1) % size)))
    works.append(started(dist.irecv(received)))  # from anyone
    await asyncio.gather(*works)
    assert (data == sum(range(size))).all()
    assert works[-1].source_rank() == (rank - 1) % size == received[0]


async def a_wait_that_ends_leaves_the_operation_alone() -> None:
    data = np.ones(3)
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)
        await started(dist.all_reduce(data, async_op=True))
    else:
        work = started(dist.all_reduce(data, async_op=True))
        try:
            await asyncio.wait_for(work, 0.05)
            raise AssertionError("rank 1 has not called")
        except TimeoutError:
            pass
        assert not work.is_completed()
        dist.send(np.zeros(1), 1)
        await work
        (again,) = await work
        assert again is data
    assert (data == 2).all()


def loops_of_several_threads() -> None:
    groups = [dist.new_group() for _ in range(3)]
    results = [0.0] * 3

    async def reduce(i: int) -> None:
        for _ in range(10):
            data = np.full(100, float(i))
            await started(dist.all_reduce(data, group=groups[i], async_op=True))
            results[i] += data[0]

    threads = [threading.Thread(target=lambda i=i: asyncio.run(reduce(i))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [10.0 * i * dist.get_world_size() for i in range(3)]


def use() -> None:
    asyncio.run(messages_and_reductions_at_once())
    asyncio.run(a_wait_that_ends_leaves_the_operation_alone())
    loops_of_several_threads()


def test_awaiting() -> None:
    run_ranks(2, use)
