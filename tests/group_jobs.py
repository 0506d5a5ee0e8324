"""What ranks do in the tests of groups and of asynchronous operations."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import ranks
from calls import COLLECTIVES, invoke
from ranks import Failure

import unicoll as dist


def me() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def total(group: Any = None) -> float:
    """The sum of the global ranks of a group's members, by all_reduce."""
    x = np.array([float(me())])
    dist.all_reduce(x, group=group)
    return float(x[0])


def failure_of(call: Callable[[], Any]) -> Failure | None:
    try:
        call()
    except Exception as error:
        return Failure.of(error)
    return None


# --- groups ---------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What the world group says of itself."""
    pg = dist.group.WORLD
    assert pg is not None
    assert pg is dist.GroupMember.WORLD
    return {
        "rank": (pg.rank(), dist.get_rank(), dist.get_rank(pg)),
        "size": (pg.size(), dist.get_world_size(), dist.get_world_size(pg)),
        "ranks": (list(pg.ranks), dist.get_process_group_ranks(pg), dist.get_process_group_ranks(None)),
        "backend": (dist.get_backend(), dist.get_backend(pg), pg.backend_name),
        "initialized": dist.is_initialized(),
        "count": dist.get_pg_count(),
        "explained": dist.explain(),
    }


def subset_of(members: list[int], sort: bool) -> Any:
    """Facts of a group of some ranks, and that its collectives stay inside; None outside it."""
    group = dist.new_group(members, sort_ranks=sort, group_desc="some")
    order = sorted(members) if sort else members
    if me() not in members:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            failure = failure_of(lambda: dist.all_reduce(np.ones(1), group=group))
        assert failure is not None
        assert failure.type == "UserWarning"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dist.all_reduce(np.ones(1), group=group, async_op=True) is None
        return None
    assert dist.get_process_group_ranks(group) == order
    for i, r in enumerate(order):
        assert dist.get_group_rank(group, r) == i
        assert dist.get_global_rank(group, i) == r
    assert group.rank() == order.index(me())
    assert total(group) == sum(members)
    x = np.array([me()])
    dist.broadcast(x, src=order[-1], group=group)
    assert x[0] == order[-1]
    x[0] = me()
    dist.broadcast(x, group_src=0, group=group)
    assert x[0] == order[0]
    parts = [np.zeros(1, np.int64) for _ in order]
    dist.all_gather(parts, np.array([me()]), group=group)
    assert [int(p[0]) for p in parts] == order
    for name in COLLECTIVES:
        invoke(name, group, root=len(order) - 1)
    dist.destroy_process_group(group)
    gone = failure_of(lambda: dist.all_reduce(np.ones(1), group=group))
    assert gone is not None
    assert gone.type == "GroupAbortedError"
    return "member"


def local_group(members: list[int]) -> Any:
    """Only the members call new_group; twice, for two different groups."""
    if me() not in members:
        failure = failure_of(lambda: dist.new_group(members, use_local_synchronization=True))
        assert failure is not None
        assert failure.type == "DistArgumentError"
        return None
    one = dist.new_group(members, use_local_synchronization=True)
    two = dist.new_group(members, use_local_synchronization=True)
    assert one.name != two.name
    result = total(one), total(two)
    dist.destroy_process_group(one)
    assert total(two) == result[1]
    dist.destroy_process_group(two)
    return result


def subgroups() -> None:
    """new_subgroups, by size and by enumeration, on 4 ranks."""
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    assert mine is every[me() // 2]
    assert total(mine) == (1 if me() < 2 else 5)
    other, every = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    assert total(other) == 3
    only, every = dist.new_subgroups_by_enumeration([[1, 2]])
    assert (only is None) == (me() in (0, 3))
    if only is not None:
        assert total(only) == 3
    nested, _ = dist.new_subgroups(1, group=mine) if me() < 2 else (None, None)
    if me() >= 2:
        dist.new_group([2])
        dist.new_group([3])
    else:
        assert nested is not None
        assert total(nested) == me()
    for bad in (lambda: dist.new_subgroups(3), lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
                lambda: dist.new_group([0, 0]), lambda: dist.new_group([]), lambda: dist.new_group([9])):  # fmt: skip
        failure = failure_of(bad)
        assert failure is not None
        assert failure.type == "DistArgumentError"
    assert total() == 6


def splits() -> None:
    """split_group, and of a part again, on 4 ranks."""
    part = dist.split_group(None, [[0, 2], [1, 3]])
    assert part is not None
    assert part.ranks == ((0, 2) if me() % 2 == 0 else (1, 3))
    assert total(part) == sum(part.ranks)
    alone = dist.split_group(part, [[1], [0]])
    assert alone is not None
    assert total(alone) == me()
    some = dist.split_group(None, [[3, 1]])
    assert (some is None) == (me() % 2 == 0)
    if some is not None:
        assert total(some) == 4
    for bad in ([], [[0], [0]], [[7]]):
        failure = failure_of(lambda b=bad: dist.split_group(None, b))  # type: ignore[misc]
        assert failure is not None
        assert failure.type == "DistArgumentError"
    assert total() == 6


def concurrent_groups(rounds: int) -> list[str]:
    """Overlapping groups, each used by a thread of its own, all at once; what went wrong."""
    n = size()
    lists = [list(range(n)), list(range(n)), *([r, (r + 1) % n] for r in range(n) if n > 2), list(range(n - 1))]
    groups = [(members, dist.new_group(members)) for members in lists]
    wrong: list[str] = []

    def work(k: int, members: list[int], group: Any) -> None:
        try:
            for i in range(rounds):
                count = (k * 37 + i * 1013) % 40_000
                x = np.full(count, k + i + 1.0)
                dist.all_reduce(x, group=group)
                if not (x == (k + i + 1) * len(members)).all():
                    wrong.append(f"group {k}, round {i}")
                y = np.full(3, me())
                dist.broadcast(y, group_src=i % len(members), group=group)
                if y[0] != sorted(members)[i % len(members)]:
                    wrong.append(f"group {k}, round {i}: broadcast {y}")
        except Exception as e:
            wrong.append(f"group {k}: {e!r}")

    threads = [
        threading.Thread(target=work, args=(k, members, group))
        for k, (members, group) in enumerate(groups)
        if me() in members
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for _, group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    return wrong


def many_groups(count: int) -> int:
    """Many groups alive at once, used in turn and all in flight together."""
    groups = [dist.new_group() for _ in range(count)]
    for g in groups:
        assert total(g) == sum(range(size()))
    xs = [np.full(5, i) for i in range(count)]
    works = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(xs, groups, strict=True)]
    for w in reversed(works):
        assert w is not None
        w.wait()
    assert all((x == i * size()).all() for i, x in enumerate(xs))
    alive = dist.get_pg_count()
    for g in groups[::2] + groups[1::2]:
        dist.destroy_process_group(g)
    assert dist.get_pg_count() == alive - count
    return threading.active_count()


def again(times: int, folder: str) -> list[list[str]]:
    """Leave and join again and again; what each time left behind."""
    left = [ranks.leave()]
    for i in range(times):
        if ranks._init.startswith("file"):
            ranks._init = f"file://{folder}/store-{i}" if i % 2 else ranks._init
        ranks.enter()
        for name in COLLECTIVES:
            invoke(name)
        group = dist.new_group()
        assert total(group) == total() == sum(range(size()))
        left.append(ranks.leave())
    ranks.enter()
    return left


def twice_refused() -> Failure | None:
    failure = failure_of(ranks.enter)
    assert total() == sum(range(size()))
    return failure


# --- asynchronous operations --------------------------------------------------------------------------------------------


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
    """The call returns before the others have come, and goes on while this rank does something else."""
    x = np.ones(10)
    if me() != 0:
        time.sleep(0.5)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    early = work.is_completed()
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.005)
    done = work.is_completed()
    work.wait()
    assert (x == size()).all()
    return early, done


def work_methods() -> None:
    """Every method of Work, on an operation that goes well."""
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
    """Several operations awaited at once in an event loop, which stays alive."""
    groups = [dist.new_group() for _ in range(3)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    async def main() -> list[float]:
        ticking = asyncio.ensure_future(tick())
        if me() == 0:
            await asyncio.sleep(0.2)
        works: list[Any] = [dist.all_reduce(np.full(3, k + 1.0), group=g, async_op=True) for k, g in enumerate(groups)]

        async def one(work: Any) -> float:
            return float((await work)[0][0])

        results = await asyncio.gather(*(one(w) for w in works))
        ticking.cancel()
        return list(results)

    results = asyncio.run(main())
    assert ticks > 5
    for g in groups:
        dist.destroy_process_group(g)
    return results


def failing() -> list[Any]:
    """A failure shows in every method of Work."""
    group = dist.new_group()
    x = np.ones(3 if me() == 0 else 4)
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    later: Any = dist.all_reduce(np.ones(2), group=group, async_op=True)
    future = work.get_future()
    first = failure_of(work.wait)
    seen = [first, failure_of(work.synchronize), failure_of(lambda: future.result(30)), failure_of(work.result)]
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
    """A Work that nobody waits for is complained about, and its arrays are kept until it is done."""
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
    work.get_future().add_done_callback(
        lambda f: second.set_result(dist.all_reduce(y, async_op=True))  # type: ignore[func-returns-value]
    )
    following: Any = second.result(30)
    following.wait()
    return float(y[0])


def destroyed_with_work_in_flight() -> tuple[bool, float]:
    """What was posted before destroy is finished by it, since the others take part."""
    group = dist.new_group()
    x = np.full(1000, me() + 1.0)
    work: Any = dist.all_reduce(x, group=group, async_op=True)
    if me() == 0:
        time.sleep(0.2)
    dist.destroy_process_group(group)
    work.wait()
    return work.is_success(), float(x[0])


def aborted() -> list[Failure | None]:
    """One rank aborts a group that the others wait in."""
    group = dist.new_group()
    dist.barrier()
    if me() == 0:
        time.sleep(0.2)
        group.abort("the test says so")
    stories = [failure_of(lambda: dist.all_reduce(np.ones(2), group=group)) for _ in range(2)]
    dist.destroy_process_group(group)
    assert total() == sum(range(size()))
    return stories


def pid() -> int:
    return os.getpid()
