"""Groups: making, splitting, using several at once, ending, and joining the job again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unicoll as dist
from tests.conformance import group_jobs as jobs
from tests.conformance.group_jobs import total
from tests.support.calls import COLLECTIVES, invoke
from tests.support.on_ranks import on_ranks
from tests.support.ranks import Pool, ProcessJob, end_cleanly
from tests.support.worker import enter

Pools = Callable[[int], Pool]


@pytest.mark.parametrize("size", [1, 3])
def test_the_world_knows_itself(size: int, pool: Pools) -> None:
    for rank, facts in enumerate(pool(size).run(jobs.facts)):
        assert facts["rank"] == (rank,) * 3
        assert facts["size"] == (size,) * 3
        assert facts["ranks"] == (list(range(size)),) * 3
        assert facts["backend"] == ("gloo",) * 3
        assert facts["initialized"]
        assert facts["count"] == 1
        assert f"rank {rank} of {size}" in facts["explained"]
        assert "gloo" in facts["explained"]


@pytest.mark.parametrize(
    ("members", "sort"),
    [([0, 1, 2, 3], True), ([1, 3], True), ([3, 0, 2], True), ([3, 0, 2], False), ([2], True)],
)
@on_ranks(4)
def test_a_group_of_some(members: list[int], sort: bool) -> None:
    """Its collectives stay inside."""
    me = dist.get_rank()
    group: Any = dist.new_group(members, sort_ranks=sort, group_desc="some")
    order = sorted(members) if sort else members
    if me not in members:
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        assert group is outside
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning):
                dist.all_reduce(np.ones(1), group=group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert dist.all_reduce(np.ones(1), group=group, async_op=True) is None
        return
    assert dist.get_process_group_ranks(group) == order
    for i, r in enumerate(order):
        assert dist.get_group_rank(group, r) == i
        assert dist.get_global_rank(group, i) == r
    assert group.rank() == order.index(me)
    assert total(group) == sum(members)
    x = np.array([me])
    dist.broadcast(x, src=order[-1], group=group)
    assert x[0] == order[-1]
    x[0] = me
    dist.broadcast(x, group_src=0, group=group)
    assert x[0] == order[0]
    parts = [np.zeros(1, np.int64) for _ in order]
    dist.all_gather(parts, np.array([me]), group=group)
    assert [int(p[0]) for p in parts] == order
    for name in COLLECTIVES:
        invoke(name, group, root=len(order) - 1)
    dist.destroy_process_group(group)
    with pytest.raises(dist.GroupAbortedError):
        dist.all_reduce(np.ones(1), group=group)


@on_ranks(4)
def test_a_group_that_only_its_members_make() -> None:
    """Twice, for two different groups."""
    if dist.get_rank() not in (1, 2):
        with pytest.raises(dist.DistArgumentError) as caught:
            dist.new_group([1, 2], use_local_synchronization=True)
        assert caught.type is dist.DistArgumentError
        return
    one: Any = dist.new_group([1, 2], use_local_synchronization=True)
    two: Any = dist.new_group([1, 2], use_local_synchronization=True)
    assert one.name != two.name
    assert (total(one), total(two)) == (3.0, 3.0)
    dist.destroy_process_group(one)
    assert total(two) == 3.0
    dist.destroy_process_group(two)


@on_ranks(4)
def test_subgroups() -> None:
    """By size and by enumeration."""
    me = dist.get_rank()
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    assert mine is every[me // 2]
    assert total(mine) == (1 if me < 2 else 5)
    other, every = dist.new_subgroups_by_enumeration([[0, 3], [2, 1]])
    assert total(other) == 3
    only, every = dist.new_subgroups_by_enumeration([[1, 2]])
    assert (only is None) == (me in (0, 3))
    if only is not None:
        assert total(only) == 3
    nested, _ = dist.new_subgroups(1, group=mine) if me < 2 else (None, None)
    if me >= 2:
        dist.new_group([2])
        dist.new_group([3])
    else:
        assert nested is not None
        assert total(nested) == me
    attempts: list[Callable[[], Any]] = [
        lambda: dist.new_subgroups(3),
        lambda: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
        lambda: dist.new_group([0, 0]),
        lambda: dist.new_group([]),
        lambda: dist.new_group([9]),
    ]
    for bad in attempts:
        with pytest.raises(dist.DistArgumentError) as caught:
            bad()
        assert caught.type is dist.DistArgumentError
    assert total() == 6


def test_splits(pool: Pools) -> None:
    pool(4).run(jobs.splits)


def test_pickled_objects(pool: Pools) -> None:
    pool(3).run(jobs.pickled_objects)


@pytest.mark.parametrize("size", [2, 3, 4])
@on_ranks()
def test_overlapping_groups_work_at_the_same_time(size: int) -> None:
    """Each used by a thread of its own."""
    n, me = size, dist.get_rank()
    lists = [
        list(range(n)),
        list(range(n)),
        *([r, (r + 1) % n] for r in range(n) if n > 2),
        list(range(n - 1)),
    ]
    groups = [(members, dist.new_group(members)) for members in lists]
    wrong: list[str] = []

    def work(k: int, members: list[int], group: Any) -> None:
        try:
            for i in range(25):
                count = (k * 37 + i * 1013) % 40_000
                x = np.full(count, k + i + 1.0)
                dist.all_reduce(x, group=group)
                if not (x == (k + i + 1) * len(members)).all():
                    wrong.append(f"group {k}, round {i}")
                y = np.full(3, me)
                dist.broadcast(y, group_src=i % len(members), group=group)
                if y[0] != sorted(members)[i % len(members)]:
                    wrong.append(f"group {k}, round {i}: broadcast {y}")
        except Exception as e:
            wrong.append(f"group {k}: {e!r}")

    threads = [
        threading.Thread(target=work, args=(k, members, group))
        for k, (members, group) in enumerate(groups)
        if me in members
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for _, group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    assert not wrong, wrong


@on_ranks(4)
def test_groups_shrink_by_ranks_of_theirs() -> None:
    """A group of the world without a rank, by the method, and one of that without another, by the function."""
    me = dist.get_rank()
    for excluded, words in (
        ([], "^[^:]*: ranks is empty$"),
        ([0, 0], r"^[^:]*: ranks \[0, 0\] has duplicates$"),
        ([9], "^[^:]*: 9 is not a rank of a world of 4$"),
        ([me], "the caller is among the excluded"),
    ):
        with pytest.raises(dist.DistArgumentError, match=words):
            dist.shrink_group(excluded)
    pg: Any = dist.group.WORLD
    if me != 1:
        first = pg.shrink([1])
        assert (first.ranks, first.rank(), total(first)) == ((0, 2, 3), (0, 2, 3).index(me), 5.0)
        if me != 3:
            second: Any = dist.shrink_group([2], first)
            assert (second.ranks, total(second)) == ((0, 2), 2.0)
            dist.destroy_process_group(second)
        dist.destroy_process_group(first)
    again = dist.split_group(None, [[0, 1, 2, 3]])
    assert total(again) == 6.0
    assert total() == 6.0


@on_ranks(3)
def test_fifty_groups() -> None:
    """Alive at once, used in turn and all in flight together, twice: no threads of groups live on."""
    threads = []
    for _ in range(2):
        groups: list[Any] = [dist.new_group() for _ in range(50)]
        for g in groups:
            assert total(g) == 3.0
        xs = [np.full(5, i) for i in range(50)]
        works: list[Any] = [
            dist.all_reduce(x, group=g, async_op=True) for x, g in zip(xs, groups, strict=True)
        ]
        for w in reversed(works):
            w.wait()
        assert all((x == i * 3).all() for i, x in enumerate(xs))
        alive = dist.get_pg_count()
        for g in groups[::2] + groups[1::2]:
            dist.destroy_process_group(g)
        assert dist.get_pg_count() == alive - 50
        threads.append(threading.active_count())
    assert threads[1] <= threads[0], threads


@on_ranks(2)
def test_a_second_init_is_refused() -> None:
    with pytest.raises(dist.DistArgumentError, match="exists already") as caught:
        enter()
    assert caught.type is dist.DistArgumentError
    assert total() == 1.0


def test_an_end_without_a_job_is_refused() -> None:
    with pytest.raises(dist.NotInitializedError, match="destroy_process_group: there is no default"):
        dist.destroy_process_group()


@pytest.mark.every(n=2)
@pytest.mark.parametrize("join", ["file", "tcp", "env"])
@pytest.mark.parametrize("size", [1, 3])
def test_leaving_and_joining_five_times(join: str, size: int, tmp_path: Path) -> None:
    with ProcessJob(size, join=join) as job:
        job.call(enter)
        job.results()
        job.call(jobs.again, 5, str(tmp_path))
        job.results()
        end_cleanly(job)
