"""What the ranks of test_asyncio.py do: ``python awaiting.py NAME``; each prints ``NAME ok`` when all was right."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np

import unicoll as dist

Array = Any


def background(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def all_reduce(data: Array, **how: Any) -> dist.Work:
    return background(dist.all_reduce(data, async_op=True, **how))


async def failure(work: dist.Work) -> BaseException | None:
    """The exception that awaiting ``work`` raises."""
    try:
        await work
    except dist.DistError as error:
        return error
    return None


async def gives_the_outputs() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = np.full(1000, rank + 1.0)
    (same,) = await all_reduce(data)
    assert same is data
    assert (data == size * (size + 1) / 2).all()
    pieces = [np.zeros(2, np.int64) for _ in range(size)]
    work = background(dist.all_gather(pieces, np.full(2, rank), async_op=True))
    outputs = await work
    assert all(a is b for a, b in zip(outputs, pieces, strict=True))
    assert [int(p[0]) for p in pieces] == list(range(size))
    assert await work == outputs  # once more, when it is long done


async def several_at_once() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(3)]
    data = [np.full(50_000, rank + float(i)) for i in range(6)]
    received = np.zeros(10)
    works = [all_reduce(x, group=groups[i % 3]) for i, x in enumerate(data)]
    works.append(background(dist.isend(np.full(10, float(rank)), (rank + 1) % size)))
    works.append(background(dist.irecv(received)))  # from anyone
    await asyncio.gather(*works)
    for i, x in enumerate(data):
        assert (x == sum(r + i for r in range(size))).all()
    assert works[-1].source_rank() == (rank - 1) % size == received[0]


async def a_mismatch() -> None:
    work = all_reduce(np.zeros(3 + dist.get_rank()))
    error = await failure(work)
    assert isinstance(error, dist.CollectiveMismatchError)
    assert work.exception() is error
    assert work.is_completed()
    assert not work.is_success()
    assert "rank 0: all_reduce(float64[3], SUM) #1" in str(error)
    assert "rank 1: all_reduce(float64[4], SUM) #1" in str(error)


async def a_deadline() -> None:
    group = dist.new_group()
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)  # rank 0 sends when it has given up
        return
    error = await failure(all_reduce(np.zeros(3), group=group, timeout=0.5))
    assert isinstance(error, dist.OperationTimeoutError)
    assert "missing: rank 1" in str(error)
    dist.send(np.zeros(1), 1)


async def giving_up_waiting_leaves_the_operation_alone() -> None:
    data = np.ones(3)
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)
        await all_reduce(data)
    else:
        work = all_reduce(data)
        try:
            await asyncio.wait_for(work, 0.05)
            raise AssertionError("rank 1 cannot have come")
        except asyncio.TimeoutError:
            pass
        assert not work.is_completed()
        dist.send(np.zeros(1), 1)
        await work
    assert (data == dist.get_world_size()).all()


async def the_loop_runs_on() -> None:
    """Rank 1 joins in only after rank 0's loop has turned many times with the operation pending."""
    data = np.ones(100_000)
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)
        await all_reduce(data)
        return

    async def turn(pending: dist.Work) -> int:
        turns = 0
        while turns < 50:
            assert not pending.is_completed()
            await asyncio.sleep(0.001)
            turns += 1
        await background(dist.isend(np.zeros(1), 1))
        return turns

    work = all_reduce(data)
    turns, _ = await asyncio.gather(turn(work), work)
    assert turns == 50
    assert (data == 2).all()


async def from_another_thread() -> None:
    data, seen = np.full(1000, 1.0), []
    work = all_reduce(data)
    future = work.get_future()
    assert isinstance(future, Future)
    assert work.get_future() is future
    future.add_done_callback(lambda done: seen.append(done.result()[0]))

    def wait_there() -> None:
        seen.append(work.get_future().result(timeout=60)[0])

    thread = threading.Thread(target=wait_there)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [x is data for x in seen] == [True, True]
    assert (data == dist.get_world_size()).all()


async def loops_of_several_threads() -> None:
    groups = [dist.new_group() for _ in range(3)]
    results: list[float] = [0.0] * 3

    def run_a_loop(i: int) -> None:
        async def reduce() -> None:
            for _ in range(10):
                data = np.full(100, float(i))
                await all_reduce(data, group=groups[i])
                results[i] += data[0]

        asyncio.run(reduce())

    threads = [threading.Thread(target=run_a_loop, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert results == [10.0 * i * dist.get_world_size() for i in range(3)]


async def a_group_that_is_aborted() -> None:
    if dist.get_rank() == 1:
        dist.recv(np.zeros(1), 0)
        group = dist.group.WORLD
        assert group is not None
        group.abort("the test says so")
        return
    work = all_reduce(np.zeros(3))
    dist.send(np.zeros(1), 1)
    error = await failure(work)
    assert isinstance(error, dist.GroupAbortedError)
    assert "the test says so" in str(error)
    assert error.rank == 1


SCENARIOS = (
    gives_the_outputs,
    several_at_once,
    a_mismatch,
    a_deadline,
    giving_up_waiting_leaves_the_operation_alone,
    the_loop_runs_on,
    from_another_thread,
    loops_of_several_threads,
    a_group_that_is_aborted,
)


def main() -> None:
    name = sys.argv[1]
    (scenario,) = [s for s in SCENARIOS if s.__name__ == name]
    dist.init_process_group("gloo", timeout=60)
    asyncio.run(scenario())
    print(name, "ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
